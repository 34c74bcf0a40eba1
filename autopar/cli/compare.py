"""``autopar compare``: autopar's plan beside those that other systems' planners would choose."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli import arguments
from autopar.cli.arguments import Bandwidth, Batch, ClusterName, Gpus, Memory, ProfileFile, TimesOf
from autopar.cli.output import say, screen
from autopar.errors import UsageError

if TYPE_CHECKING:
    from autopar.formats.report import ComparisonRow


def command(
    profile: ProfileFile = Path("profile.json"),
    gpus: Gpus = None,
    cluster: ClusterName = None,
    times_of: TimesOf = None,
    memory: Memory = None,
    batch: Batch = None,
    micro_batches: Annotated[
        int | None, typer.Option(help="Micro-batches per step; default: for every plan the best.")
    ] = None,
    bandwidth: Bandwidth = None,
    stages: Annotated[
        str | None, typer.Option(help="Show these stages, too: layers:replicas, such as 0-5:2,6-11:1.")
    ] = None,
    schedule: Annotated[str, typer.Option(help="Of --stages.", autocompletion=arguments.schedules)] = "auto",
    chunks: Annotated[int | None, typer.Option(help="Of --stages, how many every device runs in turn.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Put the rows on stdout as JSON.")] = False,
) -> None:
    """Compare autopar's plan with those of GPipe, torchgpipe, PipeDream, DAPPLE and HetPipe, and plain parallelism."""
    from autopar import api
    from autopar.cli.arguments import as_flags, echo
    from autopar.cli.progress import slow_phases
    from autopar.formats.document import parse_bandwidth, parse_bytes
    from autopar.inputs import cluster_file, machines, read_profile
    from autopar.planner import PlanOptions
    from autopar.report.plan import render_comparison

    options = PlanOptions(
        gpus=gpus,
        batch=batch,
        memory_bytes=None if memory is None else parse_bytes(memory, "--memory"),
        bytes_per_s=None if bandwidth is None else parse_bandwidth(bandwidth, "--bandwidth"),
        times_of=times_of,
        micro_batches=micro_batches,
        stages=stages,
        schedule=schedule,
        chunks=chunks,
    )
    if stages is None and options.schedule != "auto":
        raise UsageError("`schedule` is that of `stages`; pass these, too")
    measured = read_profile(profile)
    planned_for, _ = machines(cluster, cluster_file(cluster, profile), measured, gpus)
    with slow_phases("planning") as progress:
        found = api.compare(measured, planned_for, options, progress=progress)
    console = screen()
    echo(cluster, planned_for, console)
    own_step_s = found.plan.predicted.step_s
    rows = [row._replace(infeasible=row.infeasible and as_flags(row.infeasible)) for row in found.rows]
    render_comparison(rows, own_step_s, console)
    for note in (*planned_for.notes, *found.plan.notes):
        say(console, f"note: {as_flags(note)}")
    if as_json:
        fields = [_fields(row, own_step_s) for row in rows]
        sys.stdout.write(json.dumps(fields, indent=1) + "\n")


def _fields(row: ComparisonRow, own_step_s: float) -> dict[str, object]:
    workers = None if row.virtual_workers is None else asdict(row.virtual_workers)
    # By what share it takes longer than autopar's.
    over = None if row.step_s is None or own_step_s == 0 else row.step_s / own_step_s - 1
    return {**row._asdict(), "virtual_workers": workers, "over": over}
