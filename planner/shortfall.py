"""Shortfall: when nothing fits, the plan that comes closest, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autopar.errors import InfeasibleError
from autopar.planner.candidate import Candidate, Family, Placed, within
from autopar.planner.choices import Choice
from autopar.planner.costs import CostModel
from autopar.planner.options import PlanOptions
from autopar.planner.pool import in_order
from autopar.planner.tables import StageTables

__all__ = ["explain", "infeasible", "size"]


class _Way(NamedTuple):
    """The suffix whose worst stage lacks least: how much, and its first stage."""

    short: float
    kind: int
    width: int
    stop: int
    choice: Choice


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
) -> InfeasibleError:
    """Return the error that names the stage and the least shortfall over all plans; ``known`` is one already met."""
    closest = known
    for family in families:
        candidate = _closest(costs, family, options)
        if candidate is not None:
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
        f"use {', '.join(_remedies(options))}"
    )


def _remedies(options: PlanOptions) -> list[str]:
    found = []
    if options.recompute == "none":
        found.append("recomputation (--recompute auto)")
    if options.shard == "none":
        found.append("sharding (--shard auto)")
    if options.micro_batches is not None:
        found.append("smaller micro-batches (--micro-batches)")
    if options.schedule == "gpipe":
        found.append("fewer micro-batches in flight (--schedule auto)")
    return [*found, "more devices (--gpus)", "a smaller batch (--batch)", "or devices with more memory (--memory)"]


def _closest(costs: CostModel, family: Family, options: PlanOptions) -> Candidate | None:
    """The plan whose worst stage exceeds its memory least, with one micro-batch in flight."""
    pool = in_order(costs.kind_of)
    tables = StageTables(costs, pool, family, options)
    ways: dict[tuple[int, int, int], _Way] = {}
    for state in reversed(range(pool.states)):
        for count in range(max(1, options.min_stages)):
            _extend(tables, options, ways, state, count)
    if (0, 0, max(0, options.min_stages - 1)) not in ways:
        return None
    stages = []
    state = first = 0
    count = max(0, options.min_stages - 1)
    while first < costs.layer_count:
        way = ways[state, first, count]
        stages.append(_stage(tables, state, first, way))
        state, first, count = pool.take(state, way.kind, way.width), way.stop, max(0, count - 1)
    return Candidate(family.micro_batches, family.micro_batch_size, family.schedule, tuple(stages))


def _extend(
    tables: StageTables, options: PlanOptions, ways: dict[tuple[int, int, int], _Way], state: int, count: int
) -> None:
    """Add the best suffixes from a state on, of more than ``count`` stages."""
    pool, layers = tables.pool, tables.layers
    for kind in pool.kinds:
        for choice in tables.choices[kind]:
            if choice.division == "round-robin":
                continue
            asked = choice.widths(tables.family.micro_batches, tables.family.micro_batch_size, tables.costs.divisible)
            most = tables.widths(state, kind) if pool.left(state, kind) else 0
            for width in range(asked.start, min(most, asked.stop - 1) + 1):
                after = pool.take(state, kind, width)
                short = tables.shortfall(state, kind, choice, width)
                ends = np.full(layers + 1, np.inf)
                for stop in range(1, layers):
                    behind = ways.get((after, stop, max(0, count - 1)))
                    ends[stop] = np.inf if behind is None else behind.short
                if count == 0 and (not options.use_all or after == pool.empty):
                    ends[layers] = -np.inf
                worst = np.where(np.isfinite(ends) | np.isneginf(ends), np.maximum(short, ends), np.inf)
                worst[np.tril_indices(layers, 0, layers + 1)] = np.inf
                for first in range(layers):
                    stop = int(worst[first].argmin())
                    known = ways.get((state, first, count))
                    if worst[first, stop] < (np.inf if known is None else known.short):
                        ways[state, first, count] = _Way(float(worst[first, stop]), kind, width, stop, choice)


def _stage(tables: StageTables, state: int, first: int, way: _Way) -> Placed:
    costs, rows = tables.costs, tables.family.micro_batch_size
    level = costs.recompute_levels(rows, way.kind)[way.choice.last_level]
    recompute = within(level, first, way.stop)
    depth = 1 if tables.family.schedule != "gpipe" else tables.family.micro_batches
    devices = tables.pool.devices(state, way.kind, way.width)
    return Placed(first, way.stop, devices, costs.shares(rows, way.width), depth, recompute, way.choice.shard)
