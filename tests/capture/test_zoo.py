"""Transformers models from tiny configurations, cut into 2, 4 and 8 stages, equal the plain model."""
# ruff: noqa: ANN001, ANN201

import copy
import json

import pytest
import torch

from autopar.capture import capture, load, named_tensors, slice_rows
from autopar.capture.batch import rebuild
from autopar.capture.check import check_gradients
from stage_runs import assert_equal_to_plain

pytest.importorskip("transformers", reason="autopar[hf] is not installed")

TEXT = {"vocab_size": 61, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 4}
TEXT |= {"max_position_embeddings": 12, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PAIRS = {"vocab_size": 61, "d_model": 16, "pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1}

CONFIGURATIONS = {
    "GPT2LMHeadModel": {"model_type": "gpt2", "n_layer": 4, "n_embd": 16, "n_head": 2, "n_positions": 12}
    | {"vocab_size": 61, "bos_token_id": 0, "eos_token_id": 1},
    "BertForMaskedLM": {"model_type": "bert", **TEXT},
    "LlamaForCausalLM": {"model_type": "llama", **TEXT, "num_key_value_heads": 1},
    "ViTForImageClassification": {"model_type": "vit", **TEXT, "image_size": 16, "patch_size": 8}
    | {"hidden_dropout_prob": 0.1},
    "ResNetForImageClassification": {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8, 8, 8]}
    | {"depths": [1, 1, 1, 1], "layer_type": "basic", "image_size": 64, "num_labels": 4},
    "MixtralForCausalLM": {"model_type": "mixtral", **TEXT, "num_local_experts": 4, "num_key_value_heads": 1},
    "T5ForConditionalGeneration": {"model_type": "t5", **PAIRS, "d_kv": 8, "d_ff": 16, "num_layers": 2}
    | {"num_heads": 2, "n_positions": 8},
    "BartForConditionalGeneration": {"model_type": "bart", **PAIRS, "max_position_embeddings": 8, "bos_token_id": 2}
    | {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    | {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "forced_eos_token_id": 1},
    "BloomForCausalLM": {"model_type": "bloom", "vocab_size": 61, "hidden_size": 16, "n_layer": 4, "n_head": 2}
    | {"seq_length": 12, "hidden_dropout": 0.1, "bos_token_id": 0, "eos_token_id": 1},
    "AlbertForMaskedLM": {"model_type": "albert", **TEXT, "embedding_size": 8},
}
IN_ANOTHER_ORDER = 1e-6
"""Largest difference, relative to the model's largest gradient, where only the order of a sum differs."""
BIT_FOR_BIT = {"GPT2LMHeadModel", "BertForMaskedLM", "ViTForImageClassification", "ResNetForImageClassification"}


def user_model(name, folder):
    (folder / "config.json").write_text(json.dumps({"architectures": [name], **CONFIGURATIONS[name]}))
    return load(f"hf:{folder}")


def spread(count, stages):
    """Cut ``count`` layers into so many stages of about equal numbers of layers."""
    return tuple(sorted({round(count * part / stages) for part in range(1, stages)} - {0, count}))


@pytest.mark.some(4)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name[:4] != "GPT2")) for name in CONFIGURATIONS]
)
def test_stages_of_a_configured_model_equal_the_plain_model(name, tmp_path):
    user = user_model(name, tmp_path)
    model = user.build(1).train()
    before = copy.deepcopy(model.state_dict())
    graph = capture(user, model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert len(graph.layers) >= 5
    batch = user.load_batch(user.dataset(), range(4))
    check_gradients(model, graph, batch, user.loss)
    tolerance, of_loss = (0, 0) if name in BIT_FOR_BIT else (IN_ANOTHER_ORDER, IN_ANOTHER_ORDER)
    for rows, stages in ((3, 2), (1, 4), (4, 8)):
        part = rebuild(batch, slice_rows(named_tensors(batch), 0, rows))
        assert_equal_to_plain(model, graph, part, user.loss, spread(len(graph.layers), stages), tolerance, of_loss)


def test_blocks_of_a_configured_model_are_alike(tmp_path):
    user = user_model("GPT2LMHeadModel", tmp_path)
    graph = capture(user, user.build())
    blocks = [layer for layer in graph.layers if layer.name.startswith("transformer.h.")]
    names = [f"transformer.h.{index}" for index in range(4)]
    assert [layer.name for layer in graph.layers] == ["transformer.wte", *names, "transformer.ln_f+lm_head"]
    assert len({layer.fingerprint for layer in blocks}) == 1
    assert graph.tied_parameters() == {"transformer.wte.weight": ("transformer.wte", "transformer.ln_f+lm_head")}
    assert graph.loss == "sum_count"
