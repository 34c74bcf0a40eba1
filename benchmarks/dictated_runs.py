"""Dictated: steps of runs that others measured, whose stages, teams and recomputed layers are known."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from autopar.ownership import Replicas
from autopar.planner.candidate import Family, place, with_depths
from autopar.planner.costs.model import CostModel
from autopar.planner.simulator.simulate import Simulator
from autopar.schedules import SCHEDULES

__all__ = ["dictated_step"]


def dictated_step(
    costs: CostModel, family: Family, cuts: Sequence[int], replicas: Sequence[Replicas], recompute: Collection[int] = ()
) -> tuple[float, list[int]]:
    """Return the seconds of a step and the peak bytes of its stages, in the usual depths of its schedule.

    Args:
        costs: prices all.
        family: micro-batches, their samples and the schedule.
        cuts: layers before which the stages end.
        replicas: of each stage.
        recompute: layers that run forward again.
    """
    placed = place(family, cuts, replicas)
    stages = (
        stage._replace(recompute=tuple(at for at in range(stage.first, stage.stop) if at in recompute))
        for stage in placed
    )
    depths = next(iter(SCHEDULES[family.schedule].warmups(len(cuts), 1, family.micro_batches).values()))
    candidate = with_depths(family, tuple(stages), depths)
    # Messages have links for themselves, as in runs that constants are fitted to.
    simulator = Simulator(costs, replace(costs.sharing, links={}, slowdowns={}))
    return simulator.step_s(candidate), costs.peak_bytes(candidate)
