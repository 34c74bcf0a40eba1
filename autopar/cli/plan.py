"""Commands that plan: ``autopar plan``, and ``autopar compare``, the plan beside those of other systems' planners."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from autopar import api
from autopar.api.inputs import check_connected, cluster_file, read_profile, resolve_machines
from autopar.api.views import known_throughput
from autopar.cli.arguments import (
    PLANNED_FILE,
    PROFILED_FILE,
    ClusterName,
    ClusterNames,
    Only,
    Overwrite,
    ProfileFile,
    as_flags,
    echo,
    json_option,
    output_option,
    plan_with_flags,
)
from autopar.cli.output import check_drawn, check_output, phases, put, say, screen, slow_phases, write_png
from autopar.errors import InfeasibleError, TrainingError, UsageError
from autopar.formats.document import read_text
from autopar.formats.references import rebase_paths, reference
from autopar.options.contest import RESULTS, RUNNING, ContestOptions
from autopar.options.option import options_of
from autopar.options.plan import PlanOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from autopar.formats.cluster import Cluster
    from autopar.formats.contest import ContestRow
    from autopar.formats.plan import FileReference, Plan
    from autopar.formats.prediction import Throughput
    from autopar.formats.profile import Profile
    from autopar.formats.report import ComparisonRow


_OUTPUT = PLANNED_FILE
_COMPARED = (
    "gpus",
    "batch",
    "memory_bytes",
    "micro_batches",
    "stages",
    "schedule",
    "chunks",
    "division",
    "bytes_per_s",
    "times_of",
    "tokens",
    "samples",
    "tokens_per_sample",
)
_OF_STAGES = {
    "stages": "Show these stages, too: layers:replicas, such as 0-5:2,6-11:1.",
    "schedule": "Of `stages`.",
    "chunks": "Of `stages`, how many every device runs in turn.",
}


class _Target(NamedTuple):
    """A cluster to plan for, and where its plan goes."""

    name: str | None
    """As it is named; none: the one beside the profile."""
    links: Path | None
    """The file that describes it, if one does."""
    output: Path
    default: Path
    """That is replaced without being asked."""


def plan(
    profile: ProfileFile = PROFILED_FILE,
    cluster: ClusterNames = None,
    *,
    options: PlanOptions,
    output: Annotated[
        Path, output_option("Where to write the plan; of several clusters, their names go before its ending.")
    ] = _OUTPUT,
    overwrite: Overwrite = False,
    as_json: Annotated[bool, json_option("the plan")] = False,
) -> None:
    """Find the fastest plan that fits, say how close to the best possible it is and what binds it, and write it."""
    from autopar.formats.profile import Profile

    targets = _targets(cluster or [None], profile, output)
    for at, each in enumerate(targets):
        inputs = (profile, *(() if each.links is None else (each.links,)))
        others = tuple(other.output for other in targets[:at])
        check_output(each.output, each.default, overwrite=overwrite, inputs=inputs, others=others)
    text = read_text(profile, Profile.KIND)
    measured = check_connected(Profile.parse(text, profile), profile)

    def plan_for(target: _Target) -> tuple[Plan, Throughput | None]:
        return _plan_for(target, measured, options, {"profile": reference(profile, text, target.output)}, profile)

    if len(targets) > 1:
        _plan_side_by_side(targets, plan_for, as_json)
    else:
        found, throughput = plan_for(targets[0])
        _write_plan(found, throughput, output, as_json)


def _targets(cluster_names: Sequence[str | None], profile: Path, output: Path) -> list[_Target]:
    """Return where the plan for every cluster goes.

    Raises:
        UsageError: two would be written to one file.
    """
    if len(cluster_names) == 1:
        return [_Target(cluster_names[0], cluster_file(cluster_names[0], profile), output, _OUTPUT)]
    found: dict[Path, _Target] = {}
    for name in (each or "" for each in cluster_names):
        links = cluster_file(name, profile)
        words = re.sub(r"[^\w.]+", "-", name if links is None else links.stem).strip("-")
        paths = [path.with_name(f"{path.stem}-{words}{path.suffix}") for path in (output, _OUTPUT)]
        if paths[0] in found:
            both = f"{name} and {found[paths[0]].name}" if name != found[paths[0]].name else f"{name}, named twice,"
            raise UsageError(f"--cluster: the plans for {both} would both be {paths[0]}; rename one, or leave it out")
        found[paths[0]] = _Target(name, links, *paths)
    return list(found.values())


def _plan_for(
    target: _Target, measured: Profile, options: PlanOptions, update: dict[str, object], path: Path
) -> tuple[Plan, Throughput | None]:
    """Return the plan for a cluster as its file has it, and what its step is in other units."""
    machines, record = _cluster(target.name, target.links, target.output, measured, options)
    with slow_phases("planning") as progress:
        found = api.plan(measured, machines, options, progress=progress)
    model = rebase_paths(measured.model, path, target.output)
    echo(target.name, machines, screen())
    made = plan_with_flags(found.model_copy(update={"model": model, **update, **record}))
    return made, known_throughput(made, lambda: (measured, machines))


def _plan_side_by_side(
    targets: Sequence[_Target], plan_for: Callable[[_Target], tuple[Plan, Throughput | None]], as_json: bool
) -> None:
    """Write a plan for each of several clusters, and show them beside each other.

    Raises:
        InfeasibleError: nothing fits any of them.
    """
    from autopar.report.plan import ClusterRow, render_clusters
    from autopar.report.table import print_parts

    rows, failures = list[ClusterRow](), list[InfeasibleError]()
    for each in targets:
        try:
            made, throughput = plan_for(each)
        except InfeasibleError as error:
            failures.append(error)
            rows.append(ClusterRow(str(each.name), infeasible=as_flags(str(error))))
        else:
            made.save(each.output)
            rows.append(ClusterRow(str(each.name), str(each.output), made, throughput))
    if len(failures) == len(rows):
        raise failures[0]
    console = screen()
    print_parts(render_clusters(rows), console)
    written = ", ".join(str(row.output) for row in rows if row.output is not None)
    say(console, f"Written: {written}; `autopar show` shows each of them")
    put([row.as_dict() for row in rows], as_json)


def _cluster(
    cluster_name: str | None, path: Path | None, output: Path, profile: Profile, options: PlanOptions
) -> tuple[Cluster, dict[str, FileReference | str]]:
    """Return the cluster and how the plan records it; an estimated one if none was named and none lies there."""
    from autopar.hardware.clusters import parse_cluster

    if path is not None and (cluster_name is not None or path.exists()):
        # Read once: what is recorded is what was planned for.
        text = read_text(path, "cluster")
        return parse_cluster(text, path), {"cluster": reference(path, text, output)}
    _, found = resolve_machines(profile, cluster_name, options)
    return found, {"cluster_name": found.name} if path is None else {}


def _write_plan(plan: Plan, throughput: Throughput | None, output: Path, as_json: bool) -> None:
    from autopar.formats.profile import is_model
    from autopar.planner.throughput import with_throughput
    from autopar.report.plan import render
    from autopar.report.table import print_parts

    plan.save(output)
    console = screen()
    print_parts(render(plan, throughput), console)
    runs = is_model(plan.model.source) and plan.refusal is None and not plan.divisible
    then = f"`autopar run {output}` carries it out" if runs else "it can be looked at, but not run"
    say(console, f"Written: {output}; {then}")
    put(with_throughput(plan, throughput), as_json)


def compare(
    profile: ProfileFile = PROFILED_FILE,
    cluster: ClusterName = None,
    *,
    options: Annotated[PlanOptions, Only(_COMPARED, _OF_STAGES)],
    run: Annotated[
        bool,
        typer.Option(
            "--run", help="Train the model by all schedules, policies and ways to shard.", rich_help_panel=RUNNING
        ),
    ] = False,
    contest: ContestOptions,
    png: Annotated[Path | None, output_option("Picture of the losses, of what is run.", "--png")] = None,
    overwrite: Overwrite = False,
    as_json: Annotated[bool, json_option("the rows")] = False,
) -> None:
    """Compare autopar's plan with those of GPipe, torchgpipe, PipeDream, DAPPLE and HetPipe, and plain parallelism.

    torch's DataParallel and parameter servers are priced beside them; autopar does not run these. With `--run`, it
    trains the model by every schedule, weight policy and way to shard, and by the plain loop, and compares what they
    learn and take.
    """
    from autopar.report.plan import render_comparison
    from autopar.report.table import print_parts

    if options.stages is None and options.schedule != "auto":
        raise UsageError("`schedule` is that of `stages`; pass these, too")
    if run:
        _compare_runs(profile, cluster, options, contest, png, overwrite=overwrite, as_json=as_json)
        return
    own = {"png": png, "overwrite": overwrite}
    for name in (*contest.non_defaults(options_of(ContestOptions)), *(name for name, each in own.items() if each)):
        raise UsageError(f"`{name}` is of plans that are run; pass `run=True`, too")
    measured = read_profile(profile)
    planned_for, _ = _cluster(cluster, cluster_file(cluster, profile), _OUTPUT, measured, options)
    with slow_phases("planning") as progress:
        found = api.compare(measured, planned_for, options, progress=progress)
    console = screen()
    echo(cluster, planned_for, console)
    own_step_s = found.plan.predicted.step_s
    rows = [row._replace(infeasible=row.infeasible and as_flags(row.infeasible)) for row in found.rows]
    print_parts(render_comparison(rows, own_step_s), console)
    for note in dict.fromkeys((*planned_for.notes, *found.plan.notes)):
        say(console, f"note: {as_flags(note)}")
    put([_fields(row, own_step_s) for row in rows], as_json)


def _compare_runs(
    profile: Path,
    cluster: str | None,
    options: PlanOptions,
    contest: ContestOptions,
    png: Path | None,
    *,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Train all plans, or those that have not been, and show what they measured."""
    from autopar.ranks.fork_server import forked_servers
    from autopar.report.table import print_parts

    for name in options.non_defaults(("tokens", "samples", "tokens_per_sample")):
        raise UsageError(f"`{name}` is of plans that are priced; leave it out to compare by running")
    if png is not None:
        check_drawn(png, "png", overwrite=overwrite, inputs=(profile,))
    measured = read_profile(profile)
    # Ranks are forks of this process, and libraries read this where they are imported.
    threads = str(measured.device.threads)
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), threads))
    machines: Cluster | str | None = cluster
    if contest.on is None:
        machines, _ = _cluster(cluster, cluster_file(cluster, profile), _OUTPUT, measured, options)
    asked = replace(contest, results=contest.results or RESULTS)
    with forked_servers(), phases(forks=True) as progress:
        found = api.compare_runs(profile, machines, options, asked, progress=progress)
    view = found._replace(rows=tuple(map(_row_with_flags, found.rows))).view()
    print_parts(view.parts(), screen())
    if png is not None:
        write_png(view.plot(), png, overwrite=overwrite)
    put(json.loads(view.json), as_json)
    if all(row.trouble for row in found.rows):
        raise TrainingError(f"nobody came to a good end: {found.rows[-1].contestant.name}: {found.rows[-1].trouble}")


def _row_with_flags(row: ContestRow) -> ContestRow:
    """Return a row with flags in what it says of trouble."""
    refusal = row.contestant.refusal
    results = (each.model_copy(update={"failure": each.failure and as_flags(each.failure)}) for each in row.results)
    return row._replace(
        contestant=row.contestant._replace(refusal=refusal and as_flags(refusal)), results=tuple(results)
    )


def _fields(row: ComparisonRow, own_step_s: float) -> dict[str, object]:
    # By what share it takes longer than autopar's.
    over = None if row.step_s is None or own_step_s == 0 else row.step_s / own_step_s - 1
    return {**row.as_dict(), "over": over}
