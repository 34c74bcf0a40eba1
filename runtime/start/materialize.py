"""Materialize: a plan and a script's model become a job that the script steps."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from autopar.capture.model.batch import check_module
from autopar.capture.model.state import preserve_generators
from autopar.errors import UsageError
from autopar.formats.plan import Plan
from autopar.options.train import Clip, TrainSettings
from autopar.ranks.context import RankContext, join_in_script
from autopar.ranks.device import found_device
from autopar.ranks.meeting import Arrival
from autopar.runtime.settings import check_training
from autopar.runtime.start.placement import check_launched
from autopar.runtime.start.script import ScriptJob
from autopar.schedules.check import check
from autopar.schedules.expand import expand


def materialize(
    model: nn.Module,
    plan: Plan,
    batch: object = None,
    *,
    loss: Callable[..., Any] | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    scheduler: Callable[[torch.optim.Optimizer], object] | None = None,
    layers: Callable[[nn.Module], list[nn.Module]] | None = None,
    accept_loss: bool = False,
    clip_norm: float | None = None,
    clip: Clip | None = None,
    share_gpus: bool = False,
    timeout_s: float = 300.0,
) -> ScriptJob:
    """Return one rank's job, in a script that torchrun started on every rank, or alone where the plan has one rank.

    Training starts from rank 0's values, and leaves ``model`` as it is: :meth:`ScriptJob.state_dict` has the trained
    ones. On other ranks its parameters may be on the meta device. Ranks must be given the same plan.

    Args:
        model: as :func:`autopar.profile` was given it, in a state of its own.
        plan: what to carry out.
        batch: an example of a mini-batch; None: what the first step is given, on every rank.
        loss: ``loss(output, batch)``, a mean over samples, or a sum and a count; None: the output carries it.
        optimizer: makes an optimizer of some parameters; None: ``AdamW(parameters, lr=1e-3)``.
        scheduler: makes a scheduler of an optimizer.
        layers: the model's layers, where it cannot be captured.
        accept_loss: whether a loss is taken that depends on how a mini-batch is divided; one that was accepted when it
            was profiled is.
        clip_norm: largest norm of gradients.
        clip: whose norm that is: ``"stage"``, each stage's own; None, or ``"model"``: that of all together.
        share_gpus: whether several ranks may have the same GPU.
        timeout_s: longest that a rank waits for another; in setting up, while none that it waits for uses a processor.

    Raises:
        UsageError: the plan cannot be carried out here, or ranks have different ones.
        FileError: the model is not the one that was planned for.
        CaptureError: it cannot be captured.
        ModelError: its loss depends on how a mini-batch is divided, or it is no model.

    >>> import torch
    >>> model, batch = torch.nn.Linear(4, 1), (torch.randn(8, 4), torch.randn(8, 1))
    >>> def loss(output, batch): return torch.nn.functional.mse_loss(output, batch[1])
    >>> plan = autopar.plan(autopar.profile(model, batch, loss=loss, budget_s=0.1), gpus=1)
    >>> with autopar.materialize(model, plan, loss=loss) as job:
    ...     job.step(batch).step
    0
    """
    settings = partial(TrainSettings, clip_norm=clip_norm, clip=clip)

    def check_all() -> None:
        check_module(model)
        check_training(plan, settings(), share_gpus=share_gpus)
        if plan.pipelines:
            raise UsageError(
                "a script steps one pipeline, and the plan has several, each with mini-batches of its own; train it "
                "with `autopar run`"
            )
        check(expand(plan), plan)

    functions = {"loss": loss, "optimizer": optimizer, "scheduler": scheduler, "layers": layers}
    # Where the device is a GPU, the job leaves its generator as it was, too.
    with preserve_generators(torch.device("cpu")), ExitStack() as failing:
        joining = failing.enter_context(ExitStack())
        place = plan.device_type, timeout_s, len(plan.devices), share_gpus
        context = joining.enter_context(join_in_script(*place, check_all))
        digests = context.gather(hashlib.sha256(plan.dumps().encode()).hexdigest())
        for rank, digest in enumerate(digests):
            if digest != digests[0]:
                raise UsageError(
                    f"rank {rank} has another plan than rank 0; plan once, save the plan, and load it on every rank"
                )
        notes = check_launched(plan, [Arrival.loads(text) for text in context.gather(_arrival(context).dumps())]).notes
        if plan.device_type == "cpu":
            torch.set_num_threads(plan.threads)
        job = ScriptJob(model, plan, context, joining.close, functions, settings(), notes, accept_loss=accept_loss)
        if batch is not None:
            job.prepare(batch)
        failing.pop_all()
    return job


def _arrival(context: RankContext) -> Arrival:
    place = platform.node(), context.local_rank, context.local_size
    return Arrival(*place, {}, {}, found_device(context.device))
