"""Graphs that give new tensors, against those that write: what they compute and leave is the same."""

from __future__ import annotations

import random

import pytest
import torch
from torch import fx, nn

from autopar.capture.split.writes import new_operator, without_writes
from single_layers import layer_of

aten = torch.ops.aten


def graph_of(module: nn.Module) -> fx.GraphModule:
    found = layer_of(module, torch.ones(2, 3, 4)).module
    assert isinstance(found, fx.GraphModule)
    return found


def writes(module: fx.GraphModule) -> list[str]:
    schemas = ((node, getattr(node.target, "_schema", None)) for node in module.graph.nodes)
    return [str(node.target) for node, schema in schemas if schema is not None and schema.is_mutable]


class Drawn(nn.Module):
    """Writes into and reads tensors that share memory, in an order that is drawn."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.bias = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        draw, tensors = random.Random(self.seed), [x * self.bias]
        for _ in range(draw.randint(2, 7)):
            one, other = draw.choice(tensors), draw.choice(tensors)
            kind = draw.randrange(6)
            if kind == 0:
                tensors.append(one + other)
            elif kind == 1:
                tensors.append(one.view(-1, 3, 4))
            elif kind == 2:
                tensors.append(one.add_(other))
            elif kind == 3:
                tensors.append(one.transpose(1, 2).mul_(2).transpose(1, 2))
            elif kind == 4:
                tensors.append(one.detach().clone().tanh_())
            else:
                tensors.append(draw.choice([one.sigmoid_, one.relu])())
        return sum(draw.sample(tensors, 2 if len(tensors) > 1 else 1), torch.zeros(()))


def run(module: fx.GraphModule, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        (found,) = module(2, x)
    return found


@pytest.mark.parametrize("seed", range(60))
def test_drawn_graphs_compute_the_same_without_writes(seed: int) -> None:
    module, x = graph_of(Drawn(seed)), torch.rand(2, 3, 4)
    assert torch.equal(run(without_writes(module), x.clone()), run(module, x.clone()))


def test_most_writes_that_are_not_seen_are_left_out() -> None:
    modules = [graph_of(Drawn(seed)) for seed in range(30)]
    before = sum(len(writes(module)) for module in modules)
    after = sum(len(writes(without_writes(module))) for module in modules)
    assert before > 20
    assert 0 < after < before / 2


class Input(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(1)


class Buffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.total.add_(x[0, 0])  # type: ignore[operator]


@pytest.mark.parametrize("module", [Input(), Buffer()])
def test_what_others_hold_is_written_into(module: nn.Module) -> None:
    captured = graph_of(module)
    assert writes(without_writes(captured)) == writes(captured) == ["aten.add_.Tensor"]


def test_a_graph_that_writes_nothing_is_the_same_one() -> None:
    module = graph_of(nn.Linear(4, 4))
    assert without_writes(module) is module


def test_an_operator_that_takes_the_type_of_what_it_writes_into_stays() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    x.meta["val"], y.meta["val"] = torch.zeros(2), torch.zeros(2)
    call = graph.call_function(aten.add_.Tensor, (x, y))
    assert new_operator(call) is aten.add.Tensor
    y.meta["val"] = torch.zeros(2, dtype=torch.float64)
    assert new_operator(call) is None
    assert new_operator(graph.call_function(aten.copy_.default, (x, x))) is aten.copy.default
    assert new_operator(graph.call_function(aten.add.Tensor, (x, x))) is None
