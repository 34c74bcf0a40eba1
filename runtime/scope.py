"""Scope: what a plan may ask for that this runtime does not do."""

from __future__ import annotations

from autopar.errors import UsageError
from autopar.formats.plan import Plan
from autopar.formats.program import INPUT_BACKWARD, Program

__all__ = ["check_compiling", "check_offload", "check_scope", "check_sharing"]


def check_scope(plan: Plan) -> None:
    """Refuse a plan that can be simulated, but not carried out.

    Raises:
        UsageError: names what it is, and how to plan without it.
    """
    if plan.refusal is not None:
        raise UsageError(f"{plan.refusal}: `autopar run` trains synchronous pipelines of whole devices")
    if plan.divisible:
        raise UsageError("the plan divides micro-batches freely, as no run can; plan without `divisible`")


def check_offload(plan: Plan) -> None:
    """Refuse to keep in the host's memory what is there already, or what no replicas divide.

    Raises:
        UsageError: names which, and what to do.
    """
    if plan.device_type == "cpu":
        raise UsageError("`cpu_offload`: the plan is for CPUs, whose memory is the host's already; leave it out")
    if all(stage.shard == "none" for stage in plan.stages):
        raise UsageError("`cpu_offload`: no stage of the plan is sharded; plan with `shard='parameters'`")


def check_sharing(plan: Plan) -> None:
    """Refuse to let ranks share GPUs where the plan has none.

    Raises:
        UsageError: says what to do.
    """
    if plan.device_type == "cpu":
        raise UsageError("`share_gpus`: the plan is for CPUs, which have none; leave it out")


def check_compiling(plan: Plan, program: Program) -> None:
    """Refuse to compile layers whose backward or parameters are divided.

    A compiled layer's backward is one operator: each half of it would be the whole.

    Raises:
        UsageError: names what it is, and what to do.
    """
    if any(stage.shard != "none" for stage in plan.stages):
        raise UsageError("`compile`: sharded layers are not compiled; leave it out, or plan with `shard='none'`")
    if any(action.kind == INPUT_BACKWARD for actions in program.ranks for action in actions):
        raise UsageError(
            f"`compile`: the program (schedule {plan.schedule}) runs backwards in halves, which compiled layers do not "
            "have; leave it out, or plan with `schedule='1f1b'`"
        )
