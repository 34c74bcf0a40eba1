"""Work: the step time that remains if every device computes without pause."""

from __future__ import annotations

import numpy as np

from autopar.planner.candidate import Family
from autopar.planner.costs import CostModel

__all__ = ["work_s"]

ROUNDING = 1e-12


def work_s(costs: CostModel, family: Family) -> float:
    """Return a lower bound of all plans of a family: every layer on the kind of device, and divided, as suits it best.

    Replicas that take turns, sharding and recomputation only add to a layer's work.
    """
    least = np.full(costs.layer_count, np.inf)
    for kind in sorted(set(costs.kind_of)):
        count = costs.kind_of.count(kind)
        most = count if costs.divisible else min(count, family.micro_batch_size)
        for width in range(1, most + 1):
            total = np.zeros(costs.layer_count)
            adding = costs.adding(family.micro_batches, width)
            for rows in costs.shares(family.micro_batch_size, width):
                total += np.diff(costs.sums.forward(rows, kind=kind))
                total += np.diff(costs.sums.backward(rows, adding, kind=kind))
            least = np.minimum(least, total)
    seconds = float(least.sum()) * family.micro_batches / len(costs.devices) * (1 - ROUNDING)
    return costs.profile.step_overhead_s + seconds
