"""Dictated run: a training run whose plan is known, priced again and again for other times of its layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from autopar.errors import UsageError
from autopar.ownership import Replicas
from autopar.planner.candidate import Family, place, with_depths, within
from autopar.planner.costs import memoize
from autopar.planner.costs.layers import Launches, LayerCosts, Seconds
from autopar.planner.costs.model import CostModel
from autopar.planner.dictated import check_forms
from autopar.planner.simulator.simulate import Simulator
from autopar.schedules import SCHEDULES


class DictatedRun:
    """A run with given stages, micro-batches and schedule; its step is priced as any plan's, by the simulator."""

    def __init__(
        self,
        costs: CostModel,
        family: Family,
        cuts: Sequence[int],
        replicas: Sequence[Replicas],
        recompute: Collection[int] = (),
    ) -> None:
        """Take stages, as deep as by the first of the schedule's warm-ups.

        Args:
            costs: prices them.
            family: micro-batches, their samples and the schedule.
            cuts: layers before which the stages end.
            replicas: of each stage.
            recompute: layers that run forward again.

        Raises:
            UsageError: there is no such schedule, a replica has no sample, or the devices do not suffice.
        """
        micro_batches, micro_batch_size, schedule = family
        if schedule not in SCHEDULES:
            raise UsageError(f"schedule {schedule!r} is none of {', '.join(SCHEDULES)}")
        most = max(each.width for each in replicas)
        if most > micro_batch_size:
            raise UsageError(f"{most} replicas share a micro-batch of {micro_batch_size} samples")
        used = sum(each.devices for each in replicas)
        if used > len(costs.devices):
            raise UsageError(f"{used} devices are used of a cluster of {len(costs.devices)}")
        depths = next(iter(SCHEDULES[schedule].warmups(len(cuts), 1, micro_batches).values()))
        placed = place(family, cuts, (each.so_many(each.width) for each in replicas))
        again = (stage._replace(recompute=within(recompute, stage.first, stage.stop)) for stage in placed)
        self._candidate = with_depths(family, tuple(again), depths)
        check_forms(costs, self._candidate)
        # Messages have links for themselves, as in runs that constants are fitted to.
        self._simulator = Simulator(costs, replace(costs.sharing, links={}, slowdowns={}))

    @property
    def rows(self) -> tuple[int, ...]:
        """Every number of samples that a replica takes of a micro-batch."""
        return tuple(sorted({int(rows) for stage in self._candidate.stages for rows in stage.shares}))

    def predicted(self) -> tuple[float, list[int]]:
        """Return the seconds of a step by the profile's own times, and the peak bytes of every stage."""
        return self._simulator.step_s(self._candidate), self._simulator.costs.peak_bytes(self._candidate)

    def step_s(
        self,
        forward_s: Mapping[int, Sequence[float]],
        backward_s: Mapping[int, Sequence[float]],
        accumulate_s: Sequence[float],
        update_s: Sequence[float],
        overhead_s: float,
        launches_s: tuple[Mapping[int, Sequence[float]], Mapping[int, Sequence[float]]] | None = None,
    ) -> float:
        """Return the seconds of a step, given every layer's times by number of samples, as its ranks have it.

        ``accumulate_s`` is what a backward takes beyond ``backward_s`` where it adds to gradients that are there,
        ``overhead_s`` what a step takes beside its layers. Of a host that launches forwards and backwards,
        ``launches_s`` are its seconds. A parameter that stages share takes each of them what it takes the first layer
        that has it.
        """
        layers = _GivenTimes(forward_s, backward_s, accumulate_s, update_s, launches_s)
        simulator = self._simulator.priced_by(self._simulator.costs.with_layer_costs(layers))
        return overhead_s - simulator.costs.profile.step_overhead_s + simulator.step_s(self._candidate)


class _GivenTimes(LayerCosts):
    """Times of layers that are handed over, at the numbers of samples that are asked for."""

    def __init__(
        self,
        forward_s: Mapping[int, Sequence[float]],
        backward_s: Mapping[int, Sequence[float]],
        accumulate_s: Sequence[float],
        update_s: Sequence[float],
        launches_s: tuple[Mapping[int, Sequence[float]], Mapping[int, Sequence[float]]] | None,
    ) -> None:
        self._accumulate, self.has_launches = accumulate_s, launches_s is not None
        self._seconds_of: dict[str, Mapping[int, Sequence[float]]] = {"forward_s": forward_s, "backward_s": backward_s}
        if launches_s is not None:
            self._seconds_of |= zip(("forward_launch_s", "backward_launch_s"), launches_s, strict=True)
        self.update_sums = [0.0, *accumulate(update_s)]

    @memoize
    def sums(self, field: Seconds | Launches, rows: float, adding: float = 0.0) -> list[float]:
        each = zip(self._seconds_of[field][int(rows)], self._accumulate, strict=True)
        return [0.0, *accumulate(seconds + adding * more for seconds, more in each)]

    def recompute_s(self, layer: int, rows: float) -> float:
        """Return what running a layer forward again takes."""
        return self._seconds_of["forward_s"][int(rows)][layer]
