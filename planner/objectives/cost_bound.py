"""CostBound: the least seconds per step on any numbers of devices of each kind, without what communication takes.

With f and t the forward, and forward and backward, of a micro-batch on the first stage, M t its work of a step, a its
update, and U and V the least that the stages behind it take until their last backward, and until their update,

    U = min over first stages of  max(M t, t + U)
    V = min over first stages of  max(max(M t, t + U) + a, f + V)

over all first stages that fit a device with one micro-batch in flight. Every plan's bound has these terms, and more
(:mod:`autopar.planner.bounds.chain`, also for boundaries that no gradient, or nothing, crosses); one table holds all
numbers of devices, so that it takes little beside a search.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.planner.bounds.work import ROUNDING
from autopar.planner.candidate import Family
from autopar.planner.costs.memory import Held, peak_of
from autopar.planner.costs.model import CostModel
from autopar.planner.options import PlanOptions
from autopar.planner.placement.pool import Pool

Numbers = npt.NDArray[np.float64]


class _Way(NamedTuple):
    """All stages on so many devices of a kind, ``[first, stop]``; infinite where they are none or do not fit."""

    kind: int
    width: int
    forward_s: Numbers
    both_s: Numbers
    work_s: Numbers
    update_s: Numbers


def least_steps_s(costs: CostModel, family: Family, options: PlanOptions, pool: Pool) -> Numbers:
    """Return a bound of the steps on all devices that each state of the pool leaves, less rounding."""
    layers = costs.layer_count
    forth, back = _crossed(costs)
    backward, done, step = (np.full((pool.states, layers + 1), np.inf) for _ in range(3))
    backward[:, layers] = done[:, layers] = step[:, layers] = 0.0
    ways = list(_ways(costs, family, options))
    for state in reversed(range(pool.empty)):
        for way in ways:
            if way.width <= pool.left(state, way.kind):
                after = pool.take(state, way.kind, way.width)
                ended = np.maximum(way.work_s, np.where(back, way.both_s + backward[after], 0.0))
                whole = np.maximum(ended + way.update_s, np.where(forth, way.forward_s + done[after], 0.0))
                for table, found in ((backward, ended), (done, whole), (step, np.maximum(whole, step[after]))):
                    np.minimum(table[state, :layers], found.min(axis=1), out=table[state, :layers])
    return np.asarray(costs.profile.step_overhead_s + step[:, 0] * (1 - ROUNDING))


def _crossed(costs: CostModel) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return whether layer ``stop`` reads of layers ``first:stop``, and whether a gradient returns."""
    forth, back = (np.zeros((costs.layer_count, costs.layer_count + 1), dtype=np.bool_) for _ in range(2))
    for tensor in costs.flows.crossing:
        for consumer in tensor.consumers:
            forth[: tensor.producer + 1, consumer] = True
            back[: tensor.producer + 1, consumer] |= tensor.gradient
    return forth, back


def _ways(costs: CostModel, family: Family, options: PlanOptions) -> Iterator[_Way]:
    rows, count = family.micro_batch_size, family.micro_batches
    for kind in sorted(set(costs.kind_of)):
        most = costs.kind_of.count(kind)
        split = most if costs.divisible else min(most, rows)
        for width in range(1, max(split, 1 if costs.divisible else min(most, count)) + 1):
            own = []
            if width <= split:
                own.append(_way(costs, family, options, kind, width, costs.shares(rows, width)))
            if 1 < width <= count and not costs.divisible:
                own.append(_way(costs, family, options, kind, width, (float(rows),)))
            yield _Way(kind, width, *(np.minimum.reduce(each) for each in zip(*(way[2:] for way in own), strict=True)))


def _way(
    costs: CostModel, family: Family, options: PlanOptions, kind: int, width: int, shares: tuple[float, ...]
) -> _Way:
    """Return the stages of one division; of one share for all replicas, they take turns."""
    turns = -(-family.micro_batches // width) if len(shares) < width else family.micro_batches
    adding = costs.adding(turns, width)
    forward, both = [], []
    for rows in sorted(set(shares)):
        forward.append(_between(costs.sums.forward(rows, kind=kind)))
        both.append(forward[-1] + _between(costs.sums.backward(rows, adding, kind=kind)))
    fits = _fits(costs, family, options, kind, width, min(shares), turns)
    update = _between(costs.layers[kind].update_sums) / (width if options.shard != "none" else 1)
    forward_s, both_s, work_s = np.minimum.reduce(forward), np.minimum.reduce(both), turns * np.maximum.reduce(both)
    return _Way(kind, width, *(each + fits for each in (forward_s, both_s, work_s, update)))


def _fits(
    costs: CostModel, family: Family, options: PlanOptions, kind: int, width: int, rows: float, turns: int
) -> Numbers:
    """Return 0 where a stage fits the largest device of a kind in some way, infinity elsewhere."""
    levels = costs.recompute_levels(family.micro_batch_size, kind)
    ends = (levels[0],) if options.recompute == "none" else (levels[0], levels[-1])
    parts = [costs.memory[kind].by_stop(rows, level) for level in dict.fromkeys(ends)]
    shards = ("none", *options.shards)
    warmup = turns if family.schedule == "gpipe" else 1
    held = [Held(rows, warmup, turns, width, shard=shard) for shard in dict.fromkeys(shards)]
    limit = max(each for each, own in zip(costs.limits_bytes, costs.kind_of, strict=True) if own == kind)
    least = np.minimum.reduce([np.asarray(peak_of(each, one)) for each in parts for one in held])
    some = np.triu(np.ones(least.shape, dtype=np.bool_), 1)
    return np.where(some & (least <= limit), 0.0, np.inf)


def _between(sums: list[float]) -> Numbers:
    """Return the sums from one layer to before another, as ``[first, stop]``."""
    return np.asarray(np.subtract.outer(np.array(sums), np.array(sums)).T[:-1])
