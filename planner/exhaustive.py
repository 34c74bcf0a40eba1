"""Exhaustive: every plan simulated; the oracle on small problems.

Shares with the search its costs and its simulator only.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from math import comb
from typing import NamedTuple

from autopar.errors import UsageError
from autopar.planner.candidate import Candidate, Placed, divisors
from autopar.planner.judge import Best
from autopar.planner.options import PlanOptions
from autopar.planner.simulate import Simulator
from autopar.schedules import SCHEDULES
from autopar.schedules.route import even_shares

__all__ = ["everything", "exhaust"]

MOST_PLANS = 100_000


class _Group(NamedTuple):
    """Plans that differ in their cuts only."""

    micro_batches: int
    rows: int
    schedule: str
    depths: tuple[int, ...]
    widths: tuple[int, ...]


def everything(layers: int, devices: int, batch: int, options: PlanOptions) -> Iterator[Candidate]:
    """Yield every candidate: all micro-batch counts, schedules, in-flight depths, cuts and widths."""
    for group in _groups(layers, devices, batch, options):
        for cuts in combinations(range(1, layers), len(group.widths) - 1):
            yield _placed((0, *cuts, layers), group)


def exhaust(simulator: Simulator, options: PlanOptions, best: Best) -> float:
    """Improve on ``best`` by simulating every plan; return the least step time, which is its own bound.

    Raises:
        UsageError: there are too many plans.
    """
    costs = simulator.costs
    problem = (costs.layer_count, len(costs.devices), costs.batch, options)
    plans = 0
    for group in _groups(*problem):
        plans += comb(costs.layer_count - 1, len(group.widths) - 1)
        if plans > MOST_PLANS:
            raise UsageError(f"--solver exhaustive: more than {MOST_PLANS} plans; use --solver dp --gap 0")
    for candidate in everything(*problem):
        best.judge(simulator, candidate)
    return best.step_s


def _groups(layers: int, devices: int, batch: int, options: PlanOptions) -> Iterator[_Group]:
    for micro_batches in divisors(batch):
        if options.micro_batches not in (None, micro_batches):
            continue
        rows = batch // micro_batches
        for name, schedule in sorted(SCHEDULES.items()):
            for stages in range(options.min_stages, min(layers, devices) + 1) if _asked(name, options) else ():
                for depths in sorted(set(schedule.warmups(stages, micro_batches).values())):
                    for widths in _widths(stages, devices, rows, options.use_all):
                        yield _Group(micro_batches, rows, name, depths, widths)


def _asked(schedule: str, options: PlanOptions) -> bool:
    return options.schedule in ("auto", schedule)


def _widths(stages: int, devices: int, rows: int, use_all: bool) -> Iterator[tuple[int, ...]]:
    if stages == 0:
        if not use_all or devices == 0:
            yield ()
        return
    for width in range(1, min(rows, devices - stages + 1) + 1):
        for others in _widths(stages - 1, devices - width, rows, use_all):
            yield (width, *others)


def _placed(edges: tuple[int, ...], group: _Group) -> Candidate:
    stages, device = [], 0
    for index, width in enumerate(group.widths):
        devices = tuple(range(device, device + width))
        shares = even_shares(group.rows, width)
        stages.append(Placed(edges[index], edges[index + 1], devices, shares, group.depths[index]))
        device += width
    return Candidate(group.micro_batches, group.rows, group.schedule, tuple(stages))
