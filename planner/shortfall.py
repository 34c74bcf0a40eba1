"""Shortfall: when nothing fits, the plan that comes closest, and what would make one fit."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import InfeasibleError
from autopar.planner.candidate import Candidate, Family
from autopar.planner.closest import closest, oversized
from autopar.planner.costs.model import CostModel
from autopar.planner.options import PlanOptions
from autopar.planner.remedies import Fits, advice, freed, remedies

MOST_STAGES = 8
"""That are written out in an error."""


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
    limit = costs.limit_bytes(stage.devices)
    return f"stage {index} ({layers}) needs {size(shorts[index])} more than {size(limit)} ({shorts[index]} bytes)"


def infeasible(
    costs: CostModel,
    families: Sequence[Family],
    options: PlanOptions,
    known: tuple[int, Candidate] | None,
    fits: Fits,
) -> InfeasibleError:
    """Return the error that names the stage, the least shortfall, and options with which a plan fits.

    Args:
        costs: prices.
        families: whose plans all count; none where stages are dictated.
        options: with which nothing fits.
        known: the least shortfall that was met already.
        fits: whether a plan fits with other options.
    """
    found = closest(costs, families, options)
    if found is None or (known is not None and known[0] <= found[0]):
        found = known
    if found is None:
        return InfeasibleError(f"{_unmet(costs, options)}; {advice(freed(costs, options, fits))}")
    candidate = found[1]
    layer = oversized(costs, families, options)
    large = "" if layer is None else f"layer {costs.profile.layers[layer].name} alone fits no device; "
    count = len(candidate.stages)
    stages = candidate.text() if count <= MOST_STAGES else f"{count} stages"
    how = f"{stages} with {candidate.schedule} and {candidate.micro_batches} micro-batches"
    return InfeasibleError(
        f"nothing fits the memory: {explain(costs, candidate)} even in the plan that comes closest ({how}); "
        f"{large}{advice(remedies(costs, options, fits, found[0]))}"
    )


def _unmet(costs: CostModel, options: PlanOptions) -> str:
    """Return why no plan obeys the options, whatever the memory."""
    devices = f"{len(costs.devices)} device{'s' if len(costs.devices) > 1 else ''}"
    if options.max_stages is not None or options.forbid_cut or options.pin:
        asked = "`max_stages`, `forbid_cut`, `pin` and `use_all` that were asked for"
        return f"no plan for {devices} obeys all of {asked}"
    if costs.single:
        return f"no plan uses all {devices}: {next(iter(costs.single.values())).reason}"
    if costs.share_limits:
        return f"no plan obeys what layers take at once: {costs.share_limits[0].text}"
    most = min(costs.layer_count, len(costs.devices))
    return (
        f"no plan uses all {devices}: {costs.layer_count} layers and a batch of {costs.batch} make at most {most} "
        "stages with a sample for every replica"
    )
