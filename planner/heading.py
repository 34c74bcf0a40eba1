"""Heading: what every plan file begins with, whatever its plan is the best of."""

from __future__ import annotations

from typing import TypedDict

from autopar.formats.profile import DeviceType, ModelSource, Precision
from autopar.planner.costs.model import CostModel
from autopar.planner.options import PlanOptions


class Heading(TypedDict):
    """What a plan says of anything but its stages; fields as of the plan."""

    model: ModelSource
    batch: int
    precision: Precision
    device_type: DeviceType
    threads: int
    seed: int
    bytes_per_s: float | None
    times_of: str | None
    divisible: bool
    ignored_state: tuple[str, ...]
    loss_difference: float | None
    counts_labels: bool


def heading(costs: CostModel, options: PlanOptions) -> Heading:
    """Return what every plan for a profile and options begins with."""
    profile = costs.profile
    return Heading(
        model=profile.model,
        batch=costs.batch,
        precision=profile.precision,
        device_type=profile.device.type,
        threads=profile.device.threads,
        seed=options.seed,
        bytes_per_s=options.bytes_per_s,
        times_of=costs.stands,
        divisible=costs.divisible,
        ignored_state=profile.ignored_state,
        loss_difference=profile.loss_difference,
        counts_labels=profile.counts_labels,
    )
