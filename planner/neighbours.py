"""Neighbours: what the search met that differs from the chosen plan in a single respect."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.formats.plan import SHARDS
from autopar.planner.alternatives import Reference
from autopar.planner.candidate import Candidate, counts_beside
from autopar.planner.search.judge import Best, Found
from autopar.planner.simulator.simulate import Simulator

MOST_NEIGHBOURS = 5


def neighbours(simulator: Simulator, best: Best, chosen: Candidate) -> list[Reference]:
    """Return the fastest plans that were met with fewer and more stages, devices or micro-batches, or less of the rest.

    At most five, the fastest first; and the fastest whose stages are equally wide, if the chosen one's are not.
    """
    rows: dict[Candidate, Reference] = {}
    for name, found in _met(simulator, best, chosen):
        if found is not None and found.candidate != chosen:
            step_s = simulator.step_s(found.candidate) if simulator.sharing else found.step_s
            rows.setdefault(found.candidate, Reference(name, Found(step_s, found.candidate), None))
    every = sorted(rows.values(), key=lambda each: each.found.step_s if each.found else 0.0)
    equal = [each for each in every if each.name == "equal widths"]
    others = [each for each in every if each.name != "equal widths"][: MOST_NEIGHBOURS - len(equal)]
    return sorted([*equal, *others], key=lambda each: each.found.step_s if each.found else 0.0)


def _met(simulator: Simulator, best: Best, chosen: Candidate) -> Iterator[tuple[str, Found | None]]:
    yield "equal widths", best.equal
    if best.found is not None and best.found.candidate != chosen:
        yield "fastest", best.found
    own = len(chosen.stages)
    for count in (own - 1, own + 1, 1):
        yield f"{count} stage{'s' if count > 1 else ''}", best.by_stages.get(count)
    for count in counts_beside(simulator.costs.batch, chosen.micro_batches):
        name = f"{count} micro-batch{'es' if count > 1 else ''}"
        yield name, best.by_trait.get(("micro_batches", count))
    used = len({device for stage in chosen.stages for device in stage.devices})
    fewer = max((count for kind, count in best.by_trait if kind == "devices" and count < used), default=0)
    yield f"{fewer} device{'s' if fewer > 1 else ''}", best.by_trait.get(("devices", fewer))
    if any(stage.recompute for stage in chosen.stages):
        yield "no recomputation", best.by_trait.get(("recompute", 0))
    shard = max(SHARDS.index(stage.shard) for stage in chosen.stages)
    for less in range(shard):
        yield f"shards {SHARDS[less]}" if less else "shards nothing", best.by_trait.get(("shard", less))
