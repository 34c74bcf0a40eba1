"""Small Transformers models of many families, with random weights and dropout."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, LENGTH, VOCABULARY, DROP = 64, 8, 12, 97, 0.1

_SIZES = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS}
_SIZES |= {"max_position_embeddings": 16}
_BERT = {**_SIZES, "hidden_dropout_prob": DROP, "attention_probs_dropout_prob": DROP}
_GPT2 = {"n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "n_positions": 16}
_GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), DROP)


def tiny_config(name: str, layers: int, positions: int = 9, **others: object) -> dict[str, object]:
    """Return what config.json has of a tiny ``llama`` or ``gpt2``."""
    if name == "gpt2":
        sizes = {"n_positions": positions, "n_embd": 16, "n_layer": layers, "n_head": 2}
    else:
        # Rotary positions, grouped keys and values, an untied head; gpt2's are learned, and its head the embedding.
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": layers}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": positions}
    return {"model_type": name, "vocab_size": 40, **sizes, **others}


def _keys(heads: int, **others: object) -> dict[str, object]:
    return {**_SIZES, "num_key_value_heads": heads, "attention_dropout": DROP, **others}


_DROPS = {"hidden_dropout": DROP, "attention_dropout": DROP}
_RESIDUAL = {"resid_pdrop": DROP, "embd_pdrop": DROP}
_HALF = {"layers": 2, "attention_heads": HEADS, "ffn_dim": 2 * WIDTH}
_BART = {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in _HALF.items()}
_DISTILBERT = {"dim": WIDTH, "hidden_dim": 2 * WIDTH, "n_layers": 2, "n_heads": HEADS}
_FALCON = {**_SIZES, "new_decoder_architecture": True, "num_kv_heads": 4, "alibi": False, **_DROPS}
_OPT = {**_SIZES, "ffn_dim": 2 * WIDTH, "word_embed_proj_dim": WIDTH, "attention_dropout": DROP}
_T5 = {"d_model": WIDTH, "d_kv": 8, "d_ff": 2 * WIDTH, "num_layers": 2, "num_heads": HEADS, "decoder_start_token_id": 0}

FAMILIES: dict[str, tuple[str, str, Mapping[str, object]]] = {
    "bart": ("Bart", "ForConditionalGeneration", {"d_model": WIDTH, "decoder_start_token_id": 0, **_BART}),
    "bert": ("Bert", "ForMaskedLM", _BERT),
    "bigcode": ("GPTBigCode", "ForCausalLM", {**_GPT2, "multi_query": True}),
    "bloom": ("Bloom", "ForCausalLM", {"hidden_size": WIDTH, "n_layer": 2, "n_head": HEADS, **_DROPS}),
    "clip": ("CLIP", "TextModelWithProjection", {**_SIZES, "projection_dim": WIDTH, "attention_dropout": DROP}),
    "codegen": ("CodeGen", "ForCausalLM", {**_GPT2, "rotary_dim": 4}),
    "distilbert": ("DistilBert", "ForMaskedLM", _DISTILBERT),
    "falcon": ("Falcon", "ForCausalLM", _FALCON),
    "gemma": ("Gemma", "ForCausalLM", _keys(1, head_dim=8)),
    "gemma2": ("Gemma2", "ForCausalLM", _keys(4, head_dim=8)),
    "glm": ("Glm", "ForCausalLM", _keys(2, head_dim=8)),
    "gpt2": ("GPT2", "LMHeadModel", _GPT2),
    "gptj": ("GPTJ", "ForCausalLM", {**_GPT2, "rotary_dim": 4}),
    "llama": ("Llama", "ForCausalLM", _keys(HEADS)),
    "llama-2": ("Llama", "ForCausalLM", _keys(2)),
    "llama-4": ("Llama", "ForCausalLM", _keys(4)),
    "mistral": ("Mistral", "ForCausalLM", _keys(4)),
    "neox": ("GPTNeoX", "ForCausalLM", {**_SIZES, **_DROPS}),
    "opt": ("OPT", "ForCausalLM", _OPT),
    "phi": ("Phi", "ForCausalLM", _keys(HEADS, **_RESIDUAL)),
    "phi3": ("Phi3", "ForCausalLM", _keys(HEADS, **_RESIDUAL)),
    "phi3-2": ("Phi3", "ForCausalLM", _keys(2, **_RESIDUAL)),
    "phi3-4": ("Phi3", "ForCausalLM", _keys(4, **_RESIDUAL)),
    "qwen2": ("Qwen2", "ForCausalLM", _keys(2)),
    "qwen3": ("Qwen3", "ForCausalLM", _keys(4, head_dim=8)),
    "roberta": ("Roberta", "ForMaskedLM", _BERT),
    "starcoder2": ("Starcoder2", "ForCausalLM", _keys(2, residual_dropout=DROP, embedding_dropout=DROP)),
    "t5": ("T5", "ForConditionalGeneration", _T5),
    "vit": ("ViT", "ForImageClassification", {**_BERT, "image_size": 8, "patch_size": 4, "num_labels": 7}),
}
"""By a short name; what follows it is the number of heads of keys."""

EAGER = ("bloom", "codegen", "gemma2", "gptj")
"""Those that Transformers has no fused attention for."""


def family(name: str, attention: str) -> nn.Module:
    """Build a model."""
    transformers = pytest.importorskip("transformers")
    stem, task, settings = FAMILIES[name]
    config = getattr(transformers, f"{stem}TextConfig" if stem == "CLIP" else f"{stem}Config")
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    cache = {} if name in ("clip", "distilbert", "vit") else {"use_cache": False}
    plain = {} if name == "vit" else {"vocab_size": VOCABULARY}
    made = config(**tokens, **cache, **plain, **settings, attn_implementation=attention)
    model: nn.Module = getattr(transformers, f"{stem}{task}")(made)
    return model


def example_of(name: str) -> tuple[dict[str, torch.Tensor], Callable[..., torch.Tensor]]:
    """Return a batch for a model, and its loss."""
    ids = torch.randint(3, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids}
    if name == "vit":
        pixels = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        labels = {"labels": torch.tensor([1, 0, 6])}
        return {"pixel_values": pixels, **labels}, lambda made, batch: F.cross_entropy(made.logits, batch["labels"])
    if name == "clip":
        return batch, lambda made, batch: F.mse_loss(made.text_embeds, torch.ones_like(made.text_embeds))
    if FAMILIES[name][1] == "ForConditionalGeneration":
        return {**batch, "decoder_input_ids": ids.flip(1)}, _same_token
    return batch, _same_token if FAMILIES[name][1] == "ForMaskedLM" else _next_token


def _next_token(output: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:  # noqa: ANN401
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def _same_token(output: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:  # noqa: ANN401
    return F.cross_entropy(output.logits.flatten(0, 1), batch["input_ids"].flatten())
