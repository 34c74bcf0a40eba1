"""Alternatives: the plans that anyone would try first, beside the best ones of the search."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from autopar.formats.plan import Alternative
from autopar.planner.candidate import Family, place
from autopar.planner.costs import CostModel
from autopar.planner.judge import Best, Found
from autopar.planner.shortfall import explain
from autopar.planner.simulate import Simulator
from autopar.schedules.route import even_shares

__all__ = ["Reference", "record", "references", "try_stages"]


class Reference(NamedTuple):
    """A plan to compare with: found, or not feasible for a reason."""

    name: str
    found: Found | None
    reason: str | None


def try_stages(simulator: Simulator, families: Iterable[Family], cuts: Sequence[int], widths: Sequence[int]) -> Best:
    """Judge given stages in every family that has a row for each replica."""
    best = Best()
    for family in families:
        if max(widths) <= family.micro_batch_size:
            best.judge(simulator, place(family, tuple(cuts), tuple(widths)))
    return best


def references(simulator: Simulator, families: Sequence[Family]) -> list[Reference]:
    """Return pure data parallelism on all devices, and an equal split into stages of one device."""
    costs = simulator.costs
    layers, devices = costs.layer_count, len(costs.devices)
    stages = min(layers, devices)
    equal = tuple(accumulate(even_shares(layers, stages)))
    return [
        _reference(costs, "pure data parallelism", try_stages(simulator, families, (layers,), (devices,))),
        _reference(costs, "equal split", try_stages(simulator, families, equal, (1,) * stages)),
    ]


def _reference(costs: CostModel, name: str, best: Best) -> Reference:
    if best.found is not None:
        return Reference(name, best.found, None)
    if best.closest is not None:
        return Reference(name, None, explain(costs, best.closest[1]))
    rows = costs.batch
    return Reference(name, None, f"no micro-batch of a batch of {rows} has a sample for each of {len(costs.devices)}")


def record(name: str, found: Found | None, reason: str | None = None) -> Alternative:
    """Return a candidate as the plan file lists it."""
    if found is None:
        return Alternative(name=name, infeasible=reason)
    candidate = found.candidate
    return Alternative(
        name=name,
        step_s=found.step_s,
        stages=candidate.text(),
        micro_batches=candidate.micro_batches,
        schedule=candidate.schedule,
    )
