"""Work: the step time that remains if every device computes without pause."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from autopar.planner.candidate import Family
from autopar.planner.chunks import halves
from autopar.planner.costs.model import CostModel

ROUNDING = 1e-12


def work_s(costs: CostModel, family: Family) -> float:
    """Return a lower bound of all plans of a family: every layer on the kind of device, and divided, as suits it best.

    Replicas that take turns, sharding and recomputation only add to a layer's work.
    """
    least = np.minimum.reduce([layers_work_s(costs, family, kind) for kind in sorted(set(costs.kind_of))])
    return costs.profile.step_overhead_s + float(least.sum()) / len(costs.devices)


def layers_work_s(costs: CostModel, family: Family, kind: int) -> npt.NDArray[np.float64]:
    """Return the least work of a step, by layer, on any number of one kind of device, together."""
    least = np.full(costs.layer_count, np.inf)
    count = costs.kind_of.count(kind)
    most = count if costs.divisible else min(count, family.micro_batch_size)
    for width in range(1, most + 1):
        total = np.zeros(costs.layer_count)
        adding = costs.adding(family.micro_batches, width)
        for rows, replicas in Counter(costs.shares(family.micro_batch_size, width)).items():
            total += replicas * np.diff(costs.sums.forward(rows, kind=kind))
            total += replicas * _backwards_s(costs, family, rows, adding, kind)
        least = np.minimum(least, total)
    return least * family.micro_batches * (1 - ROUNDING)


def _backwards_s(costs: CostModel, family: Family, rows: float, adding: float, kind: int) -> npt.NDArray[np.float64]:
    """Return the seconds of every layer's backward; where some may be whole and some in halves, the fewest."""
    whole: npt.NDArray[np.float64] = np.diff(np.array(costs.sums.backward(rows, adding, kind=kind)))
    if not halves(family.schedule):
        return whole
    both: npt.NDArray[np.float64] = np.diff(np.array(costs.sums.halves(rows, adding, kind=kind))).sum(axis=0)
    return np.minimum(whole, both)
