"""What code can reach by a name is read again, and nothing else."""

import functools
import os
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from autopar.capture.model.changes import Readings, names_read
from autopar.capture.model.python_state import Path

SCALE, gain = 1.0, 1.0


class Slotted:
    __slots__ = ("weight",)

    def __init__(self) -> None:
        self.weight = 1.0


class Loss:
    shared = 1.0

    def __init__(self) -> None:
        self.weight, self.step, self.same = 1.0, 0, 0.5
        self.table, self.items, self.queue = {"a": [1.0, {"b": 2.0}]}, [1.0, 2.0], deque([1.0])
        self.array, self.slots, self.space = numpy.ones(3), Slotted(), SimpleNamespace(weight=1.0)
        self.kinds, self.tensor, self.teacher = {1, 2}, torch.ones(2), nn.Linear(1, 1)

    def doubled_by(self, value: float) -> float:
        return 2 * value

    @property
    def doubled(self) -> float:
        return 2 * self.weight

    def __call__(self, output: torch.Tensor, batch: Any, scale: float = 1.0) -> Any:  # noqa: ANN401
        read = self.table, self.items, self.queue, self.array, self.slots.weight, self.space.weight, self.kinds
        own = self.shared * self.doubled_by(self.teacher(output))
        return self.doubled * self.same * own * SCALE * output.gain * scale, read, self.tensor


def _codes(*functions: Callable[..., Any]) -> frozenset[str]:
    return names_read([function.__code__ for function in functions])


def _set(name: str, value: object) -> Callable[[Loss, nn.Module], None]:
    return lambda loss, model: setattr(loss, name, value)


def _global(name: str, value: object) -> Callable[[Loss, nn.Module], None]:
    return lambda loss, model: globals().update({name: value})


CHANGES: list[tuple[Callable[[Loss, nn.Module], object], bool]] = [
    (lambda loss, model: None, False),
    (_set("weight", 2.0), True),
    (_set("weight", 1), True),
    (_set("weight", float("1.0")), False),
    (_set("step", 7), False),
    (lambda loss, model: loss.table["a"].__setitem__(0, 3.0), True),
    (lambda loss, model: loss.table["a"][1].update(b=3.0), True),
    (lambda loss, model: loss.table.update(c=1.0), True),
    (lambda loss, model: loss.items.append(3.0), True),
    (lambda loss, model: loss.queue.append(3.0), True),
    (lambda loss, model: loss.kinds.add(3), True),
    (lambda loss, model: loss.array.__setitem__(0, 3.0), True),
    (lambda loss, model: loss.tensor.fill_(3.0), False),
    (_set("tensor", torch.ones(2)), True),
    (lambda loss, model: setattr(loss.tensor, "data", torch.ones(2)), True),
    (lambda loss, model: setattr(loss.teacher.weight, "data", torch.ones(1, 1)), True),
    (lambda loss, model: setattr(loss.teacher, "weight", nn.Parameter(torch.ones(1, 1))), True),
    (lambda loss, model: nn.init.ones_(loss.teacher.weight), False),
    (_set("shared", 2.0), True),
    (_set("doubled_by", lambda value: 3 * value), True),
    (lambda loss, model: setattr(model[0], "forward", torch.sigmoid), True),
    (lambda loss, model: setattr(loss.slots, "weight", 2.0), True),
    (lambda loss, model: setattr(loss.space, "weight", 2.0), True),
    (lambda loss, model: setattr(type(loss), "shared", 2.0), True),
    (_global("SCALE", 2.0), True),
    # An attribute is called so, too.
    (_global("gain", 2.0), False),
    (lambda loss, model: model[1].eval(), True),
    (lambda loss, model: model.eval(), False),
    (lambda loss, model: setattr(model[1], "p", 0.25), True),
    (lambda loss, model: model.append(nn.Linear(2, 2)), True),
    (lambda loss, model: setattr(model, "note", 1.0), False),
]


@pytest.mark.parametrize("place", range(len(CHANGES)))
def test_what_is_read_is_followed_and_comes_back(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    change, expected = CHANGES[place]
    for name in ("SCALE", "gain"):
        monkeypatch.setitem(globals(), name, 1.0)
    monkeypatch.setattr(Loss, "shared", 1.0)
    loss, model = Loss(), nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    names = _codes(Loss.__call__, Loss.doubled.fget, Slotted.__init__) | {"p", "training", "forward"}  # type: ignore[attr-defined]
    readings = Readings({Path("Sequential"): model, Path("loss"): loss}, names)
    change(loss, model)
    assert readings.have_changed() is expected
    assert bool(readings.changed()) is expected
    everything = Readings({Path("loss"): loss}, None)
    loss.step += 1
    assert everything.have_changed()


def test_functions_are_read_with_their_defaults_closures_and_what_is_bound_to_them() -> None:
    weight, ignored = 1.0, 1.0

    def loss(output: float, scale: float = 1.0) -> float:
        return output * weight * ignored * scale

    bound = functools.partial(loss, scale=2.0)
    names = _codes(loss)

    def fresh(*ignored_state: str) -> Readings:
        return Readings({Path("loss"): bound}, names, ignored_state)

    readings = fresh()
    bound.keywords["scale"] = 3.0
    assert readings.have_changed()
    readings = fresh()
    loss.__defaults__ = (4.0,)
    assert readings.have_changed()
    readings, without = fresh(), fresh("ignored")
    ignored = 2.0
    assert (readings.have_changed(), without.have_changed()) == (True, False)
    weight = 2.0
    assert without.changed()[0].startswith("closure variable weight")


def test_the_environment_counts_where_code_reads_it_and_so_does_torchs_default_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, deaf = (Readings({}, _codes(each)) for each in (lambda: os.environ["BETA"], lambda: SCALE))
    monkeypatch.setenv("BETA", "2")
    assert (reading.have_changed(), deaf.have_changed()) == (True, False)
    assert reading.changed() == ["os.environ"]
    torch.set_default_dtype(torch.float64)
    try:
        assert deaf.changed() == ["torch.get_default_dtype()"]
    finally:
        torch.set_default_dtype(torch.float32)
