"""Normalisation: the batch normalisation of a rank's layers, as it was asked for."""

from __future__ import annotations

from collections.abc import Callable

from autopar.capture.graph import Layer, LayerGraph
from autopar.errors import UsageError
from autopar.formats.plan import Plan
from autopar.runtime.batch_norm import normalizes, rewritable
from autopar.runtime.deferred import DeferredBatchNorms
from autopar.runtime.groups import replica_ranks, synced_groups
from autopar.runtime.settings import TrainSettings
from autopar.runtime.synced import SyncedBatchNorm, synchronize
from autopar.runtime.transport import Transport

__all__ = ["normalizing"]

Layers = dict[int, list[Layer]]
"""A rank's, by stage."""


def normalizing(
    plan: Plan, rank: int, graph: LayerGraph, layers: Layers, transport: Transport, settings: TrainSettings
) -> tuple[Layers, Callable[[], None]]:
    """Return a rank's layers, with batch normalisation as it was asked for, and what is called at the end of a step.

    Args:
        plan: what is carried out.
        rank: which rank this is.
        graph: the captured model, whose layers stay what they are.
        layers: the rank's.
        transport: carries statistics between replicas.
        settings: say what is asked for.

    Raises:
        UsageError: something is, and the model has no batch normalisation.
    """
    asked = [f"`{name}_batch_norm`" for name in ("deferred", "sync") if getattr(settings, f"{name}_batch_norm")]
    if not asked:
        return layers, lambda: None
    if not any(map(normalizes, graph.layers)):
        raise UsageError(f"{asked[0]}: the model has no batch normalisation; leave the option out")
    layers = {index: [rewritable(layer) for layer in each] for index, each in layers.items()}
    mine, ranks = [layer for each in layers.values() for layer in each], replica_ranks(plan, layers)
    if settings.deferred_batch_norm:
        return layers, DeferredBatchNorms(mine, transport, ranks, rank).settle
    if ranks in synced_groups(plan):
        synchronize(mine, SyncedBatchNorm(transport, ranks, rank))
    return layers, lambda: None
