"""Shares: how many rows of a micro-batch the replicas of a stage take, by their speed.

Those on one kind of device take as even a share each as whole rows allow. Of several kinds, each further row goes to
the replica that then has computed its rows soonest, so that the slowest one ends first: no other whole rows have a
lower maximum of a replica's forward and backward, where these take longer for more rows. What a replica may not have,
by the limits of its layers or by its own memory, goes to others.

Shares follow from a stage's layers and replicas, not from what is in flight or run again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from autopar.ownership import even_shares
from autopar.planner.candidate import CandidateStage, Family, has_chunks, within
from autopar.planner.costs.activations import Counts, Numbers
from autopar.planner.costs.layers import Site
from autopar.planner.costs.memory import peak_of
from autopar.planner.costs.model import CostModel
from autopar.planner.costs.rank_memory import peak_terms_of
from autopar.planner.order import whole_s

TIED = 9
"""Decimals, of the longest seconds, to which those of two kinds are told apart."""


def rows_by_speed(seconds: Sequence[Numbers], counts: Sequence[int], rows: int, least: int = 1) -> list[Counts]:
    """Return how many rows all replicas of each kind take together.

    Args:
        seconds: by kind, of one replica with 1, 2, ... rows, ``[rows, ...]``, as many as :func:`most_rows`; infinite
            where it may not have so many.
        counts: replicas, by kind.
        rows: of a micro-batch.
        least: what each replica has of them.

    >>> twice = np.array([1.0, 2.0, 3.0, 4.0, 5.0]), np.array([2.0, 4.0, 6.0, 8.0, 10.0])
    >>> [each.tolist() for each in rows_by_speed(twice, (1, 1), 6)]
    [4, 2]
    """
    # The seconds of a replica with a row more, for all replicas of a kind, are taken in ascending order.
    further = [np.maximum.accumulate(each, axis=0)[least:] for each in seconds]
    every = np.concatenate(further)
    scale = np.where(np.isfinite(every), every, 0.0).max(axis=0, initial=np.finfo(float).tiny)
    order = np.argsort(np.round(every / scale, TIED), axis=0, kind="stable")
    kinds = np.repeat(np.arange(len(counts)), [len(each) for each in further])[order]
    each = np.array(counts)[kinds]
    taken = np.clip(rows - least * sum(counts) - (np.cumsum(each, axis=0) - each), 0, each)
    return [
        np.asarray(least * count + np.where(kinds == kind, taken, 0).sum(axis=0)) for kind, count in enumerate(counts)
    ]


def most_rows(counts: Sequence[int], rows: int, kind: int) -> int:
    """Return the most rows that a replica of a kind has, where each of the others has one at least.

    >>> most_rows((1, 2), 6, 0), most_rows((1, 2), 6, 1)
    (4, 3)
    """
    return max(1, -(-(rows - sum(counts) + counts[kind]) // counts[kind]))


def by_speed(costs: CostModel, stage: CandidateStage, family: Family) -> CandidateStage:
    """Return a stage whose replicas take rows by their speed, the last one most; of one kind, the stage as it is.

    Where stages share their devices, replicas take turns, rows are too few or divide freely, they stay as they are.
    """
    if not costs.is_mixed(stage):
        return stage
    few = stage.replicas.width > family.micro_batch_size
    if few or costs.divisible or stage.division != "split" or has_chunks(family.schedule):
        return by_share(costs, stage)
    forms = list(costs.forms_of(stage))
    counts = Counter(forms)
    even = by_share(costs, stage._replace(shares=costs.shares(family.micro_batch_size, stage.replicas)))
    totals = _totals(costs, stage, family, tuple(sorted(counts.items())))
    own = {form: sorted(even_shares(total, counts[form])) for form, total in totals.items()}
    if own == _rows_by_form(costs, even):
        return even
    # Of replicas with as many rows, the fastest is the last.
    order = sorted(range(len(forms)), key=lambda at: (-whole_s(costs, forms[at]), stage.firsts[at]))
    taken = sorted((own[forms[at]].pop(), rank, at) for rank, at in enumerate(order))
    devices = tuple(device for _, _, at in taken for device in stage.teams[at])
    return stage._replace(devices=devices, shares=tuple(rows for rows, _, _ in taken))


def by_share(costs: CostModel, stage: CandidateStage) -> CandidateStage:
    """Return a stage whose fastest devices have the largest shares; of several kinds, where some may be faster.

    Of replicas that take turns, the first ones have the more of them.
    """
    if stage.team > 1 or not costs.is_mixed(stage):
        return stage
    fastest = sorted(stage.devices, key=lambda device: (whole_s(costs, costs.kind_of[device]), device))
    largest = sorted(range(len(fastest)), key=lambda at: -stage.shares[at])
    placed = dict(zip(largest, fastest, strict=True))
    return stage._replace(devices=tuple(placed[at] for at in range(len(fastest))))


def _rows_by_form(costs: CostModel, stage: CandidateStage) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for form, rows in sorted(zip(costs.forms_of(stage), stage.shares, strict=True)):
        found.setdefault(form, []).append(rows)
    return found


class _Asked(NamedTuple):
    """What the rows of all replicas of each kind depend on."""

    stage: CandidateStage
    """With as many of its first device in place of all, and without shares."""
    site: Site
    family: Family
    counts: tuple[tuple[int, int], ...]
    """(form, replicas)."""
    limits: tuple[int, ...]


_KNOWN: WeakKeyDictionary[CostModel, dict[_Asked, dict[int, int]]] = WeakKeyDictionary()


def _totals(
    costs: CostModel, stage: CandidateStage, family: Family, counts: tuple[tuple[int, int], ...]
) -> dict[int, int]:
    """Return the rows of all replicas of every form together."""
    site = Site.of(stage.shard, costs.copies_place(stage), 0)
    limits = tuple(costs.limit_of(stage, form) for form, _ in counts)
    alike = stage._replace(devices=stage.devices[:1] * len(stage.devices), shares=(), warmup=1, recompute=())
    asked, known = _Asked(alike, site, family, counts, limits), _KNOWN.setdefault(costs, {})
    if asked not in known:
        known[asked] = _new_totals(costs, asked)
    return known[asked]


def _new_totals(costs: CostModel, asked: _Asked) -> dict[int, int]:
    stage, rows = asked.stage, asked.family.micro_batch_size
    limits = [each for each in costs.share_limits if each.overlaps(stage.first, stage.stop)]
    least = max((each.least for each in limits), default=1)
    replicas = [count for _, count in asked.counts]
    if least * sum(replicas) > rows:
        least = 1
    every = []
    for kind, ((form, _), limit) in enumerate(zip(asked.counts, asked.limits, strict=True)):
        most = most_rows(replicas, rows, kind)
        may = min(most, _most_held(costs, asked, form, limit, most), *(int(min(each.most, most)) for each in limits))
        seconds = [_seconds(costs, asked, form, share) if share <= may else np.inf for share in range(1, most + 1)]
        every.append(np.array(seconds))
    totals = rows_by_speed(every, replicas, rows, least)
    return {form: int(total) for (form, _), total in zip(asked.counts, totals, strict=True)}


def _seconds(costs: CostModel, asked: _Asked, form: int, rows: int) -> float:
    """Return the seconds of a forward and a backward of one replica of several."""
    layers, site = asked.stage[:2], asked.site._replace(form=form)
    return float(costs.seconds.forward(*layers, rows, site) + costs.seconds.backward(*layers, rows, 1.0, site))


def _most_held(costs: CostModel, asked: _Asked, form: int, limit: int, most: int) -> int:
    """Return the most rows of a replica that fit its memory: of one micro-batch, all run again that may be."""
    memory, (first, stop) = costs.memory[form], asked.stage[:2]
    if memory.most(most, asked.family.micro_batches) <= limit:
        return most
    again = costs.recompute_levels(asked.family.micro_batch_size, form)[-1] if costs.recomputes else frozenset[int]()
    own = asked.stage._replace(recompute=within(again, first, stop))

    def exceeds(rows: int) -> bool:
        terms = peak_terms_of(own, asked.family.micro_batches, 0, rows)
        return bool(peak_of(memory.parts(first, stop, rows, terms.recompute, terms.sharded), terms) > limit)

    return bisect_left(range(1, most + 1), True, key=exceeds)
