"""Blocks, embeddings and heads of models, captured as they are: nothing here was written for any of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from autopar.capture.batch import named_tensors
from autopar.capture.export import capture_module
from autopar.capture.graph import Layer, LayerGraph
from autopar.capture.split.rewrite import split_layer
from autopar.examples import gpt
from part_threads import Comparison, compare

CLOSE, WIDTH, HEADS, LENGTH, VOCABULARY = 1e-12, 64, 8, 6, 97


def next_token(output: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:  # noqa: ANN401
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def same_token(output: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:  # noqa: ANN401
    return F.cross_entropy(output.logits.flatten(0, 1), batch["input_ids"].flatten())


def example(width: int = WIDTH) -> nn.Module:
    patch = pytest.MonkeyPatch()
    with patch.context() as changed:
        for name, value in (
            ("BLOCKS", 2),
            ("WIDTH", width),
            ("HEADS", HEADS),
            ("CONTEXT", LENGTH),
            ("BYTES", VOCABULARY),
        ):
            changed.setattr(gpt, name, value)
        return gpt.model()


def transformer(family: str, attention: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    settings: dict[str, Any] = {"vocab_size": VOCABULARY, "use_cache": False, "attn_implementation": attention}
    settings |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if family == "gpt2":
        settings |= {"n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "n_positions": LENGTH}
        settings |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings))
    settings |= {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2}
    settings |= {"num_attention_heads": HEADS, "max_position_embeddings": LENGTH}
    if family == "bert":
        settings |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return transformers.BertForMaskedLM(transformers.BertConfig(**settings))
    settings |= {"num_key_value_heads": {"llama": HEADS, "llama-4": 4, "llama-2": 2, "phi3": HEADS}[family]}
    kind = "Phi3" if family == "phi3" else "Llama"
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**settings))


@functools.cache
def graph_of(family: str, attention: str = "sdpa") -> tuple[LayerGraph, dict[str, tuple[torch.Tensor, ...]]]:
    """Capture a model, and return with it what every layer is given of a batch."""
    torch.manual_seed(0)
    ids = torch.randint(VOCABULARY, (3, LENGTH))
    loss: Callable[..., torch.Tensor]
    if family == "example":
        model, batch, loss = example(), {"tokens": ids, "targets": ids.flip(1)}, gpt.loss
    else:
        model, batch = transformer(family, attention), {"input_ids": ids}
        loss = same_token if family == "bert" else next_token
    graph = capture_module(model.double(), batch, loss)
    tensors, inputs = dict(named_tensors(batch)), dict[str, tuple[torch.Tensor, ...]]()
    for layer in graph.layers:
        inputs[layer.name] = tuple(tensors[name] for name in layer.inputs)
        with torch.no_grad():
            tensors |= dict(zip(layer.outputs, layer.module(len(ids), *inputs[layer.name]), strict=True))
    return graph, inputs


def run(family: str, place: int, count: int, attention: str = "sdpa") -> tuple[Layer, Comparison]:
    graph, inputs = graph_of(family, attention)
    layer = graph.layers[place]
    for parameter in layer.module.parameters():
        parameter.grad = None
    return layer, compare(layer, inputs[layer.name], count)


CASES = [(family, "sdpa") for family in ("example", "gpt2", "bert", "llama", "llama-4", "llama-2", "phi3")]
CASES += [("gpt2", "eager"), ("bert", "eager"), ("llama-2", "eager")]
SUMMED = 3 * LENGTH * WIDTH
"""How many numbers go between blocks."""


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(("family", "attention"), CASES)
def test_a_block_is_split_with_two_sums_forwards_and_two_backwards(family: str, attention: str, count: int) -> None:
    layer, found = run(family, 1, count, attention)
    assert found.error < CLOSE
    assert found.split_share > 0.98
    sizes = [torch.Size(shape).numel() for shape in found.backward]
    assert [torch.Size(shape).numel() for shape in found.forward] == [SUMMED, SUMMED]
    assert [size for size in sizes if size == SUMMED] == [SUMMED, SUMMED]
    # Of two key heads, four parts have two each: pairs of them sum the gradients of projections.
    pairs = 2 if family == "llama-2" and count == 4 else 0
    assert len(sizes) == 2 + pairs
    matrices = {name: found.parameters[name] for name in layer.parameters if layer.parameter(name).dim() == 2}
    assert all(matrices.values())


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("family", ["example", "gpt2", "bert", "llama"])
@pytest.mark.parametrize("place", [0, 3])
def test_embeddings_and_heads_are_split_by_a_vocabulary_that_parts_do_not_divide(
    family: str, place: int, count: int
) -> None:
    layer, found = run(family, place, count)
    assert found.error < CLOSE
    tables = [name for name in layer.parameters if layer.parameter(name).shape[0] == VOCABULARY]
    assert tables
    assert all(found.parameters[name] for name in tables)
    if place == 3:
        # A head of two matrices has two regions.
        assert len(found.forward) == len(found.backward) == (2 if family == "bert" else 1)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("family", ["example", "gpt2", "bert", "llama", "phi3"])
def test_a_part_of_a_block_computes_its_share(family: str, count: int) -> None:
    graph, inputs = graph_of(family, "eager")
    layer = graph.layers[1]
    whole = operations(layer.module, inputs[layer.name])
    for index in range(count):
        part = split_layer(layer, Alone(), index, count)
        assert 0 < operations(part.module, inputs[layer.name]) <= 1.02 * whole / count


class Alone:
    """Sums of a part that nobody else is there for."""

    def sum(self, tensor: torch.Tensor, parts: tuple[int, ...]) -> torch.Tensor:
        """See :class:`autopar.capture.split.sums.Sums`."""
        return tensor.clone()


def operations(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> int:
    """Count what a forward and a backward compute, as torch does."""
    with FlopCounterMode(display=False) as counter:
        leaves = [each.clone().requires_grad_(each.is_floating_point()) for each in inputs]
        module(len(inputs[0]), *leaves)[0].sum().backward()
    return counter.get_total_flops()


def test_eight_parts_share_two_key_heads_in_fours() -> None:
    _, found = run("llama-2", 1, 8)
    assert found.error < CLOSE
    assert (2, 4) in {split.counts for split in found.splits}
