"""What is found of a layer's dimensions, and what forbids to split them; and graphs without their writes."""

import functools
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from autopar.capture.graph import Layer
from autopar.capture.split.analysis import Analysis, analyse, new_operator, without_writes
from autopar.capture.split.choice import choose
from autopar.capture.split.names import Name, leaves
from autopar.capture.split.rewrite import split_layer
from capture_zoo import Made
from single_layers import between, layer_of

Function = Callable[[torch.Tensor], torch.Tensor]


def split_names(analysis: Analysis) -> set[Name]:
    return {name for split in choose(analysis, 2) for name in split.names}


def chain(function: Function) -> Layer:
    return layer_of(between(function), torch.zeros(2, 3, 4))


@pytest.mark.parametrize(
    "function",
    [
        F.gelu,
        lambda x: x * x.new_ones([]) * 2 + 1,
        lambda x: F.dropout(x, 0.5),
        lambda x: F.dropout(F.relu(x, inplace=True), 0.5, inplace=True),
        lambda x: x * (torch.rand_like(x) < 0.5),
        lambda x: x.transpose(0, 1).transpose(0, 1),
        lambda x: x.view(-1, 3, 3, 2).flatten(2),
    ],
)
def test_what_keeps_numbers_in_their_places_lets_them_be_split(function: Function) -> None:
    assert choose(analyse(chain(function)), 3)


@pytest.mark.parametrize(
    ("function", "obstacle"),
    [
        (lambda x: x.softmax(-1), "softmax reads the whole of it"),
        (lambda x: F.layer_norm(x, (6,)), "it is normalised as a whole"),
        (lambda x: x - x.mean(-1, keepdim=True), "the whole of it is reduced"),
        (lambda x: x.cumsum(-1), "its indices are taken in another order"),
        (lambda x: torch.bernoulli(x.sigmoid()), "aten.bernoulli.default: it has no rule"),
        (lambda x: F.alpha_dropout(x, 0.5, True), "aten.alpha_dropout.default: it has no rule"),
        (lambda x: F.dropout1d(x, 0.5, True), "aten.feature_dropout.default: it has no rule"),
        (lambda x: x.sort(-1)[0], "aten.sort.default: it has no rule"),
        (lambda x: x.relu_().cumprod(-1), "aten.cumprod.default: it has no rule"),
        (lambda x: (x.view(-1, 3, 6), x.relu_())[0], "aten.relu_.default: it has no rule"),
    ],
)
def test_what_reads_the_whole_or_is_not_known_is_computed_whole(function: Function, obstacle: str) -> None:
    analysis = analyse(chain(function))
    hidden = analysis.parameters["held_up_weight"][0]
    assert {name.obstacle for name in leaves(hidden)} == {obstacle}
    assert not split_names(analysis).intersection(leaves(hidden))
    if "it has no rule" in obstacle:
        assert [f"{node.target}: {why}" for node, why in analysis.obstacles.items()] == [obstacle]


class Leaving(nn.Module):
    """Of a projection, one piece is split, and another goes on by itself, or is put together with the first."""

    def __init__(self, leaves: bool) -> None:
        super().__init__()
        self.up, self.down, self.leaves = nn.Linear(4, 9), nn.Linear(6, 3), leaves

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self.up(x).split([6, 3], -1)
        other = other.softmax(-1)
        if self.leaves:
            return self.down(F.gelu(one)) + other
        return self.down((F.gelu(one).unflatten(-1, (2, 3)) * other.tanh().unsqueeze(-2)).flatten(-2))


def test_edges_are_whole_and_a_parameter_that_is_read_twice_is_one() -> None:
    analysis = analyse(layer_of(nn.Linear(4, 6), torch.zeros(2, 4)))
    rows, columns = analysis.parameters["held_weight"]
    assert {name.obstacle for name in leaves(rows)} == {"it crosses the layer's edge"}
    assert split_names(analysis) == set(leaves(columns))
    analysis = analyse(layer_of(Leaving(True), torch.zeros(2, 4)))
    assert not split_names(analysis) & set(leaves(analysis.parameters["held_down_weight"][1]))
    analysis = analyse(layer_of(Leaving(False), torch.zeros(2, 4)))
    assert [name.size for name in split_names(analysis)] == [2]
    layer = layer_of(Shared(4, 6, bias=False), torch.zeros(2, 4))
    part = split_layer(layer, None, 0, 2)  # type: ignore[arg-type]
    assert [(cut.dim, cut.indices(0).tolist()) for cut in part.cuts.values()] == [(0, [0, 1, 2])]
    assert len(list(part.module.parameters())) == 1
    x = torch.zeros(2, 3, 4)
    layers = chain(F.gelu), layer_of(nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4)), x)
    parts = [split_layer(layer, None, 1, 2) for layer in layers]  # type: ignore[arg-type]
    cuts = [[(cut.dim, cut.indices(1).tolist()) for cut in part.cuts.values()] for part in parts]
    assert cuts[0] == cuts[1]
    assert len(cuts[0]) == 3


class Shared(nn.Linear):
    """One matrix twice, the other way round the second time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.gelu(F.linear(x, self.weight)), self.weight.t())


aten = torch.ops.aten


def graph_of(module: nn.Module) -> fx.GraphModule:
    found = layer_of(module, torch.ones(2, 3, 4)).module
    assert isinstance(found, fx.GraphModule)
    return found


def writes(module: fx.GraphModule) -> list[str]:
    schemas = ((node, getattr(node.target, "_schema", None)) for node in module.graph.nodes)
    return [str(node.target) for node, schema in schemas if schema is not None and schema.is_mutable]


class DrawnWrites(nn.Module):
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


@functools.cache
def drawn_graph(seed: int) -> fx.GraphModule:
    return graph_of(DrawnWrites(seed))


@pytest.mark.some(15)
@pytest.mark.parametrize("seed", range(60))
def test_drawn_graphs_compute_the_same_without_writes(seed: int) -> None:
    module, x = drawn_graph(seed), torch.rand(2, 3, 4)
    assert torch.equal(run(without_writes(module), x.clone()), run(module, x.clone()))


def test_most_writes_are_left_out_but_into_what_others_hold_or_of_another_type() -> None:
    modules = [drawn_graph(seed) for seed in range(0, 60, 4)]
    before = sum(len(writes(module)) for module in modules)
    after = sum(len(writes(without_writes(module))) for module in modules)
    assert before > 10
    assert 0 < after < before / 2
    buffer = Made(lambda m, x: x + m.total.add_(x[0, 0]), total=torch.zeros(4))
    for module in (graph_of(Made(lambda _, x: x.add_(1))), graph_of(buffer)):
        assert writes(without_writes(module)) == writes(module) == ["aten.add_.Tensor"]
    module = graph_of(nn.Linear(4, 4))
    assert without_writes(module) is module
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    x.meta["val"], y.meta["val"] = torch.zeros(2), torch.zeros(2)
    call = graph.call_function(aten.add_.Tensor, (x, y))
    assert new_operator(call) is aten.add.Tensor
    y.meta["val"] = torch.zeros(2, dtype=torch.float64)
    assert new_operator(call) is None
    assert new_operator(graph.call_function(aten.copy_.default, (x, x))) is aten.copy.default
    assert new_operator(graph.call_function(aten.add.Tensor, (x, x))) is None
