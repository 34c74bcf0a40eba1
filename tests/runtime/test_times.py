"""What is watched inside stages: layers' times against a clock that counts, operations against their closed form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from autopar.formats.program import Action, RankProgram
from autopar.runtime.result.outcome import ForwardFlops, peak_of
from autopar.runtime.times import LayerTimes


class CountingClock:
    """A clock that only layers move."""

    def __init__(self) -> None:
        self.now = 0.0

    def start(self) -> None:
        """Begin a step."""

    def mark(self) -> object:
        return self.now

    def resolve(self, marks: list[object]) -> list[float]:
        return [float(str(mark)) for mark in marks]


class Slow(torch.autograd.Function):
    """Moves a clock forward and backward, and nothing else."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, value: torch.Tensor, clock: CountingClock, times: tuple[float, float]
    ) -> torch.Tensor:
        ctx.clock, ctx.backward_s = clock, times[1]
        clock.now += times[0]
        return value * 1.0

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.clock.now += ctx.backward_s
        return gradient * 1.0, None, None


def _layer(clock: CountingClock, forward_s: float, backward_s: float, value: torch.Tensor) -> Sequence[torch.Tensor]:
    return (Slow.apply(value, clock, (forward_s, backward_s)),)


def test_a_layers_backward_lasts_from_its_outputs_gradients_to_the_next_ones() -> None:
    clock = CountingClock()
    seconds = {"a": (1.0, 2.0), "b": (3.0, 7.0), "c": (4.0, 5.0)}
    actions = [Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 0), Action("B", 0, 1), Action("U", 0)]
    times = LayerTimes(RankProgram.of(actions), {0: list(seconds)}, clock)
    for step in range(2):
        times.begin_step()
        spans, ends = [], []
        for _ in range(2):
            start, value = clock.now, torch.ones(2, requires_grad=True)
            for name, (forward_s, backward_s) in seconds.items():
                run: Callable[[], Sequence[torch.Tensor]] = partial(_layer, clock, forward_s, backward_s, value)
                (value,) = times(name, run, False)
            ends.append(value)
            spans.append((start, clock.now))
        for value in ends:
            start = clock.now
            value.sum().backward()
            spans.append((start, clock.now))
        spans.append((clock.now, clock.now + step))
        times.end_step(spans)
    assert times.medians() == seconds


def test_a_recomputed_layers_backward_begins_with_its_recomputation() -> None:
    clock = CountingClock()
    actions = [Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 1), Action("B", 0, 0)]
    times = LayerTimes(RankProgram.of(actions), {0: ["a", "b"]}, clock)
    times.begin_step()
    spans, made, given = [], [], torch.ones(2, requires_grad=True)
    for _ in range(2):
        start = clock.now
        with torch.no_grad():
            times("a", partial(_layer, clock, 1.0, 0.0, given), False)
        made += times("b", partial(_layer, clock, 4.0, 7.0, given), False)
        spans.append((start, clock.now))
    for last in reversed(made):
        start = clock.now
        last.sum().backward()
        (again,) = times("a", partial(_layer, clock, 1.0, 2.0, given), True)
        again.sum().backward()
        spans.append((start, clock.now))
    times.end_step(spans)
    assert times.medians() == {"a": (1.0, 3.0), "b": (4.0, 7.0)}


def test_layers_whose_backward_goes_in_halves_have_forwards_only() -> None:
    clock = CountingClock()
    actions = [Action("F", 0, 0), Action("I", 0, 0), Action("W", 0, 0), Action("U", 0)]
    times = LayerTimes(RankProgram.of(actions), {0: ["a"]}, clock)
    times.begin_step()
    (value,) = times("a", partial(_layer, clock, 3.0, 1.0, torch.ones(2, requires_grad=True)), False)
    value.sum().backward()
    times.end_step([(0.0, 3.0), (3.0, 4.0), (4.0, 4.0), (4.0, 4.0)])
    assert times.medians() == {"a": (3.0, 0.0)}


@pytest.mark.parametrize("rows", [1, 6])
def test_the_operations_of_products_are_two_per_weight_and_row(rows: int) -> None:
    counted, layer = ForwardFlops(), nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3, bias=False))
    value = torch.ones(rows, 5)
    (found,) = counted("layer", lambda: (layer(value),), False)
    assert torch.equal(found, layer(value))
    assert counted.total == 2 * rows * (5 * 7 + 7 * 3)


def test_no_peak_is_known_of_a_cpu() -> None:
    assert peak_of(torch.device("cpu"), "fp32") is None
