"""Stack: lower bounds of the step that each know more than the one before, from work alone to links."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.formats.predicted import Bounds
from autopar.planner.bounds.work import work_s
from autopar.planner.candidate import Family
from autopar.planner.chunks import halves
from autopar.planner.costs.model import CostModel
from autopar.planner.options import PlanOptions
from autopar.planner.placement.grouping import pool_of
from autopar.planner.search.best_first import MOST_BOUNDED, tables_of

Least = Callable[[CostModel, Family, float], float]
"""The least bound of any plan of a family under a cost model, if it is below some seconds."""


def least_bound_s(options: PlanOptions, most: int = MOST_BOUNDED) -> Least:
    """Return what bounds the plans that the options admit, by the search's tables; their work where these are large.

    ``most`` as of :func:`tables_of`.
    """

    def least(costs: CostModel, family: Family, below_s: float) -> float:
        pool = pool_of(costs, exact=options.gap == 0, use_all=options.use_all)
        found = work_s(costs, family)
        for late in (False, True) if halves(family.schedule) else (False,):
            tables = tables_of(costs, family, options, pool, below_s, late=late, most=most)
            if tables is None:
                return work_s(costs, family)
            found = max(found, min(below_s, costs.profile.step_overhead_s + tables.least_s))
            if found >= below_s:
                break
        return found

    return least


def stacked(costs: CostModel, families: Sequence[Family], least: Least, step_s: float) -> Bounds:
    """Return the bounds of all plans of some families; none is above ``step_s``, the step of one of them.

    Each drops something that only costs time: the bound without links and memory limits drops both, the next one the
    limits. A family whose weaker bound is not below the least stronger one met is left out; most are.
    """
    known = {family: work_s(costs, family) for family in families}
    work = min(step_s, *known.values())
    contiguous = max(work, least_s(known, least, costs.without(links=True, memory=True), step_s))
    linked = max(contiguous, least_s(known, least, costs.without(memory=True), step_s))
    return Bounds(work_s=work, contiguous_s=contiguous, linked_s=linked)


def least_s(
    known: dict[Family, float], least: Least, costs: CostModel, most_s: float, *, descending: bool = False
) -> float:
    """Return the least bound of all families, but at most ``most_s``; ``known`` bounds become those of ``costs``.

    Families of low known bounds are looked at first, or, ``descending``, last: where these are of few micro-batches
    that do not fit, they are the sooner left out.
    """
    best = most_s
    for family in sorted(known, key=lambda each: (known[each], each), reverse=descending):
        if known[family] >= best:
            continue
        known[family] = max(known[family], least(costs, family, best))
        best = min(best, known[family])
    return best
