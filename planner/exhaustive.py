"""Exhaustive: every plan simulated; the oracle on small problems.

Shares with the search its costs and its simulator only.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from autopar.errors import UsageError
from autopar.planner.candidate import Candidate, Placed
from autopar.planner.judge import Best
from autopar.planner.options import PlanOptions
from autopar.planner.simulate import Simulator
from autopar.schedules import SCHEDULES
from autopar.schedules.route import even_shares

__all__ = ["everything", "exhaust"]

MOST_PLANS = 200_000


def everything(layers: int, devices: int, batch: int, options: PlanOptions) -> Iterator[Candidate]:
    """Yield every candidate: all micro-batch counts, schedules, in-flight depths, cuts and widths."""
    for micro_batches in range(1, batch + 1):
        if batch % micro_batches or options.micro_batches not in (None, micro_batches):
            continue
        rows = batch // micro_batches
        for name, schedule in sorted(SCHEDULES.items()):
            if options.schedule not in ("auto", name):
                continue
            for stages in range(options.min_stages, min(layers, devices) + 1):
                for depths in sorted(set(schedule.warmups(stages, micro_batches).values())):
                    for widths in _widths(stages, devices, rows, options.use_all):
                        for cuts in combinations(range(1, layers), stages - 1):
                            yield _placed((0, *cuts, layers), widths, depths, name, micro_batches, rows)


def exhaust(simulator: Simulator, options: PlanOptions, best: Best) -> float:
    """Improve on ``best`` by simulating every plan; return the least step time, which is its own bound.

    Raises:
        UsageError: there are too many plans.
    """
    costs = simulator.costs
    for count, candidate in enumerate(everything(costs.layer_count, len(costs.devices), costs.batch, options)):
        if count >= MOST_PLANS:
            raise UsageError(f"--solver exhaustive: more than {MOST_PLANS} plans; use --solver dp --gap 0")
        best.judge(simulator, candidate)
    return best.step_s


def _widths(stages: int, devices: int, rows: int, use_all: bool) -> Iterator[tuple[int, ...]]:
    if stages == 0:
        if not use_all or devices == 0:
            yield ()
        return
    for width in range(1, min(rows, devices - stages + 1) + 1):
        for others in _widths(stages - 1, devices - width, rows, use_all):
            yield (width, *others)


def _placed(
    edges: tuple[int, ...],
    widths: tuple[int, ...],
    depths: tuple[int, ...],
    schedule: str,
    micro_batches: int,
    rows: int,
) -> Candidate:
    stages, device = [], 0
    for index, width in enumerate(widths):
        devices = tuple(range(device, device + width))
        stages.append(Placed(edges[index], edges[index + 1], devices, even_shares(rows, width), depths[index]))
        device += width
    return Candidate(micro_batches, rows, schedule, tuple(stages))
