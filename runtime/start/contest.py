"""Contest: one plan, with its weight policy and its seed, trains for some mini-batches, and is measured.

In comes the plan; out comes the loss of every mini-batch, how long one took, and what a rank held. Whoever compares
plans by running them, command, benchmark or test, asks :func:`contest` of each. Every run has new processes, so that
none holds what another left. A plan for other devices than this host's is emulated: its ranks are processes that
compute on CPUs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, cast

import torch

from autopar.capture.cache.recall import build_and_capture
from autopar.capture.plain.loop import train_plainly
from autopar.errors import AutoparError, ModelError, TrainingError, UsageError, cause_of, printable
from autopar.formats.contest import ContestResult
from autopar.formats.plan import Plan
from autopar.options.contest import ContestOptions
from autopar.options.train import PULLS, RunOptions, TrainSettings
from autopar.ranks.allocator import keep_pages
from autopar.ranks.context import RankContext
from autopar.ranks.failure import NonFiniteError
from autopar.ranks.monitor import Watch
from autopar.ranks.pool import RankPool
from autopar.ranks.scratch import Scratch
from autopar.runtime.device import PeakMemory
from autopar.runtime.settings import check_scope
from autopar.runtime.stage.parameters import first_stages
from autopar.runtime.start.launch import StepProgress, check_devices, run
from autopar.runtime.start.verify import RANK_BYTES, available_bytes, in_float64
from autopar.runtime.start.worker import load_for


class _Measured(NamedTuple):
    loss: Sequence[float]
    step_s: float
    peak_bytes: int


def contest(
    plan: Plan,
    model: str,
    data: Path | None,
    asked: ContestOptions,
    progress: StepProgress = lambda step, loss: None,
    *,
    is_plain: bool = False,
) -> ContestResult:
    """Train by a plan, and measure; what fails or diverges is a result, too.

    Args:
        plan: what is trained, with its seed.
        model: MODEL, as :func:`autopar.capture.model.source.load` reads it.
        data: the file that feeds an ``hf:`` model, if it has one.
        asked: how long, and in which type.
        progress: told of every mini-batch.
        is_plain: whether the plain loop trains, in one process, and no ranks.

    Raises:
        TrainingError: the run was asked to end, and did.
    """
    losses = dict[int, float]()

    def take(step: int, loss: float) -> None:
        losses[step] = loss
        progress(step, loss)

    failure = diverged = None
    try:
        train = _train_plainly if is_plain else _train_by_ranks
        found = train(_plan_here(plan, model, data, asked), model, data, asked, take)
    except NonFiniteError as error:
        diverged = printable(str(error))
    except AutoparError as error:
        failure = printable(str(error))
    else:
        if len(found.loss) < asked.steps:
            raise TrainingError("the run was asked to end; the same call goes on behind the last that is kept")
        if all(map(math.isfinite, found.loss)):
            return ContestResult(loss=tuple(found.loss), step_s=found.step_s, peak_bytes=found.peak_bytes)
        # Scaled losses of half precision may overflow, and the run goes on.
        losses, diverged = dict(enumerate(found.loss)), "the loss is not finite"
    known = takewhile(math.isfinite, (losses[step] for step in sorted(losses)))
    return ContestResult(loss=tuple(known), failure=failure, diverged=diverged)


def check_host(plan: Plan, asked: ContestOptions) -> None:
    """Refuse a plan whose ranks this host has no place for, as they are asked to train.

    Raises:
        UsageError: names what is missing.
    """
    check_scope(plan)
    if asked.on is None:
        if asked.double and plan.device_type != "cpu":
            raise UsageError("`double`: GPUs are not compared in float64; name the cluster as what is emulated: `on`")
        check_devices(plan, share=False)
        return
    heads = [chunks[0] for chunks in plan.groups]
    held = sum(plan.stages[stage].replicas * plan.predicted.peak_bytes[stage] for stage in heads)
    needed, there = held + RANK_BYTES * len(plan.devices), available_bytes()
    if needed > there:
        raise UsageError(
            f"emulating {len(plan.devices)} ranks takes about {needed / 2**30:.3g} GiB, and this host has "
            f"{there / 2**30:.3g} GiB of memory left; emulate a smaller cluster, or on a larger host"
        )


def _plan_here(plan: Plan, model: str, data: Path | None, asked: ContestOptions) -> Plan:
    """Return a plan as it is trained."""
    if asked.double:
        return in_float64(plan, load_for(TrainSettings(), model, data, plan))
    if asked.on is None:
        return plan
    # No rank is called slow for what another device would take.
    untimed = plan.predicted.model_copy(update={"forward_s": (), "backward_s": ()})
    return plan.model_copy(update={"device_type": "cpu", "nodes": (), "predicted": untimed})


def _train_by_ranks(plan: Plan, model: str, data: Path | None, asked: ContestOptions, take: StepProgress) -> _Measured:
    with Scratch("contest") as scratch:
        log = scratch.path / PULLS if plan.eager else None
        options = RunOptions(steps=asked.steps, timeout_s=asked.timeout_s, data=data, double=asked.double, pulls=log)
        report = run(plan, model, options, take).report
    return _Measured(report.loss, report.step_s.median, max(report.peak_bytes))


def _train_plainly(plan: Plan, model: str, data: Path | None, asked: ContestOptions, take: StepProgress) -> _Measured:
    if plan.device_type != "cpu" or plan.precision not in ("fp32", "fp64"):
        raise UsageError(
            f"the plain loop computes on CPUs in the model's own types, and is planned on {plan.device_type} in "
            f"{plan.precision}; profile with `device='cpu', precision='fp32'`, or pass `double=True`"
        )
    task = {"plan": plan.dumps(), "model": model, "data": data and str(data), "double": asked.double}
    watch = Watch(asked.timeout_s, on_message=lambda _, told: take(int(str(told["step"])), float(str(told["loss"]))))
    with RankPool(1, threads=plan.threads, imports=[__name__]) as pool:
        (found,) = pool.run(f"{__name__}:train_alone", {**task, "steps": asked.steps}, watch=watch)
    return _Measured(**cast(dict[str, Any], found))


def train_alone(context: RankContext, task: dict[str, Any]) -> dict[str, object]:
    """Train by the plain loop as the only rank; return losses, seconds of a mini-batch but for the first, and bytes.

    Raises:
        NonFiniteError: a loss is no number.
        ModelError: the user's code raised.
    """
    plan = Plan.parse(task["plan"], Path("plan.json"))
    torch.set_num_threads(plan.threads)
    keep_pages()
    peak, ends_s = PeakMemory(context.device), list[float]()
    data = None if task["data"] is None else Path(task["data"])
    user = load_for(TrainSettings(double=task["double"]), task["model"], data, plan)
    stage_of = first_stages(plan, build_and_capture(user, plan.seed)[1]) if user.optimizer_options else {}

    def end(step: int, loss: float) -> None:
        ends_s.append(time.perf_counter())
        context.report({"step": step, "loss": loss})
        if not math.isfinite(loss):
            raise NonFiniteError(f"the loss of step {step} is {loss}", 0, forward=True)

    began_s = time.perf_counter()
    try:
        trained = train_plainly(user, plan, task["steps"], stage_of=stage_of, on_step=end)
    except AutoparError:
        raise
    except Exception as error:
        raise ModelError(f"{user.path}: plain training raised {cause_of(error)}") from error
    lengths = [end_s - before for before, end_s in pairwise([began_s, *ends_s])]
    return {"loss": trained.losses, "step_s": median(lengths[1:] or lengths), "peak_bytes": peak.peak_bytes()}
