"""Rehearsals: a plan's program performed without its devices, for the bytes that it holds or the seconds of its steps.

In Python, as ``autopar.rehearse``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from autopar.api.inputs import model_inputs
from autopar.api.objects import PlanFile, Timeline, plan_inputs
from autopar.errors import UsageError
from autopar.formats import cluster as clusters
from autopar.formats.profile import Profile
from autopar.formats.program import parse_faults
from autopar.progress import Progress, no_progress

if TYPE_CHECKING:
    from autopar.runtime.rehearsal.steps import Rehearsal


@overload
def rehearse(plan: PlanFile, *, progress: Progress = no_progress) -> tuple[int, ...]: ...


@overload
def rehearse(
    plan: PlanFile,
    *,
    steps: int,
    profile: Profile | str | Path | None = None,
    cluster: clusters.Cluster | str | None = None,
    times_of: str | None = None,
    program: str | Path | None = None,
    real_time: bool = False,
    threads: bool | None = None,
    timeout_s: float = 300.0,
    inject_fault: str | Sequence[str] = (),
    every: int | None = None,
    progress: Progress = no_progress,
) -> Rehearsal: ...


def rehearse(
    plan: PlanFile,
    *,
    steps: int | None = None,
    profile: Profile | str | Path | None = None,
    cluster: clusters.Cluster | str | None = None,
    times_of: str | None = None,
    program: str | Path | None = None,
    real_time: bool = False,
    threads: bool | None = None,
    timeout_s: float = 300.0,
    inject_fault: str | Sequence[str] = (),
    every: int | None = None,
    progress: Progress = no_progress,
) -> tuple[int, ...] | Rehearsal:
    """Perform a plan's program without its devices: return the peak bytes of every stage, or how long steps take.

    Bytes are those of the model's tensors, which hold no data meanwhile. Operators are the CPU's: of a plan for GPUs,
    attention, dropout and autocast keep what a CPU keeps. Steps are performed by all ranks in virtual time, with layers
    that take the profile's seconds and compute nothing; the model's code does not run.

    Args:
        plan: a plan, or its file.
        steps: how many are performed; None: bytes are counted. The other arguments go with ``steps``.
        profile: what the plan was made of, in place of what it knows or its file records.
        cluster: likewise; a cluster, its file, or its name.
        times_of: the kind of the profile's devices whose times stand for others.
        program: a file of the plan's program, edited or not; None: what the plan expands to.
        real_time: whether ranks sleep as long as actions take.
        threads: whether ranks are threads, and not processes; None: those of more than 16 ranks are.
        timeout_s: longest that a rank may stand still.
        inject_fault: what is to go wrong, as for :func:`train`: the rehearsal's ``losses`` say what is trained again.
        every: steps from one checkpoint to the next; None: there are none.
        progress: told what is done.

    Raises:
        FileError: a file is missing or malformed, or the model is not the one that was planned for.
        ProgramError: the program does not carry out its plan.
        UsageError: no program follows from the plan, or options contradict each other.
        TrainingError: the program cannot be performed, or a rank was lost.

    >>> peaks = autopar.rehearse("plan.json")  # bytes, by stage
    >>> len(peaks)
    2
    >>> len(autopar.rehearse("plan.json", steps=3).steps_s)  # in virtual time
    3
    """
    inputs = profile, cluster, times_of, program
    if steps is not None:
        options = {"real_time": real_time, "threads": threads, "timeout_s": timeout_s, "every": every}
        return _perform(plan, steps, inputs, progress, faults=parse_faults(inject_fault), **options)
    named = dict(zip(("profile", "cluster", "times_of", "program"), inputs, strict=True))
    others = {"real_time": real_time or None, "threads": threads, "inject_fault": inject_fault or None, "every": every}
    _check_absent({**named, **others})
    model = model_inputs(plan)

    from autopar.runtime.rehearsal.memory import rehearse_model

    return rehearse_model(*model, progress)


def _check_absent(values: Mapping[str, object]) -> None:
    for name, value in values.items():
        if value is not None:
            raise UsageError(f"`{name}` is of steps in virtual time; pass `steps`, too")


def _perform(
    plan: PlanFile,
    steps: int,
    inputs: tuple[Any, Any, str | None, Any],
    progress: Progress,
    **options: Any,  # noqa: ANN401
) -> Rehearsal:
    """Perform steps in virtual time; ``inputs`` are profile, cluster, times_of and program."""
    if steps < 1:
        raise UsageError(f"`steps` must be at least 1, found {steps}")
    profile, cluster, times_of, program = inputs
    resolved = plan_inputs(plan, profile, cluster, times_of, progress)

    from autopar.api.inputs import program_of
    from autopar.planner import action_prices
    from autopar.runtime.rehearsal.steps import rehearse_steps

    edited = program_of(program, resolved[0])
    prices = action_prices(*resolved, edited)
    found = rehearse_steps(*resolved[:2], prices, steps, program=edited, progress=progress, **options)
    return replace(found, timeline=Timeline.of(found.timeline))
