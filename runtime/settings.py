"""TrainSettings: how ranks train, apart from what the plan says, and what a plan may ask for that is not done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from autopar.errors import UsageError
from autopar.formats.plan import Plan
from autopar.formats.program import INPUT_BACKWARD, Program
from autopar.policies import POLICIES

DEFAULT_STEPS = 20

Last = Literal["drop", "pad"]
"""What becomes of an epoch's last mini-batch where samples do not fill it: it is left out, or filled up with the
epoch's first samples."""

Clip = Literal["model", "stage"]
"""Whose norm is bounded: that of all gradients, or of each stage's by itself."""


def known_steps(steps: int | None, epochs: int | None) -> int | None:
    """Return the optimizer steps to train; None where the dataset decides, by ``epochs``.

    Raises:
        UsageError: both are asked for.
    """
    if epochs is None:
        return DEFAULT_STEPS if steps is None else steps
    if steps is not None:
        raise UsageError(f"`epochs={epochs}` and `steps={steps}` contradict each other; give one")
    return None


@dataclass(frozen=True)
class TrainSettings:
    """What the user asks of training, the same on all ranks.

    Raises:
        UsageError: a value is out of range.
    """

    clip_norm: float | None = None
    """Largest norm of gradients; larger ones are scaled down to it."""
    clip: Clip | None = None
    """Whose norm that is; None: all gradients'."""
    cpu_offload: bool = False
    """Whether what replicas divide waits in the host's memory."""

    last: Last = "drop"
    deferred_batch_norm: bool = False
    """Whether running statistics of batch normalisation are updated once per mini-batch."""
    sync_batch_norm: bool = False
    """Whether batch normalisation takes the statistics of whole micro-batches that replicas divide."""
    compile: bool = False
    """Whether layers are compiled (``torch.compile``)."""
    split_seeds: bool = False
    """Whether the ranks of a team draw the dropout of fused attention each for itself, of the heads that it has."""

    time_layers: bool = False
    """Whether the layers inside stages are timed in the first steps."""
    double: bool = False
    """Whether parameters, buffers and inputs are cast to float64, as ``autopar verify`` has it."""

    def __post_init__(self) -> None:
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UsageError(f"`clip_norm` must be positive, found {self.clip_norm}")
        if self.clip is not None and self.clip not in get_args(Clip):
            raise UsageError(f"`clip` must be one of {', '.join(get_args(Clip))}; found {self.clip!r}")
        if self.clip is not None and self.clip_norm is None:
            raise UsageError(f"`clip={self.clip!r}` says whose norm is bounded; say by what, too: `clip_norm`")
        if self.deferred_batch_norm and self.sync_batch_norm:
            raise UsageError("`deferred_batch_norm` and `sync_batch_norm` exclude each other; choose one")
        if self.split_seeds and self.compile:
            raise UsageError("`split_seeds` and `compile` exclude each other; choose one")

        if self.last not in get_args(Last):
            raise UsageError(f"`last` must be one of {', '.join(get_args(Last))}; found {self.last!r}")


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


def check_sharing(plan: Plan) -> None:
    """Refuse to let ranks share GPUs where the plan has none.

    Raises:
        UsageError: says what to do.
    """
    if plan.device_type == "cpu":
        raise UsageError("`share_gpus`: the plan is for CPUs, which have none; leave it out")


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
