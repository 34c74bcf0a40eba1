"""What is found of a layer's dimensions, and what forbids to split them; and graphs without their writes."""

from __future__ import annotations

import dataclasses
import random
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import autopar.capture.split
from autopar.capture.graph import Layer
from autopar.capture.split.analysis import Analysis, analyse, new_operator, without_writes
from autopar.capture.split.choice import choose
from autopar.capture.split.names import Name, leaves
from autopar.capture.split.rewrite import split_layer
from single_layers import layer_of


class Chain(nn.Module):
    """Two matrices, and something between them."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.up, self.between, self.down = nn.Linear(4, 6), between, nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.between(self.up(x)))


class Function(nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)  # type: ignore[operator, no-any-return]


def split_names(analysis: Analysis) -> set[Name]:
    return {name for split in choose(analysis, 2) for name in split.names}


def chain(between: object) -> Layer:
    return layer_of(Chain(Function(between)), torch.zeros(2, 3, 4))


@pytest.mark.parametrize(
    "between",
    [
        F.gelu,
        lambda x: x * 2 + 1,
        lambda x: F.dropout(x, 0.5),
        lambda x: F.dropout(F.relu(x, inplace=True), 0.5, inplace=True),
        lambda x: x * (torch.rand_like(x) < 0.5),
        lambda x: x.transpose(0, 1).transpose(0, 1),
        lambda x: x.view(-1, 3, 3, 2).flatten(2),
    ],
)
def test_what_keeps_numbers_in_their_places_lets_them_be_split(between: object) -> None:
    assert choose(analyse(chain(between)), 3)


@pytest.mark.parametrize(
    ("between", "obstacle"),
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
def test_what_reads_the_whole_or_is_not_known_is_computed_whole(between: object, obstacle: str) -> None:
    analysis = analyse(chain(between))
    hidden = analysis.parameters["held_up_weight"][0]
    assert {name.obstacle for name in leaves(hidden)} == {obstacle}
    assert not split_names(analysis).intersection(leaves(hidden))


def test_what_an_operator_makes_of_a_part_alone_may_be_the_same_on_every_part() -> None:
    analysis = analyse(chain(lambda x: x * x.new_ones([])))
    assert split_names(analysis) & set(leaves(analysis.parameters["held_up_weight"][0]))


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


def test_a_piece_that_is_the_same_on_every_part_does_not_leave_a_region() -> None:
    assert not split_names(analysis := analyse(layer_of(Leaving(True), torch.zeros(2, 4)))) & set(
        leaves(analysis.parameters["held_down_weight"][1])
    )
    analysis = analyse(layer_of(Leaving(False), torch.zeros(2, 4)))
    assert [name.size for name in split_names(analysis)] == [2]


def test_operators_that_are_computed_whole_are_named_with_why() -> None:
    found = analyse(chain(lambda x: x.cumprod(-1))).obstacles
    assert [(str(node.target), why) for node, why in found.items()] == [("aten.cumprod.default", "it has no rule")]


def test_the_edge_of_a_layer_is_whole() -> None:
    analysis = analyse(layer_of(nn.Linear(4, 6), torch.zeros(2, 4)))
    rows, columns = analysis.parameters["held_weight"]
    assert {name.obstacle for name in leaves(rows)} == {"it crosses the layer's edge"}
    assert split_names(analysis) == set(leaves(columns))


class Gram(nn.Module):
    """The product of what one matrix makes with itself: the same name would be twice in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        return self.down((hidden.transpose(1, 2) @ hidden).sum(1))


def test_a_name_that_would_be_split_twice_in_a_tensor_is_not() -> None:
    analysis = analyse(layer_of(Gram(), torch.zeros(2, 3, 4)))
    hidden = set(leaves(analysis.parameters["held_up_weight"][0]))
    assert {name.obstacle for name in hidden} == {None}
    assert not split_names(analysis) & hidden


class Shared(nn.Module):
    """One matrix twice, the other way round the second time."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(6, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.gelu(F.linear(x, self.matrix)), self.matrix.t())


def test_a_parameter_that_is_read_twice_is_one() -> None:
    layer = layer_of(Shared(), torch.zeros(2, 4))
    part = split_layer(layer, None, 0, 2)  # type: ignore[arg-type]
    assert [(cut.dim, cut.indices(0).tolist()) for cut in part.cuts.values()] == [(0, [0, 1, 2])]
    assert len(list(part.module.parameters())) == 1


def renamed(layer: Layer) -> Layer:
    """Give every attribute and node another name, in another alphabetic order."""
    graph, made, attributes = fx.Graph(), dict[fx.Node, fx.Node](), dict[str, object]()
    parameters = {}
    for index, node in enumerate(layer.module.graph.nodes):  # type: ignore[union-attr, arg-type]
        if node.op != "get_attr":
            made[node] = graph.node_copy(node, made.__getitem__)
            made[node].name = f"n{999 - index}"
            continue
        name = f"a{999 - index}"
        attributes[name] = layer.module.get_parameter(node.target)
        parameters[name] = f"b{index}"
        made[node] = graph.get_attr(name)
    module = fx.GraphModule(attributes, graph)
    return dataclasses.replace(layer, module=module, parameters=parameters, name="other", modules=("other",))


def test_names_of_parameters_and_modules_count_nothing() -> None:
    layer = chain(F.gelu)
    cuts = [
        [(cut.dim, cut.indices(1).tolist()) for cut in split_layer(each, None, 1, 2).cuts.values()]  # type: ignore[arg-type]
        for each in (layer, renamed(layer))
    ]
    assert cuts[0] == cuts[1]
    assert len(cuts[0]) == 3


def test_no_source_line_reads_names_or_classes_of_modules() -> None:
    folder = Path(autopar.capture.split.__file__).parent
    files = sorted(folder.rglob("*.py"))
    assert len(files) > 10
    forbidden = re.compile(
        r"nn_module_stack|named_modules|__class__|\bmodules\b\[|layer\.(name|modules|fingerprint)\b|import re\b"
    )
    assert [
        (file.name, line) for file in files for line in file.read_text().splitlines() if forbidden.search(line)
    ] == []


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


@pytest.mark.parametrize("seed", range(60))
def test_drawn_graphs_compute_the_same_without_writes(seed: int) -> None:
    module, x = graph_of(DrawnWrites(seed)), torch.rand(2, 3, 4)
    assert torch.equal(run(without_writes(module), x.clone()), run(module, x.clone()))


def test_most_writes_that_are_not_seen_are_left_out() -> None:
    modules = [graph_of(DrawnWrites(seed)) for seed in range(30)]
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
