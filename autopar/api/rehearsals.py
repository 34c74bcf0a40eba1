"""Rehearsals: a plan's program performed without its devices, for the bytes that it holds or the seconds of its steps.

In Python, as ``autopar.rehearse``.
"""

# Options are of the types that their class says.
# ruff: noqa: ANN401

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from autopar.api.inputs import model_inputs, program_of, read_inputs
from autopar.api.objects import PlanFile, Timeline
from autopar.formats import cluster as clusters
from autopar.formats.profile import Profile
from autopar.options.option import takes
from autopar.options.rehearse import RehearsalOptions
from autopar.progress import Progress, no_progress

if TYPE_CHECKING:
    from autopar.runtime.rehearsal.steps import Rehearsal


@overload
def rehearse(
    plan: PlanFile,
    *,
    steps: None = None,
    progress: Progress = no_progress,
    **named: Any,
) -> tuple[int, ...]: ...


@overload
def rehearse(plan: PlanFile, *, steps: int, progress: Progress = no_progress, **named: Any) -> Rehearsal: ...


@takes(RehearsalOptions)
def rehearse(
    plan: PlanFile,
    *,
    profile: Profile | str | Path | None = None,
    cluster: clusters.Cluster | str | Path | None = None,
    progress: Progress = no_progress,
    **named: Any,
) -> tuple[int, ...] | Rehearsal:
    """Perform a plan's program without its devices: return the peak bytes of every stage, or how long steps take.

    Bytes are those of the model's tensors, which hold no data meanwhile. Operators are the CPU's: of a plan for GPUs,
    attention, dropout and autocast keep what a CPU keeps. Steps are performed by all ranks in virtual time, with layers
    that take the profile's seconds and compute nothing; the model's code does not run.

    Args:
        plan: a plan, or its file.
        profile: what the plan was made of, in place of what it knows or its file records.
        cluster: likewise; a cluster, its file, or its name.
        progress: told what is done.
        named: fields of :class:`autopar.options.rehearse.RehearsalOptions`: ``steps``, or bytes are counted. With
            ``inject_fault`` the rehearsal's ``losses`` say what is trained again.

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
    asked = RehearsalOptions.of("rehearse", named)
    if asked.steps is not None:
        return perform(plan, asked, profile, cluster, progress)
    asked.check_counting(profile=profile, cluster=cluster)
    return count_bytes(plan, progress)


def count_bytes(plan: PlanFile, progress: Progress) -> tuple[int, ...]:
    """Return the peak bytes of every stage; raises as :func:`rehearse`."""
    model = model_inputs(plan)

    from autopar.runtime.rehearsal.memory import rehearse_model

    return rehearse_model(*model, progress)


def perform(
    plan: PlanFile,
    options: RehearsalOptions,
    profile: Profile | str | Path | None,
    cluster: clusters.Cluster | str | Path | None,
    progress: Progress,
) -> Rehearsal:
    """Perform steps in virtual time; arguments are those of :func:`rehearse`, and so is what it raises."""
    resolved = read_inputs(plan, profile, cluster, options.times_of, progress)

    from autopar.planner import action_prices
    from autopar.runtime.rehearsal.steps import rehearse_steps

    edited = program_of(options.program, resolved[0])
    prices = action_prices(*resolved, edited)
    how: dict[str, Any] = {name: getattr(options, name) for name in ("real_time", "threads", "timeout_s", "every")}
    how |= {"program": edited, "faults": options.inject_fault, "progress": progress}
    found = rehearse_steps(*resolved[:2], prices, options.steps or 1, **how)
    return replace(found, timeline=Timeline.of(found.timeline))
