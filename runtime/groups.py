"""Groups: the sets of ranks that a plan has meet, each in an order that all ranks share."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.formats.plan import Plan
from autopar.schedules.expand import rank_of

__all__ = ["reducing_groups", "reduction_groups", "replica_ranks", "synced_groups"]


def reducing_groups(plan: Plan) -> list[tuple[int, ...]]:
    """Return every set of ranks that reduce gradients together, in an order that all ranks share."""
    groups = [replica_ranks(plan, [index]) for index, stage in enumerate(plan.stages)]
    groups += [replica_ranks(plan, tied.stages) for tied in plan.tied]
    return list(dict.fromkeys(group for group in groups if len(group) > 1))


def reduction_groups(plan: Plan) -> list[tuple[int, ...]]:
    """Return every set of ranks that reduce together, all ranks among them, in an order that all ranks share."""
    return list(dict.fromkeys([*reducing_groups(plan), tuple(range(len(plan.devices)))]))


def synced_groups(plan: Plan) -> list[tuple[int, ...]]:
    """Return every set of ranks that divide micro-batches among them, in an order that all ranks share."""
    divided = [i for i, stage in enumerate(plan.stages) if stage.division == "split" and stage.replicas > 1]
    return list(dict.fromkeys(replica_ranks(plan, [index]) for index in divided))


def replica_ranks(plan: Plan, stages: Iterable[int]) -> tuple[int, ...]:
    """Return the ranks of stages, each once."""
    return tuple(dict.fromkeys(rank_of(plan, stage, i) for stage in stages for i in range(plan.stages[stage].replicas)))
