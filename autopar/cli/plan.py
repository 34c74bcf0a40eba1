"""Commands that plan: ``autopar plan``, and ``autopar compare``, the plan beside those of other systems' planners."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from autopar import api
from autopar.api.inputs import check_connected, cluster_file, read_profile, resolve_machines
from autopar.cli.arguments import (
    PROFILED_FILE,
    ClusterName,
    Only,
    Overwrite,
    ProfileFile,
    as_flags,
    echo,
    json_option,
    output_option,
    plan_with_flags,
)
from autopar.cli.output import check_output, put, say, screen, slow_phases
from autopar.errors import UsageError
from autopar.formats.document import read_text
from autopar.formats.references import rebase_paths, reference
from autopar.options.plan import PlanOptions

if TYPE_CHECKING:
    from autopar.formats.cluster import Cluster
    from autopar.formats.plan import FileReference, Plan
    from autopar.formats.profile import Profile
    from autopar.formats.report import ComparisonRow


_OUTPUT = Path("plan.json")
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
)
_OF_STAGES = {
    "stages": "Show these stages, too: layers:replicas, such as 0-5:2,6-11:1.",
    "schedule": "Of `stages`.",
    "chunks": "Of `stages`, how many every device runs in turn.",
}


def plan(
    profile: ProfileFile = PROFILED_FILE,
    cluster: ClusterName = None,
    *,
    options: PlanOptions,
    output: Annotated[Path, output_option("Where to write the plan.")] = _OUTPUT,
    overwrite: Overwrite = False,
    as_json: Annotated[bool, json_option("the plan")] = False,
) -> None:
    """Find the fastest plan that fits, say how close to the best possible it is and what binds it, and write it."""
    from autopar.formats.profile import Profile

    links = cluster_file(cluster, profile)
    check_output(output, _OUTPUT, overwrite=overwrite, inputs=(profile, *(() if links is None else (links,))))
    text = read_text(profile, Profile.KIND)
    measured = check_connected(Profile.parse(text, profile), profile)
    machines, record = _cluster(cluster, links, output, measured, options)
    with slow_phases("planning") as progress:
        found = api.plan(measured, machines, options, progress=progress)
    update = {
        "model": rebase_paths(measured.model, profile, output),
        "profile": reference(profile, text, output),
        **record,
    }
    echo(cluster, machines, screen())
    _write_plan(plan_with_flags(found.model_copy(update=update)), output, as_json)


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


def _write_plan(plan: Plan, output: Path, as_json: bool) -> None:
    from autopar.formats.profile import is_model
    from autopar.report.plan import render
    from autopar.report.table import print_parts

    plan.save(output)
    console = screen()
    print_parts(render(plan), console)
    runs = is_model(plan.model.source) and plan.refusal is None and not plan.divisible
    then = f"`autopar run {output}` carries it out" if runs else "it can be looked at, but not run"
    say(console, f"Written: {output}; {then}")
    put(plan, as_json)


def compare(
    profile: ProfileFile = PROFILED_FILE,
    cluster: ClusterName = None,
    *,
    options: Annotated[PlanOptions, Only(_COMPARED, _OF_STAGES)],
    as_json: Annotated[bool, json_option("the rows")] = False,
) -> None:
    """Compare autopar's plan with those of GPipe, torchgpipe, PipeDream, DAPPLE and HetPipe, and plain parallelism."""
    from autopar.report.plan import render_comparison
    from autopar.report.table import print_parts

    if options.stages is None and options.schedule != "auto":
        raise UsageError("`schedule` is that of `stages`; pass these, too")
    measured = read_profile(profile)
    planned_for, _ = _cluster(cluster, cluster_file(cluster, profile), _OUTPUT, measured, options)
    with slow_phases("planning") as progress:
        found = api.compare(measured, planned_for, options, progress=progress)
    console = screen()
    echo(cluster, planned_for, console)
    own_step_s = found.plan.predicted.step_s
    rows = [row._replace(infeasible=row.infeasible and as_flags(row.infeasible)) for row in found.rows]
    print_parts(render_comparison(rows, own_step_s), console)
    for note in (*planned_for.notes, *found.plan.notes):
        say(console, f"note: {as_flags(note)}")
    put([_fields(row, own_step_s) for row in rows], as_json)


def _fields(row: ComparisonRow, own_step_s: float) -> dict[str, object]:
    # By what share it takes longer than autopar's.
    over = None if row.step_s is None or own_step_s == 0 else row.step_s / own_step_s - 1
    return {**row.as_dict(), "over": over}
