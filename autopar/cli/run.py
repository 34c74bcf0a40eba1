"""``autopar run``: train on processes of this host, the way a plan says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.training import Reports, model_of, print_outcome, read_plan

__all__ = ["command"]


def command(
    plan: Annotated[Path, typer.Argument(help="The plan to carry out.")] = Path("plan.json"),
    steps: Annotated[int, typer.Option("--steps", help="Optimizer steps to train.", min=1)] = 20,
    seed: Annotated[int | None, typer.Option("--seed", help="Run seed, in place of the plan's.", min=0)] = None,
    weights: Annotated[
        Path | None, typer.Option("--weights", help="Folder of initial weights (safetensors); default: model()'s own.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option("--save", help="Folder for the trained weights (safetensors with an index).")
    ] = None,
    report: Annotated[Path, typer.Option("--report", help="Where to write the report.")] = Path("report.json"),
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write the measured timeline of a typical step (Chrome trace).")
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", help="Seconds that a rank may stand still before the run is given up.")
    ] = 300.0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing output files.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON on standard output.")] = False,
) -> None:
    """Train on processes of this host, one per rank, and compare the step time with the prediction.

    The same program runs under torchrun with `autopar worker`.
    """
    reports = Reports(report, trace, save, overwrite)
    reports.check(plan)
    chosen = read_plan(plan, seed)
    model = model_of(chosen, plan)

    from autopar.cli.progress import steps_progress
    from autopar.ranks.pool import terminate_on_signal
    from autopar.runtime.launch import RunOptions, run

    terminate_on_signal()
    options = RunOptions(steps, weights, save, timeout_s)
    with steps_progress(steps) as progress:
        outcome = run(chosen, model, options, progress)
    reports.write(outcome.report, outcome.timeline)
    print_outcome(outcome.report, reports)
    if as_json:
        typer.echo(json.dumps(outcome.report.model_dump(mode="json")))
