"""Given: a rank's job of a model that a script holds, built from an example of its batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from autopar.capture.copied import copied
from autopar.capture.export import capture
from autopar.capture.given import given_model
from autopar.capture.graph import LayerGraph
from autopar.capture.losses import check_loss, counted_loss
from autopar.capture.optimizer_settings import Settings
from autopar.capture.place import release
from autopar.capture.source import UserModel
from autopar.errors import AutoparError, TrainingError, UsageError
from autopar.formats.plan import Plan
from autopar.ranks.context import RankContext
from autopar.ranks.failure import Failure
from autopar.runtime.agree import Agreement
from autopar.runtime.batches import Loader
from autopar.runtime.connect import connect
from autopar.runtime.fit import fitted
from autopar.runtime.job import Job
from autopar.runtime.prefetch import Batch
from autopar.runtime.settings import TrainSettings
from autopar.runtime.stepping import check_together, whole_settings
from autopar.runtime.transport import Transport, sendable
from autopar.schedules.expand import expand, stages_of

__all__ = ["Built", "build_given"]

Functions = Mapping[str, Callable[..., object] | None]


class _GivenJob(Job):
    """A job that is given its batches."""

    def _loader(self, model: UserModel, graph: LayerGraph, settings: TrainSettings) -> Loader:
        return _NoLoader()


class _NoLoader:
    """Stands in where every batch is given."""

    samples = 0

    def load(self, step: int) -> Batch:
        raise TrainingError(f"step {step} was given no batch")


@dataclass(frozen=True, eq=False)
class Built:
    """What a job has once it knows what a batch looks like."""

    user: UserModel
    graph: LayerGraph
    job: Job
    transport: Transport
    agreement: Agreement
    batch: object
    """An example."""


def build_given(
    model: nn.Module,
    plan: Plan,
    context: RankContext,
    batch: object,
    functions: Functions,
    settings: TrainSettings,
    *,
    accept_loss: bool = False,
) -> Built:
    """Build a rank's stages; what one rank refuses, all refuse. Rank 0 checks the loss, unless ``accept_loss``.

    Raises:
        AutoparError: a rank was given no batch, or the model cannot be captured, or is not the one planned for.
    """
    transport = connect(context, plan, settings)
    agreement = Agreement(context.rank, tuple(range(context.size)), transport)
    error, found = None, None
    try:
        if batch is None:
            raise UsageError("was given no batch, and every rank needs one to begin with; or give materialize() one")
        # Other ranks' models may have no values.
        accepted = accept_loss or context.rank > 0
        found = _captured(model, plan, batch, functions, accept_loss=accepted)
    except AutoparError as caught:
        error = caught
    agreement.refuse(error)
    assert found is not None
    user, graph = found
    read = _spread(model, context, _wanted(plan, context.rank, graph))
    place = (context.rank, graph, user, read, transport, context.device)
    whole = _whole_settings(user, model, graph, plan, context)
    job: Job | None = None
    try:
        job = _GivenJob(plan, expand(plan), *place, lambda step, position: None, settings, whole)
        job.try_optimizer()
    except AutoparError as caught:
        error = caught
    agreement.refuse(error)
    assert job is not None
    return Built(user, graph, job, transport, agreement, batch)


def _captured(
    model: nn.Module, plan: Plan, batch: object, functions: Functions, *, accept_loss: bool
) -> tuple[UserModel, LayerGraph]:
    if plan.counts_labels and functions.get("loss") is None:
        functions = {**functions, "loss": counted_loss(model)}
    modes = [(module, module.training) for module in model.modules()]
    user = replace(given_model(model, batch, **functions), ignored_state=plan.ignored_state)
    graph = capture(user, model)
    if plan.divides and plan.loss_difference is None and not accept_loss and not graph.hollow:
        check_loss(user, model, graph, accepted=False)
    if not graph.portable:
        # Its layers are the model's own modules, whose parameters are about to be replaced.
        graph = capture(user, copied(model))
        for layer in graph.layers:
            # Those of its stage a rank is given, and the others it need not hold.
            release(layer)
    for module, mode in modes:
        module.training = mode
    return user, fitted(graph, plan, user)


def _whole_settings(
    user: UserModel, model: nn.Module, graph: LayerGraph, plan: Plan, context: RankContext
) -> Settings | None:
    """Return what rank 0's optimizer of the whole model gives every parameter; other ranks' models may have no values.

    Raises:
        AutoparError: what is wrong with it, on all ranks.
    """
    said: dict[str, object] = {}
    if context.rank == 0:
        try:
            check_together(user, model, graph, plan)
            said = {"settings": whole_settings(user, model)}
        except Exception as error:
            said = {"failure": Failure.of(error).as_dict()}
    heard = json.loads(context.gather(json.dumps(said))[0])
    if "failure" in heard:
        raise Failure(**heard["failure"]).as_error()
    settings: Settings | None = heard["settings"]
    return settings


def _wanted(plan: Plan, rank: int, graph: LayerGraph) -> set[str]:
    stages, _ = stages_of(plan, rank)
    layers = [graph.layer(name) for stage in stages for name in plan.stages[stage].layers]
    return {name for layer in layers for name in (*layer.parameters.values(), *layer.buffers.values())}


def _spread(
    model: nn.Module, context: RankContext, wanted: set[str]
) -> Callable[[Iterable[str]], Mapping[str, torch.Tensor]]:
    """Give every rank rank 0's values of what it wants, tensor by tensor; other ranks' models may have none."""
    kept: dict[str, torch.Tensor] = {}
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if context.rank == 0:
            tensor = sendable(value.detach().cpu()).clone()
        else:
            tensor = torch.empty(value.shape, dtype=value.dtype)
        if tensor.numel():
            context.broadcast(tensor.reshape(-1).view(torch.uint8))
        if name in wanted:
            kept[name] = tensor
    return lambda names: {name: kept[name] for name in names if name in kept}
