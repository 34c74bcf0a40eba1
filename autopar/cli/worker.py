"""``autopar worker``: one rank of a run that torchrun, or a launcher with its environment, has started."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.training import Reports, model_of, print_outcome, read_plan
from autopar.errors import UsageError

__all__ = ["command"]


def command(
    plan: Annotated[Path, typer.Argument(help="The plan to carry out.")] = Path("plan.json"),
    steps: Annotated[int, typer.Option("--steps", help="Optimizer steps to train.", min=1)] = 20,
    seed: Annotated[int | None, typer.Option("--seed", help="Run seed, in place of the plan's.", min=0)] = None,
    weights: Annotated[
        Path | None, typer.Option("--weights", help="Folder of initial weights (safetensors); default: model()'s own.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option("--save", help="Folder for the trained weights; all hosts must see it.")
    ] = None,
    report: Annotated[Path, typer.Option("--report", help="Where rank 0 writes the report.")] = Path("report.json"),
    trace: Annotated[Path | None, typer.Option("--trace", help="Where rank 0 writes the measured timeline.")] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", help="Seconds to wait for another rank before the run is given up.")
    ] = 300.0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing output files.")] = False,
) -> None:
    """Run one rank of a plan under torchrun: torchrun --nproc-per-node 4 -m autopar worker plan.json."""
    try:
        reports = Reports(report, trace, save, overwrite)
        reports.check(plan)
        chosen = read_plan(plan, seed)
        model = model_of(chosen, plan)

        from autopar.cli.progress import steps_progress
        from autopar.runtime.launch import RunOptions, join

        with steps_progress(steps, quiet=os.environ.get("RANK") != "0") as progress:
            outcome = join(chosen, model, RunOptions(steps, weights, save, timeout_s), progress)
    except UsageError:
        # Every rank finds the same mistake: one of them says it.
        if os.environ.get("RANK", "0") == "0":
            raise
        raise typer.Exit(UsageError.exit_code) from None
    if outcome is not None:
        reports.write(outcome.report, outcome.timeline)
        print_outcome(outcome.report, reports)
