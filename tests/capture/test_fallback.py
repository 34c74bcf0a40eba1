"""Listed modules may change Python state that is theirs alone; they say so, and start where plain training does."""
# ruff: noqa: ANN001, ANN201, ANN202, ANN204

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import nn

from autopar.capture import capture_module
from autopar.capture.evaluation import capture_evaluation
from autopar.errors import CaptureError
from capture_zoo import Chain, mean_square, regression
from state_models import Between, Late, counting_loss

TABLE = {"n": 0}


class Own(nn.Module):
    """A module that counts its forwards; and whose generator draws."""

    def __init__(self, step, count=1):
        super().__init__()
        self.step, self.state, self.count = step, {"n": 0}, count
        self.mean, self.draws = torch.zeros(8).double(), torch.Generator().manual_seed(0)

    def forward(self, x):
        self.state["n"] += self.count
        if self.count:
            self.mean = self.mean * 0.9 + x.detach().mean(0)
            x = x + torch.rand(8, generator=self.draws)
        return torch.tanh(self.step(x)) * (2 if self.state["n"] > 40 else 1) - self.mean


class Owning(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = nn.ModuleList(Own(nn.Linear(8, 8), count) for count in (0, 1, 0))


def test_a_listed_module_says_which_state_of_its_own_it_changes_and_keeps_its_first():
    model = Owning().double()
    graph = capture_module(model, regression(), mean_square, lambda model: list(model.steps))
    assert [set(layer.stateful) for layer in graph.layers] == [
        set(),
        {"Owning.steps.1.state['n']", "Owning.steps.1.mean", "Owning.steps.1.draws"},
        set(),
    ]
    own = model.steps[1]
    assert own.state == {"n": 0}
    assert not own.mean.any()
    assert torch.equal(own.draws.get_state(), torch.Generator().manual_seed(0).get_state())


def test_state_of_the_loss_is_the_last_listed_modules():
    loss = counting_loss()
    graph = capture_module(Chain().double(), regression(), loss, lambda model: list(model.steps))
    assert [layer.stateful for layer in graph.layers] == [(), (), (), ("closure variable n of loss",)]
    assert loss.__closure__[0].cell_contents == 0


def test_the_state_of_one_listed_module_may_be_global():
    class Global(nn.Module):
        def __init__(self, step):
            super().__init__()
            self.step = step

        def forward(self, x):
            TABLE["n"] += 1
            return self.step(x)

    before = TABLE["n"]
    layers = lambda model: [Global(model.steps[0]), *list(model.steps)[1:]]  # noqa: E731
    graph = capture_module(Chain().double(), regression(), mean_square, layers)
    assert graph.layers[0].stateful == ("global TABLE['n'] of test_fallback.py",)
    assert TABLE["n"] == before
    both = lambda model: [Global(step) for step in model.steps]  # noqa: E731
    with pytest.raises(CaptureError, match=r"layers\(\): global TABLE\['n'\] of .* belongs to no single module"):
        capture_module(Chain().double(), regression(), mean_square, both)
    assert (
        capture_module(Chain().double(), regression(), mean_square, both, ignored_state=("TABLE",)).layers[1].stateful
        == ()
    )


def test_listed_modules_that_change_state_are_not_evaluated():
    batch = regression()
    graph = capture_module(Owning().double(), batch, mean_square, lambda model: list(model.steps))
    with pytest.raises(CaptureError, match=r"Owning\.steps\.1\.\S+ changes with every forward, and a copy"):
        capture_evaluation(Owning().double(), batch, mean_square, graph)


class Random(nn.Module):
    def __init__(self, step):
        super().__init__()
        self.step = step

    def forward(self, x):
        return self.step(x) * random.random()


def shared_generator(model):
    draws = torch.Generator().manual_seed(0)
    found = [Own(step, 0) for step in model.steps]
    for each in found:
        each.draws, each.count = draws, 1
    return found


def counts_before(model):
    places = itertools.count()

    class Stepping(nn.Module):
        def __init__(self, step):
            super().__init__()
            self.step, self.places = step, places

        def forward(self, x):
            next(self.places)
            return self.step(x)

    return [Stepping(model.steps[0]), *list(model.steps)[1:]]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (lambda model: [Between(model, step) for step in model.steps], r"\.state\['n'\] changes"),
        (lambda model: [Own(model.steps[0])] * 2, "belongs to no single module"),
        (shared_generator, "draws changes"),
        (lambda model: [Random(step) for step in model.steps], "the generator of Python's random"),
        (counts_before, "cannot be put back"),
    ],
)
def test_state_that_several_listed_modules_share_is_refused(layers, message):
    with pytest.raises(CaptureError, match=message):
        capture_module(Late().double(), regression(), mean_square, layers)


class Once(nn.Module):
    """Changes state with its second forward only, and a buffer that it also holds in a list."""

    def __init__(self, step):
        super().__init__()
        self.step, self.calls = step, 0
        self.register_buffer("mean", torch.zeros(8).double())
        self.means = [self.mean]

    def forward(self, x):
        self.calls = min(self.calls + 1, 3)
        self.means[0].mul_(0.9).add_(x.detach().mean(0))
        return self.step(x) - self.means[0]


def test_state_that_changes_once_is_found_and_buffers_are_none():
    steps = nn.Sequential(*(Once(nn.Linear(8, 8)) for _ in range(3))).double()
    for step in steps:
        step.means = [step.mean]
    graph = capture_module(steps, regression(), mean_square, list)
    assert [layer.stateful for layer in graph.layers] == [(f"Sequential.{index}.calls",) for index in range(3)]
