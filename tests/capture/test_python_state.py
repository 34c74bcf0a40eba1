"""Python state that a forward changes is refused by its path; what only looks like it is captured."""
# ruff: noqa: ANN001, ANN201, ANN202, ANN204

from __future__ import annotations

import collections
import functools
import itertools
import logging
import threading
import types
import weakref

import numpy
import pytest
import torch
from torch import nn

from autopar.capture import capture_module, load
from autopar.errors import CaptureError, ModelError
from capture_zoo import Chain, mean_square, regression
from state_models import Between, Late, counting_loss, step

COUNT = 0
TABLE = {"n": 0}
MEAN = torch.zeros(8, dtype=torch.float64)


class Counter:
    """A plain object."""

    __slots__ = ("n",)

    def __init__(self):
        self.n = 0


class Counting:
    n = 0

    def add(self):
        self.n += 1


class Held(Chain):
    """Holds a value, which every forward changes by a function, without an effect on what is computed."""

    calls = 0

    def __init__(self, value=None, change=lambda model: None):
        super().__init__()
        self.held, self.change, self.pair = value, change, [Counter(), Counter()]

    def forward(self, x):
        self.change(self)
        return super().forward(x)


def counted(model):
    global COUNT
    COUNT += 1


def tabled(model):
    TABLE["n"] += 1


def of_class(model):
    type(model).calls += 1


def of_function(model):
    of_function.calls = getattr(of_function, "calls", 0) + 1


def in_default(model, seen=[]):  # noqa: B006
    seen.append(None)


def in_closure():
    n = 0

    def change(model):
        nonlocal n
        n += 1

    return change


def by_text(model):
    globals()["COUNT"] += 1


def numbers():
    n = 0
    while True:
        n += 1
        yield n


def drawn(model):
    model.held.random()


def grow(model):
    model.held.append(0)


def swap(model):
    model.steps[0], model.steps[1] = model.steps[1], model.steps[0]


def count_in(model):
    model.held.n += 1


CASES = {
    "a dict": (lambda: {"n": 0}, lambda model: model.held.update(n=model.held["n"] + 1), r"Held.held\['n'\] changes"),
    "a list": (list, grow, "Held.held changes"),
    "a long list": (lambda: [0] * 50, lambda model: model.held.__setitem__(7, model.held[7] + 1), "Held.held changes"),
    "a deque": (lambda: collections.deque(maxlen=99), grow, "Held.held changes"),
    "a set": (set, lambda model: model.held.add(len(model.held)), "Held.held changes"),
    "a Counter": (collections.Counter, lambda model: model.held.update("a"), r"Held.held\['a'\] changes from"),
    "an object": (lambda: types.SimpleNamespace(n=0), count_in, "Held.held.n changes from 1 to 2"),
    "an object with slots": (Counter, count_in, "Held.held.n changes"),
    "an object in a dict in a list": (
        lambda: [{"a": Counter()}],
        lambda model: setattr(model.held[0]["a"], "n", model.held[0]["a"].n + 1),
        r"Held.held\[0\]\['a'\].n changes",
    ),
    "another object": (
        lambda: None,
        lambda model: setattr(model, "held", model.pair[model.held is model.pair[0]]),
        r"Held.(held|pair\[\d\]) changes",
    ),
    "another function": (
        lambda: torch.relu,
        lambda model: setattr(model, "held", torch.tanh if model.held is torch.relu else torch.relu),
        "Held.held changes",
    ),
    "another module": (
        lambda: None,
        swap,
        "Held.steps.0 changes",
    ),
    "tensors in another order": (
        lambda: [torch.ones(8), torch.zeros(8)],
        lambda model: model.held.append(model.held.pop(0)),
        r"Held.held\[0\] changes",
    ),
    "text": (lambda: "", lambda model: setattr(model, "held", model.held + "a"), "Held.held changes from 'a' to 'aa'"),
    "an array": (lambda: numpy.zeros(3), lambda model: model.held.__iadd__(1), "Held.held changes"),
    "a generator of NumPy's": (lambda: numpy.random.default_rng(0), drawn, "Held.held.state"),
    "a generator of torch's": (
        lambda: torch.Generator().manual_seed(0),
        lambda model: torch.rand(1, generator=model.held),
        "Held.held changes",
    ),
    "a count": (itertools.count, step, "Held.held changes"),
    "a cycle": (lambda: itertools.cycle("abcd"), step, "Held.held.place"),
    "an iterator": (lambda: iter([1, 2, 3, 4, 5, 6, 7, 8, 9]), step, "Held.held.place"),
    "a generator": (numbers, step, "Held.held.locals"),
    "a bound method": (
        lambda: Counting().add,
        lambda model: model.held(),
        "Held.held.__self__.n changes",
    ),
    "a global": (lambda: None, counted, "global COUNT of test_python_state.py changes from"),
    "a global by its text": (lambda: None, by_text, "global COUNT of test_python_state.py"),
    "a global dict": (lambda: None, tabled, r"global TABLE\['n'\] of test_python_state.py"),
    "a class attribute": (lambda: None, of_class, "class attribute Held.calls"),
    "a function's attribute": (lambda: None, of_function, "of_function.calls|change.calls"),
    "a default": (lambda: None, in_default, "default seen of in_default"),
    "a closure": (lambda: None, in_closure(), "closure variable n of change changes from"),
    "a partial": (lambda: None, functools.partial(lambda seen, model: seen.append(0), []), r"Held.change.args\[0\]"),
}


