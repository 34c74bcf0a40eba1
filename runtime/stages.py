"""Stages: those of a rank, built from its layers as the plan divides what their replicas hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from autopar.capture.graph import Layer, LayerGraph, TensorSpec
from autopar.formats.plan import Plan
from autopar.formats.profile import Precision
from autopar.runtime.compiled import warm_up
from autopar.runtime.groups import replica_ranks
from autopar.runtime.held import Held, divided
from autopar.runtime.precision import autocast_of, crossing_specs
from autopar.runtime.seeds import seed_generator
from autopar.runtime.stage import Stage
from autopar.runtime.transport import Transport
from autopar.schedules.expand import stages_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["build_stages", "compile_stages", "mesh_of"]


def mesh_of(plan: Plan, rank: int, transport: Transport) -> DeviceMesh | None:
    """Return the mesh of a rank and those that divide parameters with it; None where nobody does."""
    stages, _ = stages_of(plan, rank)
    if all(plan.stages[stage].shard == "none" for stage in stages):
        return None
    return transport.mesh(replica_ranks(plan, stages))


def build_stages(
    plan: Plan,
    graph: LayerGraph,
    layers: Mapping[int, Sequence[Layer]],
    held: Held,
    mesh: DeviceMesh | None,
    device: torch.device,
    *,
    offload: bool,
) -> dict[int, Stage]:
    """Build a rank's stages, by index.

    Args:
        plan: what is carried out.
        graph: the captured model.
        layers: the rank's, by stage, with parameters in place.
        held: these parameters; of those that replicas divide, a part is left.
        mesh: of the replicas, where they divide any.
        device: where the stages compute.
        offload: whether what replicas divide waits in the host's memory.

    Raises:
        UsageError: a layer's parameters cannot be divided.
    """
    crossing, autocast = crossing_specs(plan, graph), autocast_of(plan.precision, device)
    built: dict[int, Stage] = {}
    for index, mine in layers.items():
        placed = plan.stages[index]
        flow = (mine, crossing, graph.inputs, graph.outputs, autocast, placed.recompute)
        if mesh is None or placed.shard == "none":
            built[index] = Stage(*flow)
            continue
        # What shards takes most of a second to import.
        from autopar.runtime.sharded import ShardedStage, Sharding

        parts = divided(plan, index, mine)
        names = {name for layer in mine for name in layer.parameters.values()}
        # Of this stage alone: a stage that is built later must find nobody else holding its parameters as a whole.
        apart = frozenset(held.parameters[name] for name in names - parts)
        turning = placed.division == "round-robin"
        sharding = Sharding(placed.shard, mesh, apart, offload, turning, decides=not graph.portable)
        with held.dividing(parts, mine):
            built[index] = ShardedStage(sharding, *flow)
    return built


def compile_stages(
    stages: Iterable[Stage], specs: Mapping[str, TensorSpec], rows: int, precision: Precision, device: torch.device
) -> list[str]:
    """Run the compiled layers of a rank's stages once, on zeros, so that they compile.

    Args:
        stages: the rank's.
        specs: of the model's tensors, by name.
        rows: samples in the rank's share of a micro-batch.
        precision: the plan's.
        device: where the stages compute.

    Returns:
        Warnings, each of a layer that does not compile.
    """
    warnings, autocast = list[str](), autocast_of(precision, device)
    for stage in stages:
        read = [*stage.received, *(specs[name] for name in stage.inputs)]
        values = {
            spec.name: torch.zeros(spec.shape(rows), dtype=spec.dtype, device=device).requires_grad_(spec.gradient)
            for spec in read
        }
        warnings += warm_up(stage.layers, rows, values, lambda layer: seed_generator(device, 0), autocast)
    return warnings
