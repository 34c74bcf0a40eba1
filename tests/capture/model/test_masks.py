"""Transformers models are captured with the attention that they train with, and are right for other batches."""
# ruff: noqa: ANN001, ANN003, ANN201

import pytest
import torch
from torch import fx, nn

from autopar.capture import capture_module
from autopar.capture.model.masks import holds_for_any_batch
from families import LENGTH, example_of, family
from stage_runs import assert_equal_to_plain

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def attentions(graph):
    """Return whether each attention has a mask, and whether it is causal."""
    found = []
    for layer in graph.layers:
        if isinstance(layer.module, fx.GraphModule):
            for node in layer.module.graph.find_nodes(op="call_function", target=ATTENTION):
                given = dict(zip(("q", "k", "v", "mask", "rate", "causal"), node.args, strict=False))
                found.append((given.get("mask") is not None, bool(given.get("causal"))))
    return found


def built(name, **more):
    torch.manual_seed(0)
    model = family(name, "sdpa").double()
    batch, loss = example_of(name)
    return model, {**batch, **more}, loss


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("name", "causal"), [("bert", False), ("vit", False), ("llama-2", True), ("opt", True), ("qwen3", True)]
)
def test_masks_that_mask_nothing_are_left_out(name, causal):
    model, batch, loss = built(name)
    graph = capture_module(model, batch, loss)
    assert attentions(graph) == [(False, causal)] * 2
    assert_equal_to_plain(model, graph, batch, loss, [2], of_loss=1e-12)


def padded(ones):
    """Return a mask of padding behind the last tokens of some samples."""
    mask = torch.ones(3, LENGTH, dtype=torch.int64)
    return mask if ones else mask.masked_fill(torch.arange(LENGTH) >= torch.tensor([[4], [LENGTH], [9]]), 0)


def packed(single):
    """Return the positions of one sequence a sample, or of two."""
    positions = torch.arange(LENGTH).expand(3, -1)
    return positions.clone() if single else torch.where(positions >= 5, positions - 5, positions)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("name", "field", "values"),
    [("bert", "attention_mask", padded), ("llama-2", "attention_mask", padded), ("llama-2", "position_ids", packed)],
)
def test_what_a_batch_says_of_masks_is_read_in_each(name, field, values):
    model, batch, loss = built(name)
    graph = capture_module(model, {**batch, field: values(True)}, loss)
    assert attentions(graph) == [(True, False)] * 2
    for plain in (True, False):
        assert_equal_to_plain(model, graph, {**batch, field: values(plain)}, loss, [2], of_loss=1e-12)


class Positions(nn.Module):
    """Asks of positions, while it is captured, whether they ascend."""

    def __init__(self, positions, tell) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4))
        self.positions, self.tell = positions, tell

    def forward(self, x):
        positions = self.positions(self, x)
        self.tell(holds_for_any_batch(positions, lambda value: bool((value.diff() == 1).all())))
        return self.linear(x) + positions


@pytest.mark.parametrize(
    ("positions", "holds"),
    [
        (lambda self, x: torch.arange(x.shape[1]) + 3, True),
        (lambda self, x: torch.arange(len(x) * 4).view(len(x), 4), True),
        (lambda self, x: torch.arange(4).flip(0), False),
        (lambda self, x: self.table, False),
        (lambda self, x: torch.arange(4) + (x[0] > 100), False),
        (lambda self, x: torch.arange(4) + torch.rand(4).long(), False),
        (lambda self, x: self.linear.weight[0].detach(), False),
    ],
)
def test_what_follows_from_sizes_alone_is_known_while_a_graph_is_captured(positions, holds):
    told = []
    model = Positions(positions, told.append)
    with torch.no_grad():
        torch.export.export(model, (torch.zeros(2, 4),), strict=False)
    assert told == [holds]
    # Where nothing is captured, nothing is known.
    assert not holds_for_any_batch(torch.arange(4), lambda value: True)
