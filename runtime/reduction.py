"""Reduction: a rank's reducer, laid out by its plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

from autopar.formats.plan import Plan
from autopar.runtime.gradients import Reducer
from autopar.runtime.groups import replica_ranks
from autopar.runtime.held import Held
from autopar.runtime.stage import Stage
from autopar.runtime.transport import Transport

if TYPE_CHECKING:
    # What shards takes most of a second to import.
    from autopar.runtime.sharded import ShardedStage

__all__ = ["reducer_of"]


def reducer_of(
    plan: Plan, rank: int, stages: Mapping[int, Stage], held: Held, transport: Transport, mark: Callable[[], object]
) -> Reducer:
    """Return what reduces a rank's gradients.

    Args:
        plan: what is carried out.
        rank: which rank this is.
        stages: its stages, by index.
        held: their parameters.
        transport: carries the sums.
        mark: marks the present moment, for :meth:`Reducer.finish` to return.
    """
    sharding = {index: stage for index, stage in stages.items() if plan.stages[index].shard != "none"}
    sharded = cast("dict[int, ShardedStage]", sharding)
    # Of what a stage's replicas divide, it takes care itself.
    parts = {each for stage in sharded.values() for each in stage.parts}
    layers = {
        index: [[each for each in layer.module.parameters() if each not in parts] for layer in stages[index].layers]
        for index in sorted(stages)
    }
    shared = {}
    for i, tied in enumerate(plan.tied):
        ranks = replica_ranks(plan, tied.stages)
        if stages.keys() & set(tied.stages) and len(ranks) > 1:
            shared[i] = held.parameters[tied.parameter], ranks
    replicas = replica_ranks(plan, stages)
    return Reducer(layers, sharded, replicas, shared, transport, mark, rank)
