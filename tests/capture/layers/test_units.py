"""Blocks in nested and named lists are layers, each where a cut is legal; plans of an earlier autopar keep theirs."""

import random
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

from autopar.capture.cache.store import merge_layers
from autopar.capture.graph import LayerGraph
from autopar.capture.layers import segment as cutting
from autopar.capture.layers.check import check_gradients
from autopar.capture.layers.export import capture_module
from autopar.capture.layers.units import Units, calls_around
from capture_zoo import Made, mean_square, regression

WIDTH = 8


def block() -> nn.Module:
    return Made(lambda m, x: x + m.linear(m.norm(x)).relu(), norm=nn.LayerNorm(WIDTH), linear=nn.Linear(WIDTH, WIDTH))


class Stage(nn.Module):
    """Of Transformers' Swin and ConvNeXt: a plain module with a list."""

    def __init__(self, blocks: int, entry: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.downsample = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.entry = entry

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.entry:
            x = x * 2
        for block in self.blocks:
            x = block(x)
        return self.downsample(x)


class Dense(nn.ModuleDict):
    """Of torchvision's DenseNet: every block reads what all before it made."""

    def __init__(self, blocks: int) -> None:
        super().__init__({f"denselayer{at + 1}": reader(WIDTH * (at + 1)) for at in range(blocks)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = [x]
        for block in self.values():
            found.append(block(found))
        return torch.stack(found).mean(0)


def reader(width: int) -> nn.Module:
    held = {"norm": nn.LayerNorm(width), "linear": nn.Linear(width, WIDTH)}
    return Made(lambda m, given: m.linear(m.norm(torch.cat(tuple(given), -1)).relu()), **held)


def beside() -> nn.Module:
    """Make a residual connection around a list of blocks."""
    return Made(lambda m, x: x + m.blocks(x), blocks=nn.Sequential(block(), block()))


def heads() -> nn.Module:
    return Made(lambda m, x: sum(each(x) for each in m.blocks), blocks=nn.ModuleList([block(), block(), block()]))


class Branches(nn.ModuleDict):
    def __init__(self) -> None:
        super().__init__({"near": block(), "far": block()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self["near"](x) + self["far"](x)


def residual() -> nn.Module:
    """Put a list of plain modules into a block."""
    mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    return Made(lambda m, x: x + m.mlp(x), mlp=mlp)


class Net(nn.Module):
    def __init__(self, *stages: nn.Module) -> None:
        super().__init__()
        self.stages, self.head = nn.ModuleList(stages), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return self.head(x)


def captured(model: nn.Module) -> LayerGraph:
    return capture_module(model.double(), regression(4), mean_square)


def names(model: nn.Module) -> list[str]:
    return [layer.name for layer in captured(model).layers]


BLOCKS = [f"stages.0.blocks.{at}" for at in range(3)]
LATER = ["stages.1.blocks.0", "stages.1.blocks.1"]


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ([nn.Sequential(block(), block()), block()], ["stages.0.0", "stages.0.1", "stages.1", "head"]),
        # What follows a stage's blocks is a layer, and what comes before them begins with the stage.
        ([Stage(3), block()], [*BLOCKS, "stages.0.downsample", "stages.1", "head"]),
        ([block(), Stage(2, entry=True)], ["stages.0", "stages.1", *LATER, "stages.1.downsample", "head"]),
        # No sequence by themselves, or plain modules in a block.
        *(([block(), inner()], ["stages.0", "stages.1", "head"]) for inner in (beside, heads, Branches)),
        ([residual(), residual()], ["stages.0", "stages.1", "head"]),
    ],
)
def test_blocks_of_a_stage_that_are_a_sequence_are_layers(stages: list[nn.Module], expected: list[str]) -> None:
    assert names(Net(*stages)) == expected


def test_named_blocks_that_read_all_before_them_are_layers_and_those_of_no_such_names_are_not_joined() -> None:
    transition = nn.Sequential(OrderedDict(norm=nn.LayerNorm(WIDTH), conv=nn.Linear(WIDTH, WIDTH)))
    features = nn.Sequential(OrderedDict(conv0=nn.Linear(WIDTH, WIDTH), denseblock1=Dense(3), transition1=transition))
    model = nn.Sequential(OrderedDict(features=features, relu=nn.ReLU(), classifier=nn.Linear(WIDTH, WIDTH)))
    dense = [f"features.denseblock1.denselayer{at}" for at in (1, 2, 3)]
    assert names(model) == ["features.conv0", *dense, "features.transition1", "classifier"]
    graph = captured(Net(Stage(2), block()))
    assert merge_layers(graph, ["stages.0", "other", "head"]) is graph
    assert merge_layers(graph, ["stages.1", "head"]) is graph


def as_before(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> LayerGraph:
    """Capture a model as an earlier autopar did, which split nothing."""
    with monkeypatch.context() as patch:
        patch.setattr(cutting, "split_units", lambda model, nodes: Units(model, lambda path: False))
        return captured(model)


def random_model(rng: random.Random) -> nn.Module:
    def any_stage(depth: int) -> nn.Module:
        made: list[Callable[[], nn.Module]] = [block, beside, heads, Branches, nn.ReLU]
        made += [lambda: Stage(rng.randint(1, 3), entry=rng.random() < 0.5), lambda: Dense(rng.randint(1, 3))]
        if depth:
            made += [lambda: nn.Sequential(*(any_stage(depth - 1) for _ in range(rng.randint(1, 3))))] * 3
        return rng.choice(made)()

    stages = [any_stage(2) for _ in range(rng.randint(1, 3))]
    # A stage may be called twice, its parameters shared.
    return Net(*stages, *(stages[:1] if rng.random() < 0.4 else ()))


@pytest.mark.some(2)
@pytest.mark.parametrize("seed", range(25))
def test_finer_layers_join_again_to_those_of_before(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(seed)
    model = random_model(random.Random(seed))
    before, graph = as_before(model, monkeypatch), captured(model)
    assert len(graph.layers) >= len(before.layers)
    check_gradients(model, graph, regression(4), mean_square)
    joined = merge_layers(graph, [layer.name for layer in before.layers])
    for one, other in zip(joined.layers, before.layers, strict=True):
        assert (one.name, one.inputs, one.outputs) == (other.name, other.inputs, other.outputs)
        assert set(one.parameters.values()) == set(other.parameters.values())
        assert one.fingerprint == other.fingerprint
    assert joined.tensors == before.tensors
    check_gradients(model, joined, regression(4), mean_square)


def test_calls_of_a_module_are_told_apart_from_the_second_on() -> None:
    node = fx.Graph().placeholder("x")
    node.meta["nn_module_stack"] = {key: (f"model.{key[0]}", nn.Linear) for key in ("a", "b@1", "c@2")}
    assert list(calls_around(node)) == [("a", ""), ("b", "@2"), ("c", "@3")]
