"""Settings: what a plan may ask for that is not done, or not with what the user asks of training."""

from __future__ import annotations

from autopar.errors import UsageError
from autopar.formats.plan import Plan
from autopar.formats.program import INPUT_BACKWARD, Program
from autopar.options.train import RunOptions, TrainSettings


def check_training(plan: Plan, settings: TrainSettings, *, share_gpus: bool) -> None:
    """Refuse a plan that cannot be carried out, or what is asked of training it.

    Raises:
        UsageError: names what it is, and what to do.
    """
    check_scope(plan)
    check_unflushed(plan, settings)
    check_clipping(plan, settings)
    if settings.cpu_offload:
        check_offload(plan)
    if share_gpus and plan.device_type == "cpu":
        raise UsageError("`share_gpus`: the plan is for CPUs, which have none; leave it out")


def check_scope(plan: Plan) -> None:
    """Refuse a plan that can be simulated, but not carried out.

    Raises:
        UsageError: names what it is, and how to plan without it.
    """
    if plan.refusal is not None:
        raise UsageError(f"{plan.refusal}: `autopar run` trains no such plan")
    if plan.divisible:
        raise UsageError("the plan divides micro-batches freely, as no run can; plan without `divisible`")


def check_unflushed(plan: Plan, settings: TrainSettings) -> None:
    """Refuse what no pipeline without flushes is trained with, if the plan is one.

    Raises:
        UsageError: names it, and what to do.
    """
    asked = {
        "clip_norm": settings.clip_norm is not None and settings.clip != "stage",
        "deferred_batch_norm": settings.deferred_batch_norm,
        "sync_batch_norm": settings.sync_batch_norm,
        "compile": settings.compile,
        "fp16": plan.precision == "fp16",
        "bf16": plan.precision == "bf16",
        "replicate_state": plan.replicate_state is not None,
        "ema_decay": plan.ema_decay is not None,
    }
    for feature in (name for name, wanted in asked.items() if wanted):
        plan.policy.check(feature)


def check_pipelines(plan: Plan, options: RunOptions) -> None:
    """Refuse what a run of several pipelines is not asked for.

    Raises:
        UsageError: names it, and what to do.
    """
    if plan.pipelines and options.loaders not in ("auto", 0):
        raise UsageError(
            "`loaders` read mini-batches that all ranks share, and each of several pipelines has its own; leave it out"
        )
    for name in ("pulls", "replay"):
        if getattr(options, name) is not None and not plan.eager:
            raise UsageError(
                f"`{name}` is of a plan whose pulls take what has come; leave it out, or plan with `policy='wsp'` and "
                "`eager=True`"
            )


def check_clipping(plan: Plan, settings: TrainSettings) -> None:
    """Refuse to clip stages by norms of their own where they share a parameter, whose copies these would part.

    Raises:
        UsageError: names the parameter, and what to do.
    """
    if settings.clip == "stage" and plan.tied:
        shared = plan.tied[0]
        stages = " and ".join(map(str, shared.stages))
        raise UsageError(
            f"`clip='stage'`: stages {stages} share {shared.parameter}, and would scale its gradient by norms of their "
            "own; clip by the norm of all gradients (`clip='model'`), for which no flush is needed with `policy='2bw'`"
        )


def check_offload(plan: Plan) -> None:
    """Refuse to keep in the host's memory what is there already, or what no replicas divide.

    Raises:
        UsageError: names which, and what to do.
    """
    if plan.device_type == "cpu":
        raise UsageError("`cpu_offload`: the plan is for CPUs, whose memory is the host's already; leave it out")
    if all(stage.shard == "none" for stage in plan.stages):
        raise UsageError("`cpu_offload`: no stage of the plan is sharded; plan with `shard='parameters'`")


def check_compiling(plan: Plan, program: Program) -> None:
    """Refuse to compile layers whose computation, backward or parameters are divided.

    A compiled layer's backward is one operator: each half of it would be the whole.

    Raises:
        UsageError: names what it is, and what to do.
    """
    if any(stage.shard != "none" for stage in plan.stages):
        raise UsageError("`compile`: sharded layers are not compiled; leave it out, or plan with `shard='none'`")
    if any(stage.tensor_parallel > 1 for stage in plan.stages):
        raise UsageError(
            "`compile`: layers that several devices run together are not compiled; leave it out, or plan with `stages` "
            "of one device for each replica"
        )
    if any(action.kind == INPUT_BACKWARD for actions in program.ranks for action in actions):
        raise UsageError(
            f"`compile`: the program (schedule {plan.schedule}) runs backwards in halves, which compiled layers do not "
            "have; leave it out, or plan with `schedule='1f1b'`"
        )
