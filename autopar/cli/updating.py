"""What ``--update-profile`` writes: the profile and the cluster of a plan, with the times that a run measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from autopar.cli.outputs import check_output
from autopar.errors import UsageError
from autopar.formats.plan import Plan
from autopar.formats.references import rebased
from autopar.inputs import read_inputs

if TYPE_CHECKING:
    from autopar.runtime.result.outcome import Outcome


CLUSTER = "cluster.json"
"""Beside a profile, where `autopar plan` looks for it."""


def check_update(
    plan: Path, output: Path | None, overwrite: bool, read: tuple[Path, ...], others: tuple[Path, ...]
) -> None:
    """Refuse, before anything starts, a profile that could not be updated or written.

    Args:
        plan: the plan's file.
        output: where the profile goes; by default over the one that the plan records.
        overwrite: whether files may be replaced, that one and its cluster's too.
        read: what the command reads.
        others: what else it writes.

    Raises:
        UsageError: the plan records no profile, or a file exists.
        FileError: what the plan records is gone, or no longer what it was.
    """
    planned, target = Plan.load(plan), _target(plan, output)
    if planned.times_of is not None:
        raise UsageError(
            f"--update-profile: in {plan} times of {planned.times_of} stand for other devices (--times-of), whose own "
            "a run measures; leave it out, and profile there"
        )
    read_inputs(plan)
    # The profile and the cluster may be written over by what they become; the plan and the model may not.
    replaced = [plan.parent / each.path for each in (planned.profile, planned.cluster) if each is not None]
    inputs = tuple(path for path in read if path not in replaced)
    check_output(target, None, overwrite=overwrite, inputs=inputs, others=others)
    check_output(target.parent / CLUSTER, None, overwrite=overwrite, inputs=inputs, others=(*others, target))


def write_update(plan: Path, output: Path | None, outcome: Outcome) -> tuple[Path, ...]:
    """Write the profile, and the cluster where messages were measured; return the files."""
    from autopar.recalibration import recalibrated

    target = _target(plan, output)
    planned, profile, cluster = read_inputs(plan)
    made, links = recalibrated(planned, profile, cluster, outcome)
    made.model_copy(update={"model": rebased(profile.model, _target(plan, None), target)}).save(target)
    if links == cluster:
        return (target,)
    links.save(target.parent / CLUSTER)
    return target, target.parent / CLUSTER


def _target(plan: Path, output: Path | None) -> Path:
    if output is not None:
        return output
    profile = Plan.load(plan).profile
    if profile is None:
        raise UsageError(f"--update-profile: {plan} records no profile; `autopar plan` writes plans that do")
    return plan.parent / profile.path