@pytest.mark.parametrize("case", CASES)
def test_state_that_every_forward_changes_is_refused_by_its_path(case):
    make, change, message = CASES[case]
    with pytest.raises(CaptureError, match=message) as refusal:
        capture_module(Held(make(), change).double(), regression(), mean_square)
    assert "ignored_state" in str(refusal.value)
    assert "layers(model)" in str(refusal.value)


def test_a_switch_that_comes_late_is_refused():
    with pytest.raises(CaptureError, match=r"^Late\.state\['n'\] changes from 4 to 8 with every forward"):
        capture_module(Late().double(), regression(), mean_square)


class Loss:
    def __init__(self):
        self.calls = 0

    def __call__(self, output, batch):
        self.calls += 1
        return mean_square(output, batch)


class ModuleLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, output, batch):
        self.seen.append(len(self.seen))
        return mean_square(output, batch)


@pytest.mark.parametrize(
    ("loss", "path"),
    [
        (counting_loss, "closure variable n of loss"),
        (Loss, "loss.calls"),
        (ModuleLoss, "loss.seen"),
        (lambda: functools.partial(Loss.__call__, Loss()), r"loss.args\[0\].calls"),
        (lambda: Loss().__call__, "loss.__self__.calls"),
    ],
)
def test_state_of_the_loss_is_refused(loss, path):
    with pytest.raises(CaptureError, match=f"^{path} changes"):
        capture_module(Chain().double(), regression(), loss())


def test_state_in_a_hook_is_refused():
    model, seen = Chain().double(), []
    model.steps[1].register_forward_hook(lambda module, inputs, output: seen.append(1))
    with pytest.raises(CaptureError, match="closure variable seen of <lambda>"):
        capture_module(model, regression(), mean_square)


class Plain(nn.Module):
    """An object that is held is no module of the model: its tensors are state, too."""

    def __init__(self):
        super().__init__()
        self.first, self.held = nn.Linear(8, 8), types.SimpleNamespace(mean=torch.zeros(8).double())

    def forward(self, x):
        x = self.first(x)
        before = self.held.mean
        self.held.mean = 0.9 * before + x.detach().mean(0)
        return x - before


def global_mean(model):
    global MEAN
    MEAN = MEAN * 0.9 + 1


class ReadsGlobal(Held):
    def between(self, x):
        return x - MEAN


def in_place(model):
    MEAN.add_(1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Plain, "Plain.held.mean is replaced"),
        (lambda: ReadsGlobal(None, global_mean), "global MEAN of test_python_state.py is replaced"),
        (lambda: ReadsGlobal(None, in_place), "written in place and is no buffer"),
    ],
)
def test_a_tensor_is_refused_where_a_layer_reads_the_old_one(make, message):
    with pytest.raises(CaptureError, match=message):
        capture_module(make().double(), regression(), mean_square)


class Uncomparable:
    """Compares like nothing else, and refers to itself."""

    def __init__(self):
        self.itself, self.frame = self, numpy.zeros((3, 3))

    def __eq__(self, other):
        raise TypeError("cannot be compared")

    __hash__ = None


class Closed:
    """Says nothing about itself."""

    __slots__ = ("inner",)

    def __getattr__(self, name):
        raise KeyError(name)


class Harmless(Chain):
    """Keeps what later forwards leave alone, or nobody reads."""

    def __init__(self):
        super().__init__()
        self.masks, self.lock, self.log = {}, threading.Lock(), logging.getLogger("a model")
        self.itself, self.odd = weakref.ref(self), Uncomparable()
        self.words = {str(number): number for number in range(10_000)}
        self.arrays = [numpy.ones(3), numpy.array([None, {"a": 1}], dtype=object), float("nan"), numpy.float32("nan")]
        self.last, self.closed = None, Closed()

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def table(self, width):
        return torch.arange(width, dtype=torch.float64).cos()

    def between(self, x):
        mask = self.masks.setdefault(tuple(x.shape[1:]), torch.ones(8, dtype=x.dtype))
        self.log.debug("a forward")
        self.last = x.detach()
        with self.lock:
            return torch.tanh(x) * mask * self.table(8)


@pytest.mark.parametrize("layers", [None, lambda model: [Between(model, step) for step in model.steps]])
def test_caches_locks_logs_and_what_cannot_be_compared_are_captured(layers):
    graph = capture_module(Harmless().double(), regression(), mean_square, layers)
    assert len(graph.layers) == 4
    assert not any(layer.stateful for layer in graph.layers)


def attribute(model):
    model.held += 1


@pytest.mark.parametrize(
    ("value", "change", "name"),
    [
        (0, attribute, "held"),
        (0, attribute, "Held.held"),
        ({"n": 0}, CASES["a dict"][1], "held['n']"),
        ({"n": 0}, CASES["a dict"][1], "Held.*"),
        (None, counted, "COUNT"),
        (None, counted, "global COUNT of test_python_state.py"),
        (None, in_closure(), "closure variable n of change"),
        (None, of_class, "class attribute Held.calls"),
    ],
)
def test_state_that_is_only_logged_is_named_by_the_user(value, change, name):
    make = functools.partial(Held, value, change)
    assert capture_module(make().double(), regression(), mean_square, ignored_state=(name,)).portable
    with pytest.raises(CaptureError):
        capture_module(make().double(), regression(), mean_square, ignored_state=("other", "hel"))


def test_a_model_file_names_ignored_state(tmp_path):
    path = tmp_path / "model.py"
    path.write_text("def model(): ...\nignored_state = ['Net.calls']\n")
    assert load(str(path)).ignored_state == ("Net.calls",)
    path.write_text("def model(): ...\nignored_state = 'Net.calls'\n")
    with pytest.raises(ModelError, match="ignored_state is a str; it must be a list of paths"):
        load(str(path))
