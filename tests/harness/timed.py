"""A tiny simulation: when every computation of a schedule runs, messages being free."""

from typing import NamedTuple

from autopar.formats.stage import layout_of
from autopar.schedules import SCHEDULES
from autopar.schedules.order import Computation, places


class Times(NamedTuple):
    forward_s: float
    input_s: float
    weight_s: float


class Timed(NamedTuple):
    step_s: float
    idle_s: list[float]
    """By group, between its first computation and its last."""


def orders(schedule: str, groups: int, chunks: int, micro_batches: int) -> list[list[Computation]]:
    """Return every group's computations, with the first depths that are named."""
    chosen = SCHEDULES[schedule]
    depths = next(iter(chosen.warmups(groups, chunks, micro_batches).values()))
    return [list(chosen.order(place)) for place in places(layout_of(schedule), groups, chunks, micro_batches, depths)]


def timed(ordered: list[list[Computation]], stages: int, times: Times) -> Timed:
    """Run every group's order as early as its own computations and those it needs allow."""
    length = dict(zip("FIWB", (*times, times.input_s + times.weight_s), strict=True))
    ends: dict[Computation, float] = {}
    spans: list[list[tuple[float, float]]] = [[] for _ in ordered]
    while any(len(span) < len(order) for span, order in zip(spans, ordered, strict=True)):
        before = len(ends)
        for span, order in zip(spans, ordered, strict=True):
            while len(span) < len(order):
                kind, stage, micro_batch = order[len(span)]
                needed = _needed(kind, stage, micro_batch, stages)
                if not all(each in ends for each in needed):
                    break
                start = max([span[-1][1] if span else 0.0, *(ends[each] for each in needed)])
                span.append((start, start + length[kind]))
                ends["I" if kind == "B" else kind, stage, micro_batch] = span[-1][1]
        assert len(ends) > before, "the order is stuck"
    worked = [sum(length[kind] for kind, *_ in order) for order in ordered]
    idle_s = [span[-1][1] - span[0][0] - work for span, work in zip(spans, worked, strict=True)]
    return Timed(max(ends.values()), idle_s)


def _needed(kind: str, stage: int, micro_batch: int, stages: int) -> list[Computation]:
    if kind == "F":
        return [("F", stage - 1, micro_batch)] if stage else []
    if kind == "W":
        return [("I", stage, micro_batch)]
    last = stage == stages - 1
    return [("F", stage, micro_batch), *([] if last else [("I", stage + 1, micro_batch)])]
