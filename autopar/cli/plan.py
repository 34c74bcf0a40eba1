"""Commands that plan: ``autopar plan``, and ``autopar compare``, the plan beside those of other systems' planners."""

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
    from autopar.formats.cluster import Cluster
    from autopar.formats.plan import FileReference, Plan
    from autopar.formats.profile import Profile
    from autopar.formats.report import ComparisonRow
    from autopar.planner.options import PlanOptions


_OUTPUT = Path("plan.json")


def plan(
    profile: ProfileFile = Path("profile.json"),
    gpus: Gpus = None,
    cluster: ClusterName = None,
    times_of: TimesOf = None,
    memory: Memory = None,
    batch: Batch = None,
    schedule: Annotated[
        str,
        typer.Option(
            help="auto, gpipe, 1f1b; interleaved, zb-v or dualpipe-v (several stages on every device); zb-h1 or zb-h2. "
            "The zb ones and dualpipe-v have backwards in two halves. torch's names do, too, such as Interleaved1F1B.",
            autocompletion=arguments.schedules,
        ),
    ] = "auto",
    chunks: Annotated[
        int | None, typer.Option(help="Stages on every device, of --schedule interleaved; default: the best of 2 to 4.")
    ] = None,
    micro_batches: Annotated[int | None, typer.Option(help="Micro-batches per step; default: the best.")] = None,
    bandwidth: Bandwidth = None,
    objective: Annotated[
        str,
        typer.Option(
            help="step: least seconds per step; cost: cheapest training (the cluster prices its devices); throughput: "
            "quickest asynchronous pipeline.",
            autocompletion=arguments.objectives,
        ),
    ] = "step",
    policy: Annotated[
        str,
        typer.Option(
            help="Weights that forwards and backwards see: sync: those of the step, with a flush at its end; without "
            "flushes: stash (PipeDream), vertical-sync, 2bw (PipeDream-2BW), predict (XPipe), pipemare.",
            autocompletion=arguments.policies,
        ),
    ] = "sync",
    anneal_steps: Annotated[
        int | None, typer.Option(help="Mini-batches for which --policy pipemare reduces rates, less and less.")
    ] = None,
    synchronous_steps: Annotated[
        int, typer.Option(help="Mini-batches that --policy pipemare trains with a flush each, before all others.")
    ] = 0,
    ahead: Annotated[
        str | None,
        typer.Option(
            help="How many updates ahead --policy predict predicts: counted (for forwards, the updates until the "
            "mini-batch's own; the default), or xpipe (XPipe's constants, for backwards, too)."
        ),
    ] = None,
    deadline: Annotated[
        float | None,
        typer.Option(help="Seconds that a step may take, of --objective cost: the cheapest plan of those that do."),
    ] = None,
    gap: Annotated[
        float,
        typer.Option(
            help=(
                "Stop this close to the best possible plan. 0 goes on until one is proved best: of many devices, this "
                "can take hours, and tens of GB."
            )
        ),
    ] = 0.02,
    effort: Annotated[
        int,
        typer.Option(
            help="Search so many times as much: a count of work and no clock, so that a question has one answer."
        ),
    ] = 1,
    exact: Annotated[
        bool,
        typer.Option("--exact", help="Take the fastest plan, instead of the simplest of those within 1 % of it."),
    ] = False,
    equal_widths: Annotated[
        bool,
        typer.Option(
            "--equal-widths", help="As many replicas of every stage, run alike: what most other trainers can express."
        ),
    ] = False,
    divisible: Annotated[
        bool, typer.Option("--divisible", help="Price as papers do: micro-batches divide freely. Cannot be run.")
    ] = False,
    recompute: Annotated[
        str,
        typer.Option(
            help="Layers that run forward again to save memory: auto (as far as needed), none or full.",
            autocompletion=arguments.recomputations,
        ),
    ] = "auto",
    shard: Annotated[
        str,
        typer.Option(
            help="What replicas divide: none, optimizer (its state), gradients, parameters, or auto (the fastest).",
            autocompletion=arguments.shards,
        ),
    ] = "auto",
    replicate_state: Annotated[
        str | None,
        typer.Option(
            help="Let layers have replicas whose forwards write buffers (spectral norm, moving averages), and make the "
            "buffers alike after every step: those of the first replica (first), or their mean (average)."
        ),
    ] = None,
    stages: Annotated[
        str | None,
        typer.Option(
            help="Plan these stages: layers:replicas, such as 0-5:2,6-11:1, or by layer names; 0-5:2x4: four devices "
            "run each replica together; with several stages on every device, replicas repeat."
        ),
    ] = None,
    sequence_parallel: Annotated[
        bool,
        typer.Option(
            "--sequence-parallel",
            help="Have devices that run a replica of --stages keep slices of the sequence where nothing else is split.",
        ),
    ] = False,
    across_nodes: Annotated[
        bool,
        typer.Option("--across-nodes", help="Let the devices that run a replica of --stages be on several nodes."),
    ] = False,
    min_stages: Annotated[int, typer.Option(help="At least this many pipeline stages.")] = 1,
    max_stages: Annotated[int | None, typer.Option(help="At most this many pipeline stages.")] = None,
    forbid_cut: Annotated[
        list[str] | None, typer.Option(help="No stage ends with this layer, by name or index; may be repeated.")
    ] = None,
    pin: Annotated[
        list[str] | None,
        typer.Option(
            help="'a,b same stage', 'a,b different stages', or 'a,b on TYPE' (of devices); layers by name or index; "
            "may be repeated."
        ),
    ] = None,
    use_all: Annotated[bool, typer.Option("--use-all", help="Leave no device idle.")] = False,
    solver: Annotated[
        str,
        typer.Option(
            help="dp, or milp: the same question as a mixed-integer program.",
            autocompletion=arguments.solvers,
        ),
    ] = "dp",
    solver_seconds: Annotated[
        float, typer.Option(help="What milp's solver may take, by its own clock; then dp takes over.")
    ] = 60.0,
    seed: Annotated[int, typer.Option(help="Run seed that the plan records.")] = 0,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the plan.")] = _OUTPUT,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Put the plan on stdout as JSON.")] = False,
) -> None:
    """Find the fastest plan that fits, say how close to the best possible it is and what binds it, and write it."""
    from autopar import api
    from autopar.cli.arguments import echo, plan_with_flags
    from autopar.cli.output import check_output, slow_phases
    from autopar.formats.document import parse_bandwidth, parse_bytes, read_text
    from autopar.formats.profile import Profile
    from autopar.formats.references import rebase_paths, reference
    from autopar.api.inputs import check_connected, cluster_file
    from autopar.planner import PlanOptions

    options = PlanOptions(
        gpus=gpus,
        batch=batch,
        memory_bytes=None if memory is None else parse_bytes(memory, "--memory"),
        bytes_per_s=None if bandwidth is None else parse_bandwidth(bandwidth, "--bandwidth"),
        times_of=times_of,
        schedule=schedule,
        chunks=chunks,
        micro_batches=micro_batches,
        objective=objective,  # type: ignore[arg-type]  # checked there
        policy=policy,  # type: ignore[arg-type]
        anneal_steps=anneal_steps,
        synchronous_steps=synchronous_steps,
        ahead=ahead,  # type: ignore[arg-type]
        deadline_s=deadline,
        gap=gap,
        effort=effort,
        exact=exact,
        equal_widths=equal_widths,
        replicate_state=replicate_state,  # type: ignore[arg-type]
        stages=stages,
        sequence_parallel=sequence_parallel,
        across_nodes=across_nodes,
        min_stages=min_stages,
        max_stages=max_stages,
        forbid_cut=tuple(forbid_cut or ()),
        pin=tuple(pin or ()),
        use_all=use_all,
        divisible=divisible,
        recompute=recompute,  # type: ignore[arg-type]  # checked there
        shard=shard,  # type: ignore[arg-type]
        solver=solver,  # type: ignore[arg-type]
        solver_seconds=solver_seconds,
        seed=seed,
    )
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
    from autopar.formats.references import reference
    from autopar.api.inputs import machines

    found, text = machines(cluster_name, path, profile, options.gpus)
    if path is None:
        return found, {"cluster_name": found.name}
    return found, {} if text is None else {"cluster": reference(path, text, output)}


def _write_plan(plan: Plan, output: Path, as_json: bool) -> None:
    from autopar.formats.profile import is_model
    from autopar.report.plan import render

    plan.save(output)
    console = screen()
    render(plan, console)
    runs = is_model(plan.model.source) and plan.refusal is None and not plan.divisible
    then = f"`autopar run {output}` carries it out" if runs else "it can be looked at, but not run"
    say(console, f"Written: {output}; {then}")
    if as_json:
        sys.stdout.write(plan.dumps())


def compare(
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
    from autopar.cli.output import slow_phases
    from autopar.formats.document import parse_bandwidth, parse_bytes
    from autopar.api.inputs import cluster_file, machines, read_profile
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
