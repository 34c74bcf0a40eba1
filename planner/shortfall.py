"""Shortfall: when nothing fits, the plan that comes closest, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.errors import InfeasibleError
from autopar.planner.candidate import Candidate, Family, place
from autopar.planner.costs import CostModel
from autopar.planner.options import PlanOptions
from autopar.planner.tables import FlowTables, SizeTables

__all__ = ["explain", "infeasible", "size"]


class _Choice(NamedTuple):
    """The least worst shortfall of suffixes and the first stage that achieves it, each ``[offset, first]``."""

    short: npt.NDArray[np.float64]
    width: npt.NDArray[np.int64]
    stop: npt.NDArray[np.int64]


def size(count: int) -> str:
    """Return bytes for people.

    >>> size(3 * 2**29), size(300)
    ('1.50 GiB', '300 B')
    """
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 2**power:
            return f"{count / 2**power:.2f} {unit}"
    return f"{count} B"


def explain(costs: CostModel, candidate: Candidate) -> str:
    """Return which stage of a candidate exceeds its memory, and by how much."""
    shorts = costs.shortfalls(candidate)
    index = max(range(len(shorts)), key=lambda at: (shorts[at], -at))
    stage = candidate.stages[index]
    names = costs.profile.layers[stage.first].name, costs.profile.layers[stage.stop - 1].name
    layers = f"layer {names[0]}" if names[0] == names[1] else f"layers {names[0]}..{names[1]}"
    limit = min(costs.limits_bytes[device] for device in stage.devices)
    return f"stage {index} ({layers}) needs {size(shorts[index])} more than {size(limit)} ({shorts[index]} bytes)"


def infeasible(
    costs: CostModel,
    families: Iterable[Family],
    options: PlanOptions,
    known: tuple[int, Candidate] | None,
) -> InfeasibleError:
    """Return the error that names the stage and the least shortfall over all plans; ``known`` is one already met."""
    flows = FlowTables(costs)
    closest = known
    for family in families:
        sizes = SizeTables(costs, flows, family.micro_batches, family.micro_batch_size)
        for candidate in _closest(sizes, family, options):
            short = max(costs.shortfalls(candidate))
            if closest is None or short < closest[0]:
                closest = (short, candidate)
    if closest is None:
        most = min(costs.layer_count, len(costs.devices))
        return InfeasibleError(
            f"no plan uses all {len(costs.devices)} devices: {costs.layer_count} layers and a batch of {costs.batch} "
            f"make at most {most} stages with a sample for every replica; drop --use-all or raise --batch"
        )
    candidate = closest[1]
    how = f"{candidate.text()} with {candidate.schedule} and {candidate.micro_batches} micro-batches"
    return InfeasibleError(
        f"nothing fits the memory: {explain(costs, candidate)} even in the plan that comes closest ({how}); "
        "use more devices (--gpus), a smaller batch (--batch), or devices with more memory (--memory)"
    )


def _closest(sizes: SizeTables, family: Family, options: PlanOptions) -> list[Candidate]:
    """For every number of stages, the plan whose worst stage exceeds its memory least."""
    choices: list[_Choice] = []
    found = []
    for behind in range(min(sizes.layers, sizes.devices)):
        choices.append(_choose(sizes, family, behind, choices, options.use_all))
        if behind + 1 >= options.min_stages and np.isfinite(choices[-1].short[0, 0]):
            offset = first = 0
            widths, cuts = [], []
            for choice in reversed(choices):
                width, stop = int(choice.width[offset, first]), int(choice.stop[offset, first])
                widths.append(width)
                cuts.append(stop)
                offset, first = offset + width, stop
            found.append(place(family, tuple(cuts), tuple(widths)))
    return found


def _choose(sizes: SizeTables, family: Family, behind: int, choices: list[_Choice], use_all: bool) -> _Choice:
    layers, devices = sizes.layers, sizes.devices
    shape = (devices + 1, layers + 1)
    best = _Choice(np.full(shape, np.inf), np.zeros(shape, np.int64), np.zeros(shape, np.int64))
    for offset in range(devices):
        for width in range(1, min(sizes.widths, devices - offset) + 1):
            worst = sizes.shortfall(width, offset, family.depths[behind])
            if behind:
                worst = np.maximum(worst, choices[-1].short[offset + width][None, :])
            else:
                closed = not use_all or offset + width == devices
                worst = np.where(np.arange(layers + 1) == layers, worst, np.inf) if closed else worst + np.inf
            stop = worst.argmin(axis=1)
            least = worst[np.arange(layers), stop]
            better = np.flatnonzero(least < best.short[offset, :layers])
            best.short[offset, better] = least[better]
            best.width[offset, better], best.stop[offset, better] = width, stop[better]
    return best
