"""``autopar simulate``: the predicted timeline of a plan."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.planning import TimesOf
from autopar.cli.screen import say, screen
from autopar.errors import FileError, UsageError

if TYPE_CHECKING:
    from autopar.formats.cluster import Cluster
    from autopar.formats.plan import Plan
    from autopar.formats.profile import Profile
    from autopar.formats.timeline import Timeline

__all__ = ["command", "predict", "read_inputs"]

MOST_ACTIONS = 2**22
"""About 2 GiB of timeline, and a minute."""
MANY_ACTIONS = 2**17
"""Some seconds."""


def command(
    plan: Annotated[Path, typer.Argument(help="What `autopar plan` wrote.")] = Path("plan.json"),
    profile: Annotated[Path | None, typer.Option(help="Profile to use in place of the one the plan records.")] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Cluster, a file or a name, to use in place of the one the plan records.")
    ] = None,
    times_of: TimesOf = None,
    trace: Annotated[Path | None, typer.Option(help="Write the timeline here, as a Chrome trace.")] = None,
    program: Annotated[
        Path | None, typer.Option(help="Write the plan's program here, for `autopar run --program`, edited or not.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that exist.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Put the step's figures on stdout as JSON.")] = False,
) -> None:
    """Predict when every action of a step runs."""
    from autopar.cli.machines import echo
    from autopar.cli.progress import slow_phases
    from autopar.planner import simulate
    from autopar.planner.costs.kinds import kinds_of
    from autopar.report.timeline import render

    _check_outputs(plan, (profile, cluster), [path for path in (trace, program) if path is not None], overwrite)
    planned, measured, machines = read_inputs(plan, profile, cluster, times_of)
    with slow_phases("simulating"):
        timeline = simulate(planned, measured, machines)
    console = screen()
    echo(cluster, machines, console)
    render(timeline, console)
    for note in kinds_of(measured, machines.devices[: max(planned.devices) + 1], planned.times_of).notes:
        say(console, f"note: {note}")
    if program is not None:
        _write_program(plan, program)
        say(console, f"Written: {program}; run it with `autopar run {plan} --program {program}`")
    if trace is not None:
        timeline.save(trace)
        say(console, f"Written: {trace}; open it in Perfetto, or `autopar show {trace}`")
    if as_json:
        figures = {"step_s": timeline.end_s, "bubble": timeline.bubble(), "busy_s": timeline.busy_s()}
        sys.stdout.write(json.dumps(figures, indent=1) + "\n")


def _check_outputs(plan: Path, given: tuple[Path | None, str | None], outputs: list[Path], overwrite: bool) -> None:
    """Refuse outputs that would replace what is read, one another, or what nobody agreed to lose."""
    from autopar.cli.references import check_output, recorded
    from autopar.formats.plan import Plan
    from autopar.hardware.clusters import is_file

    if not outputs:
        return
    profile, cluster = given
    read = (profile, Path(cluster) if cluster is not None and is_file(cluster) else None)
    inputs = (*recorded(Plan.load(plan), plan), *(path for path in read if path is not None))
    for index, path in enumerate(outputs):
        check_output(path, None, overwrite=overwrite, inputs=inputs, others=tuple(outputs[:index]))


def _write_program(plan: Path, path: Path) -> None:
    from autopar.formats.plan import Plan
    from autopar.schedules.expand import expand

    expand(Plan.load(plan)).save(path)


def predict(plan: Path, profile: Path | None = None, cluster: str | None = None) -> Timeline:
    """Return the predicted timeline of a plan file; what is not given is what the plan records.

    Raises:
        FileError: a file is missing, malformed, or no longer what it was when the plan was made.
        UsageError: the program is too long to be listed action by action.
    """
    from autopar.cli.progress import slow_phases
    from autopar.planner import simulate

    inputs = read_inputs(plan, profile, cluster)
    with slow_phases("simulating"):
        return simulate(*inputs)


def read_inputs(
    plan: Path, profile: Path | None = None, cluster: str | None = None, times_of: str | None = None
) -> tuple[Plan, Profile, Cluster]:
    """Return a plan file's plan, and the profile and the cluster that it records, where no other is given.

    With ``times_of``, that kind of the profile's devices stands for others, in place of the one that the plan records.

    Raises:
        FileError: a file is missing, malformed, or no longer what it was when the plan was made.
        UsageError: the program is too long to be listed action by action, or ``times_of`` stands for nothing.
    """
    from autopar.formats.plan import Plan
    from autopar.planner.costs.kinds import check_times_of

    planned = Plan.load(plan)
    _check_length(planned, plan)
    measured = _profile(planned, plan, profile)
    machines = _cluster(planned, plan, cluster, measured)
    if times_of is not None:
        check_times_of(measured, machines, times_of)
        planned = planned.model_copy(update={"times_of": times_of})
    return planned, measured, machines


def _check_length(planned: Plan, plan: Path) -> None:
    """Refuse a program whose timeline fits no ordinary memory; say so where it takes a while."""
    from autopar.schedules.expand import action_count

    count = action_count(planned)
    size = f"{count:,} actions of {len(planned.devices):,} ranks"
    if count > MOST_ACTIONS:
        raise UsageError(
            f"{plan}: a timeline of {size} is not listed, only of up to {MOST_ACTIONS:,}; the plan holds what is "
            f"predicted of the step (`autopar show {plan}`), and one of fewer --micro-batches or --gpus can be listed"
        )
    if count > MANY_ACTIONS:
        say(screen(), f"Simulating {size}, one by one ...")


def _profile(planned: Plan, plan: Path, given: Path | None) -> Profile:
    from autopar.cli.references import resolve
    from autopar.formats.profile import Profile

    if given is not None:
        return Profile.load(given)
    if planned.profile is None:
        raise FileError(f"{plan}: $.profile: the plan records no profile; pass --profile")
    return Profile.load(resolve(planned.profile, plan, "profile"))


def _cluster(planned: Plan, plan: Path, given: str | None, profile: Profile) -> Cluster:
    from autopar.cli.references import resolve
    from autopar.hardware.clusters import cluster_named, is_file, read_cluster
    from autopar.planner.estimate import estimated_cluster

    if given is not None:
        return read_cluster(given) if is_file(given) else cluster_named(given)
    if planned.cluster_name is not None:
        try:
            return cluster_named(planned.cluster_name)
        except UsageError as error:
            raise FileError(f"{plan}: $.cluster_name: {error}") from error
    if planned.cluster is None:
        return estimated_cluster(profile, max(planned.devices) + 1)
    return read_cluster(resolve(planned.cluster, plan, "cluster"))
