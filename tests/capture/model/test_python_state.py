"""Python state that a forward changes is refused by its path; what only looks like it is captured."""
# ruff: noqa: ANN001, ANN201, ANN202, ANN204

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

from autopar.capture import capture_module, load
from autopar.capture.model.python_state import Path as StatePath
from autopar.capture.model.python_state import preserve_state
from autopar.errors import CaptureError, ModelError
from capture_zoo import Chain, counting_loss, listed, mean_square, regression

COUNT = 0
TABLE = {"n": 0}
MEAN = torch.zeros(8, dtype=torch.float64)


class Counter:
    """A plain object."""

    __slots__ = ("n",)

    def __init__(self):
        self.n = 0

    def add(self):
        self.n += 1


class Held(Chain):
    """Holds a value, which every forward changes by a function, without an effect on what is computed."""

    calls = 0

    def __init__(self, value=None, change=lambda model: None):
        super().__init__()
        self.held, self.pair = value, [Counter(), Counter()]
        self.change = changing(change) if isinstance(change, str) else change

    def forward(self, x):
        self.change(self)
        return super().forward(x)


def changing(statements):
    """Return a function of this file that does something to a model."""
    exec(compile(f"def change(model):\n    {statements}", __file__, "exec"), globals(), scope := {})
    return scope["change"]


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


COUNTING = "global COUNT; COUNT += 1"
OF_CLASS = "type(model).calls += 1"
IN_DICT = "model.held['n'] += 1"
LONGER = "model.held += 'a'"
STEP = "next(model.held)"
NONE = type(None)
CASES = {
    "a dict": (lambda: {"n": 0}, IN_DICT, r"Held.held\['n'\] changes"),
    "a list": (list, "model.held.append(0)", "Held.held changes"),
    "a long list": (lambda: [0] * 50, "model.held[7] += 1", "Held.held changes"),
    "a deque": (lambda: collections.deque(maxlen=99), "model.held.append(0)", "Held.held changes"),
    "a set": (set, "model.held.add(len(model.held))", "Held.held changes"),
    "a Counter": (collections.Counter, "model.held.update('a')", r"Held.held\['a'\] changes from"),
    "an object": (lambda: types.SimpleNamespace(n=0), "model.held.n += 1", "Held.held.n changes from 1 to 2"),
    "an object with slots": (Counter, "model.held.n += 1", "Held.held.n changes"),
    "an object in a dict": (lambda: {"a": Counter()}, "model.held['a'].n += 1", r"Held.held\['a'\].n changes"),
    "another object": (NONE, "model.held = model.pair[model.held is model.pair[0]]", r"Held.(held|pair\[\d\]) changes"),
    "another function": (lambda: [torch.relu, torch.tanh], "model.held.reverse()", r"Held.held\[0\] changes"),
    "another module": (NONE, "model.steps.append(model.steps.pop(0))", "Held.steps.0 changes"),
    "another tensor": (lambda: [torch.ones(8), torch.zeros(8)], "model.held.reverse()", r"Held.held\[0\] changes"),
    "text": (str, LONGER, "Held.held changes from 'a' to 'aa'"),
    "an array": (lambda: numpy.zeros(3), "model.held += 1", "Held.held changes"),
    "NumPy's generator": (lambda: numpy.random.default_rng(0), "model.held.random()", "Held.held.state"),
    "torch's generator": (torch.Generator, "torch.rand(1, generator=model.held)", "Held.held changes"),
    "a count": (itertools.count, STEP, "Held.held changes"),
    "a cycle": (lambda: itertools.cycle("abcd"), STEP, "Held.held.place"),
    "an iterator": (lambda: iter([1, 2, 3, 4, 5, 6, 7, 8, 9]), STEP, "Held.held.place"),
    "a generator": (lambda: (n for n in range(99)), STEP, "Held.held.locals"),
    "a bound method": (lambda: Counter().add, "model.held()", "Held.held.__self__.n changes"),
    "a global": (NONE, COUNTING, "global COUNT of test_python_state.py changes from"),
    "a global by its text": (NONE, "globals()['COUNT'] += 1", "global COUNT of test_python_state.py"),
    "a global dict": (NONE, "TABLE['n'] += 1", r"global TABLE\['n'\] of test_python_state.py"),
    "a class attribute": (NONE, OF_CLASS, "class attribute Held.calls"),
    "a function's attribute": (NONE, of_function, "of_function.calls|change.calls"),
    "a default": (NONE, in_default, "default seen of in_default"),
    "a closure": (NONE, in_closure(), "closure variable n of change changes from"),
    "a partial": (NONE, functools.partial(lambda seen, model: seen.append(0), []), r"Held.change.args\[0\]"),
}


