"""Transforms: the captured layers of a rank's stages become those that run, one transform after the other.

In come layers by stage; out come layers by stage, and what each transform adds to the rank's job: what is done before
and after an update, checks of the optimizer, the kind of a stage, notes. One that neither the plan nor the user asks
for leaves layers as they are. ``TRANSFORMS`` is their order:

1. Split: it cuts graphs as they were captured, and a rank that has parts of layers never holds more of them.
2. Hold: modules are given their tensors on the rank's device, where what follows makes tensors beside them.
3. Normalize: it looks for batch normalisations in graphs, which compiled layers do not show any more.
4. Compile: it takes graphs as they are by then. What is split or sharded is not compiled, and refused.
5. Shard: FSDP2 attends to the calls of modules, so nothing may wrap them later; no parameter is whole from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from autopar.capture.graph import Layer, LayerGraph
from autopar.capture.model.optimizer import divider, sharding_problem, splitting_problem
from autopar.capture.model.source import UserModel
from autopar.errors import UsageError
from autopar.formats.plan import Plan
from autopar.runtime.settings import check_compiling
from autopar.runtime.stage.batch_norm import normalizing
from autopar.runtime.stage.layers import check_shares, compile_layers
from autopar.runtime.stage.parameters import (
    LocalParameters,
    RankInputs,
    check_split_seeds,
    hold,
    replicate_buffers,
    sharded_parameter_names,
    whole,
)
from autopar.runtime.stage.stage import Stage

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_SPLIT_SEEDS = (
    "`split_seeds`: every part of a layer drew the dropout of its attention for itself, so what was trained depends on "
    "how many devices run a replica"
)

OptimizerCheck = Callable[[UserModel, Sequence[tuple[str, torch.nn.Parameter]]], None]
"""Has the user's optimizer step small tensors in place of named parameters; what it refuses is a ``UsageError``."""


@dataclass(frozen=True)
class RankLayers:
    """A rank's layers between two transforms, and what there is of its job by then."""

    layers: dict[int, list[Layer]]
    """By stage."""
    local: LocalParameters = field(default_factory=lambda: LocalParameters({}, {}))
    """Of the layers, once they are held."""
    mesh: DeviceMesh | None = None
    """Of the replicas, if they shard."""
    before_update: Callable[[], None] = field(default=lambda: None)
    after_update: Callable[[], None] = field(default=lambda: None)
    optimizer_checks: tuple[OptimizerCheck, ...] = ()
    """What is asked of the optimizer before training."""
    kinds: Mapping[int, Callable[..., Stage]] = field(default_factory=dict)
    """What makes a stage of layers, where it is another than :class:`Stage`."""
    notes: tuple[str, ...] = ()
    """What whoever reads the report should know."""


def layers_of(plan: Plan, stage: int, graph: LayerGraph) -> list[Layer]:
    """Return a stage's layers."""
    return [graph.layer(name) for name in plan.stages[stage].layers]


def transform(inputs: RankInputs) -> RankLayers:
    """Return the layers that a rank runs, after all transforms.

    Raises:
        UsageError: something that is asked for cannot be had of these layers; says what to do.
    """
    stages = inputs.plan.ownership.ranks[inputs.rank].stages
    made = RankLayers({index: layers_of(inputs.plan, index, inputs.graph) for index in stages})
    for each in TRANSFORMS:
        made = each(inputs, made)
    return made


def _split(inputs: RankInputs, made: RankLayers) -> RankLayers:
    """Take this rank's parts of layers that a team runs together."""
    if inputs.settings.split_seeds:
        check_split_seeds(inputs.plan, inputs.graph)
    if len(inputs.team.ranks) == 1:
        return made
    layers = {index: inputs.team.split(index, each) for index, each in made.layers.items()}
    notes = (_SPLIT_SEEDS,) if inputs.team.draws_per_part else ()
    check: OptimizerCheck = partial(_check_splitting, inputs.device)
    return replace(made, layers=layers, optimizer_checks=(check,), notes=notes)


def _hold(inputs: RankInputs, made: RankLayers) -> RankLayers:
    """Put parameters and buffers in place; buffers that forwards write are made alike on replicas after updates."""
    plan, rank = inputs.plan, inputs.rank
    local = hold(plan, made.layers, inputs.weights, inputs.device, inputs.team)
    every = [layer for each in made.layers.values() for layer in each]
    replicas = plan.ownership.ranks[rank].copies
    after_update = replicate_buffers(every, local, plan.replicate_state, inputs.transport, replicas, rank)
    return replace(made, local=local, after_update=after_update)


def _normalize(inputs: RankInputs, made: RankLayers) -> RankLayers:
    """Have batch normalisation done as it is asked for, which decides how many rows a layer normalises at once."""
    plan, settings = inputs.plan, inputs.settings
    check_shares(inputs.graph.layers, plan, sync_batch_norm=settings.sync_batch_norm)
    layers, update = normalizing(inputs, made.layers)
    return replace(made, layers=layers, before_update=update)


def _compile(inputs: RankInputs, made: RankLayers) -> RankLayers:
    """Have layers compiled when they first run."""
    if not inputs.settings.compile:
        return made
    check_compiling(inputs.plan, inputs.program)
    return replace(made, layers=compile_layers(made.layers))


def _shard(inputs: RankInputs, made: RankLayers) -> RankLayers:
    """Have replicas divide parameters of layers."""
    plan, settings = inputs.plan, inputs.settings
    shards = [index for index in made.layers if plan.stages[index].shard != "none"]
    if not shards:
        return made
    # It takes most of a second to import.
    from autopar.runtime.stage.sharded import ShardedStage, Sharding, shard_layers

    mesh = inputs.transport.mesh(plan.ownership.ranks[inputs.rank].copies)
    layers, kinds = dict(made.layers), dict[int, Callable[..., Stage]]()
    for index in shards:
        placed, own = plan.stages[index], layers[index]
        turning, decides = placed.period > 1, not inputs.graph.portable
        sharding = Sharding(placed.shard, mesh, settings.cpu_offload, turning, decides)
        with made.local.dividing(sharded_parameter_names(plan, index, own), own) as apart:
            layers[index], root = shard_layers(sharding, own, apart)
        kinds[index] = partial(ShardedStage, sharding, root)
    check: OptimizerCheck = partial(_check_sharding, mesh)
    checks = (*made.optimizer_checks, check)
    return replace(made, layers=layers, mesh=mesh, kinds=kinds, optimizer_checks=checks)


TRANSFORMS: tuple[Callable[[RankInputs, RankLayers], RankLayers], ...] = (_split, _hold, _normalize, _compile, _shard)
"""In order; see above for why."""


def _check_splitting(device: torch.device, user: UserModel, trained: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
    trouble = splitting_problem(user, trained, lambda tensor: tensor.to(device))
    if trouble is not None:
        raise UsageError(
            f"the optimizer of {user.path} cannot step parts of parameters, as devices that run a replica together "
            f"do: {trouble}; plan with `stages` of one device for each replica, or take another optimizer"
        )


def _check_sharding(mesh: DeviceMesh, user: UserModel, trained: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
    divide, device = divider(mesh), mesh.device_type
    trouble = sharding_problem(
        user, trained, lambda tensor: divide(tensor.to(device)), lambda tensor: whole(tensor).cpu()
    )
    if trouble is not None:
        raise UsageError(
            f"the optimizer of {user.path} cannot step stages that are sharded: {trouble}; plan with `shard='none'`"
        )
