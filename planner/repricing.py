"""DictatedRun: a training run whose plan is known, priced again and again for other times of its layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from autopar.errors import UsageError
from autopar.planner.candidate import Candidate, Family, place, with_depths
from autopar.planner.costs.layers import LayerCosts, Seconds
from autopar.planner.costs.model import CostModel, Durations, durations
from autopar.planner.simulator.rows import Rows
from autopar.planner.simulator.simulate import Simulator, run
from autopar.schedules import SCHEDULES


class DictatedRun:
    """A run with given stages, micro-batches and schedule; its step is priced as any plan's, by the simulator.

    Its program is expanded once. Replicas that do the same at the same time are simulated as one.
    """

    def __init__(self, costs: CostModel, family: Family, cuts: Sequence[int], widths: Sequence[int]) -> None:
        """``cuts`` are the layers before which the stages end; the first of the schedule's warm-ups is taken.

        Raises:
            UsageError: there is no such schedule, a replica has no sample, or the devices do not suffice.
        """
        micro_batches, micro_batch_size, schedule = family
        if schedule not in SCHEDULES:
            raise UsageError(f"schedule {schedule!r} is none of {', '.join(SCHEDULES)}")
        if max(widths) > micro_batch_size:
            raise UsageError(f"{max(widths)} replicas share a micro-batch of {micro_batch_size} samples")
        if sum(widths) > len(costs.devices):
            raise UsageError(f"{sum(widths)} devices are used of a cluster of {len(costs.devices)}")
        depths = next(iter(SCHEDULES[schedule].warmups(len(cuts), 1, micro_batches).values()))
        self._costs = costs
        self._candidate = with_depths(family, place(family, cuts, widths), depths)
        self._width = _common_width(self._candidate, durations(costs, self._candidate))
        self._program = _narrow(Simulator(costs).rows_of(self._candidate), self._width)

    @property
    def rows(self) -> tuple[int, ...]:
        """Every number of samples that a replica takes of a micro-batch."""
        return tuple(sorted({int(rows) for stage in self._candidate.stages for rows in stage.shares}))

    def step_s(
        self,
        forward_s: Mapping[int, Sequence[float]],
        backward_s: Mapping[int, Sequence[float]],
        accumulate_s: Sequence[float],
        update_s: Sequence[float],
        overhead_s: float,
    ) -> float:
        """Return the seconds of a step, given every layer's times by number of samples.

        ``accumulate_s`` is what a backward takes beyond ``backward_s`` where it adds to gradients that are there,
        ``overhead_s`` what a step takes beside its layers.
        """
        costs = self._costs.with_layer_costs(_GivenTimes(forward_s, backward_s, accumulate_s, update_s))
        times = replace(durations(costs, self._candidate), overhead_s=overhead_s)
        return run(self._program, _first_replicas(times, self._width))


class _GivenTimes(LayerCosts):
    """Times of layers that are handed over, at the numbers of samples that are asked for."""

    def __init__(
        self,
        forward_s: Mapping[int, Sequence[float]],
        backward_s: Mapping[int, Sequence[float]],
        accumulate_s: Sequence[float],
        update_s: Sequence[float],
    ) -> None:
        self._forward = {rows: [0.0, *accumulate(seconds)] for rows, seconds in forward_s.items()}
        self._backward, self._accumulate = backward_s, accumulate_s
        self.update_sums = [0.0, *accumulate(update_s)]

    def sums(self, field: Seconds, rows: float, adding: float = 0.0) -> list[float]:
        if field == "forward_s":
            return self._forward[int(rows)]
        each = zip(self._backward[int(rows)], self._accumulate, strict=True)
        return [0.0, *accumulate(seconds + adding * more for seconds, more in each)]


def _common_width(candidate: Candidate, times: Durations) -> int:
    """Return the replicas that every stage has if all do the same at the same time, else 1."""
    stages = candidate.stages
    width = len(stages[0].shares)
    alike = all(len(stage.shares) == width and len(set(stage.shares)) == 1 for stage in stages)
    prices: dict[tuple[int, int], set[float]] = {}
    for (sender, receiver), seconds in times.message_s.items():
        alike = alike and sender % width == receiver % width
        prices.setdefault((sender // width, receiver // width), set()).add(seconds)
    return width if alike and all(len(found) == 1 for found in prices.values()) else 1


def _narrow(rows: Rows, width: int) -> Rows:
    """Return the program of every stage's first replica, with ranks counted among them; -1 is no rank."""
    return [
        [(code, index, peer if peer < 0 else peer // width, own // width) for code, index, peer, own in rows[rank]]
        for rank in range(0, len(rows), width)
    ]


def _first_replicas(times: Durations, width: int) -> Durations:
    if width == 1:
        return times
    by_rank = ("stage", "forward_s", "backward_s", "exposed_s", "reduce_s", "update_s")
    messages = times.message_s.items()
    return replace(
        times,
        **{name: getattr(times, name)[::width] for name in by_rank},
        message_s={(one // width, other // width): each for (one, other), each in messages if one % width == 0},
    )