@pytest.mark.parametrize("case", CASES)
def test_state_that_every_forward_changes_is_refused_by_its_path(case):
    make, change, message = CASES[case]
    with pytest.raises(CaptureError, match=message) as refusal:
        capture_module(Held(make(), change).double(), regression(), mean_square)
    assert "ignored_state" in str(refusal.value)
    assert "layers(model)" in str(refusal.value)


class Loss:
    def __init__(self):
        self.calls = 0

    def __call__(self, output, batch):
        self.calls += 1
        return mean_square(output, batch)


@pytest.mark.parametrize(
    ("loss", "path"),
    [
        (counting_loss, "closure variable n of loss"),
        (Loss, "loss.calls"),
        (lambda: functools.partial(Loss.__call__, Loss()), r"loss.args\[0\].calls"),
        (lambda: Loss().__call__, "loss.__self__.calls"),
    ],
)
def test_state_of_the_loss_is_refused(loss, path):
    with pytest.raises(CaptureError, match=f"^{path} changes"):
        capture_module(Chain().double(), regression(), loss())


class Reads(Held):
    """An object that is held is no module of the model: its tensors are state, too."""

    def between(self, x):
        return x - (MEAN if self.held is None else self.held.mean)


@pytest.mark.parametrize(
    ("held", "change", "message"),
    [
        (types.SimpleNamespace(mean=MEAN), "model.held.mean = model.held.mean + 1", "Reads.held.mean is replaced"),
        (None, "global MEAN; MEAN = MEAN * 0.9 + 1", "global MEAN of test_python_state.py is replaced"),
        (None, "MEAN.add_(1)", "written in place and is no buffer"),
    ],
)
def test_a_tensor_is_refused_where_a_layer_reads_the_old_one(held, change, message):
    with pytest.raises(CaptureError, match=message):
        capture_module(Reads(held, change).double(), regression(), mean_square)


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


@pytest.mark.parametrize("layers", [None, listed])
def test_caches_locks_logs_and_what_cannot_be_compared_are_captured(layers):
    graph = capture_module(Harmless().double(), regression(), mean_square, layers)
    assert len(graph.layers) == 4
    assert not any(layer.stateful for layer in graph.layers)


@pytest.mark.parametrize(
    ("value", "change", "name"),
    [
        ("", LONGER, "held"),
        ("", LONGER, "Held.held"),
        ({"n": 0}, IN_DICT, "held['n']"),
        ({"n": 0}, IN_DICT, "Held.*"),
        (None, COUNTING, "COUNT"),
        (None, COUNTING, "global COUNT of test_python_state.py"),
        (None, in_closure(), "closure variable n of change"),
        (None, OF_CLASS, "class attribute Held.calls"),
    ],
)
def test_state_that_is_only_logged_is_named_by_the_user(value, change, name):
    make = functools.partial(Held, value, change)
    assert capture_module(make().double(), regression(), mean_square, ignored_state=(name,)).portable
    with pytest.raises(CaptureError):
        capture_module(make().double(), regression(), mean_square, ignored_state=("other", "hel"))


def test_a_model_file_names_ignored_state_and_attributes_made_inside_are_gone(tmp_path):
    path = tmp_path / "model.py"
    path.write_text("def model(): ...\nignored_state = ['Net.calls']\n")
    assert load(str(path)).ignored_state == ("Net.calls",)
    path.write_text("def model(): ...\nignored_state = 'Net.calls'\n")
    with pytest.raises(ModelError, match="ignored_state is a str; it must be a list of paths"):
        load(str(path))
    model, seen = Chain().double(), []
    model.steps[1].register_forward_hook(lambda module, inputs, output: seen.append(1))
    with pytest.raises(CaptureError, match="closure variable seen of <lambda>"):
        capture_module(model, regression(), mean_square)
    held = types.SimpleNamespace(count=1, gone="x")
    with preserve_state({StatePath("held"): held}, ("held.kept",)):
        held.count, held.new = 2, 3
        del held.gone
    assert vars(held) == {"count": 1, "gone": "x"}
