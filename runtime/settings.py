"""Settings: what a plan may ask for that is not done, or not with what the user asks of training."""

from __future__ import annotations

from autopar.errors import UsageError
from autopar.formats.plan import Plan
from autopar.formats.program import INPUT_BACKWARD, Program
from autopar.options.train import TrainSettings
from autopar.policies import POLICIES


def check_training(plan: Plan, settings: TrainSettings, *, share_gpus: bool) -> None:
    """Refuse a plan that cannot be carried out, or what is asked of training it.

    Raises:
        UsageError: names what it is, and what to do.
    """
    check_scope(plan, needs_flush=False)
    check_unflushed(plan, settings)
    check_clipping(plan, settings)
    if settings.cpu_offload:
        check_offload(plan)
    if share_gpus and plan.device_type == "cpu":
        raise UsageError("`share_gpus`: the plan is for CPUs, which have none; leave it out")


def check_scope(plan: Plan, *, needs_flush: bool = True) -> None:
    """Refuse a plan that can be simulated, but not carried out.

    Args:
        plan: what is to be carried out.
        needs_flush: whether that takes a pipeline that is flushed after every step.

    Raises:
        UsageError: names what it is, and how to plan without it.
    """
    if plan.refusal is not None:
        raise UsageError(f"{plan.refusal}: `autopar run` trains no such plan")
    if plan.divisible:
        raise UsageError("the plan divides micro-batches freely, as no run can; plan without `divisible`")
    if needs_flush and plan.weight_policy != "sync":
        raise UsageError(
            f"the plan is never flushed (weight policy {plan.weight_policy}), and is carried out by `autopar run`, "
            "`autopar worker` and `autopar verify` alone; plan with `policy='sync'`, and no other objective than "
            "`objective='step'`"
        )


_INSTEAD = {"clip_norm": "clip each stage by its own norm (`clip='stage'`), or plan with `policy='2bw'`"}


def check_unflushed(plan: Plan, settings: TrainSettings) -> None:
    """Refuse what no pipeline without flushes is trained with, if the plan is one.

    Raises:
        UsageError: names it, and what to do.
    """
    if plan.weight_policy == "sync":
        return
    sums = POLICIES[plan.weight_policy].sums_gradients
    asked = {
        "clip_norm": settings.clip_norm is not None and settings.clip != "stage" and not sums,
        "deferred_batch_norm": settings.deferred_batch_norm,
        "sync_batch_norm": settings.sync_batch_norm,
        "compile": settings.compile,
    }
    of_policy = f"weight policy {plan.weight_policy}"
    for name in (name for name, wanted in asked.items() if wanted):
        remedy = _INSTEAD.get(name, "plan with `policy='sync'`")
        raise UsageError(f"`{name}` takes a flush, which {of_policy} has none of; leave it out, or {remedy}")
    if plan.precision == "fp16" and not sums:
        raise UsageError(
            f"fp16 scales losses for all stages alike, which {of_policy} does not; plan with `policy='2bw'`, or "
            "profile with bf16"
        )
    if plan.precision == "bf16" and POLICIES[plan.weight_policy].prepares:
        raise UsageError(
            f"bf16 keeps weights as forwards have cast them for backwards, which see others under {of_policy}; plan "
            "with `policy='stash'`, or profile with `precision='fp32'`"
        )
    if plan.replicate_state is not None:
        raise UsageError(
            f"layers write buffers that replicas make alike after a step, which {of_policy} has none of; plan with "
            "`max_stages`, or stages, whose replicas write none"
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
