"""Dictated run: a training run whose plan is known, priced again and again for other times of its layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from autopar.errors import UsageError
from autopar.ownership import Replicas, Shard
from autopar.planner.candidate import Candidate, Family, place, with_depths
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
        widths: Sequence[int],
        shard: Shard = "none",
        teams: Sequence[int] = (),
        *,
        sliced: bool = False,
    ) -> None:
        """Take stages, of which ``cuts`` are the layers before which they end; the first of the schedule's warm-ups.

        By stage, ``teams`` are how many devices run a replica, one if they are left out; they keep slices of the
        sequence where they are ``sliced``.

        Raises:
            UsageError: there is no such schedule, a replica has no sample, or the devices do not suffice.
        """
        micro_batches, micro_batch_size, schedule = family
        if schedule not in SCHEDULES:
            raise UsageError(f"schedule {schedule!r} is none of {', '.join(SCHEDULES)}")
        if max(widths) > micro_batch_size:
            raise UsageError(f"{max(widths)} replicas share a micro-batch of {micro_batch_size} samples")
        own = tuple(Replicas(team=size, sliced=sliced and size > 1) for size in teams or (1,) * len(widths))
        used = sum(width * each.team for width, each in zip(widths, own, strict=True))
        if used > len(costs.devices):
            raise UsageError(f"{used} devices are used of a cluster of {len(costs.devices)}")
        depths = next(iter(SCHEDULES[schedule].warmups(len(cuts), 1, micro_batches).values()))
        replicas = (each._replace(shard=shard).so_many(width) for each, width in zip(own, widths, strict=True))
        self._candidate = with_depths(family, place(family, cuts, replicas), depths)
        check_forms(costs, self._candidate)
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
        recompute: Sequence[int] = (),
    ) -> float:
        """Return the seconds of a step, given every layer's times by number of samples, as its ranks have it.

        ``accumulate_s`` is what a backward takes beyond ``backward_s`` where it adds to gradients that are there,
        ``overhead_s`` what a step takes beside its layers. Of a host that launches forwards and backwards,
        ``launches_s`` are its seconds. Backwards of layers of ``recompute`` run their forward again. A parameter that
        stages share takes each of them what it takes the first layer that has it.
        """
        layers = _GivenTimes(forward_s, backward_s, accumulate_s, update_s, launches_s)
        simulator = self._simulator.priced_by(self._simulator.costs.with_layer_costs(layers))
        return overhead_s - simulator.costs.profile.step_overhead_s + simulator.step_s(self._recomputing(recompute))

    def _recomputing(self, layers: Sequence[int]) -> Candidate:
        """Return the candidate with layers that run forward again."""
        stages = (
            stage._replace(recompute=tuple(sorted(layer for layer in layers if stage.first <= layer < stage.stop)))
            for stage in self._candidate.stages
        )
        return self._candidate._replace(stages=tuple(stages))


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
