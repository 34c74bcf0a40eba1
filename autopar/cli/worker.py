"""``autopar worker``: one rank of a run that torchrun, or a launcher with its environment, has started."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from autopar.cli.references import recorded
from autopar.cli.training import (
    DEFAULT_REPORT,
    AsJson,
    CpuOffload,
    Overwrite,
    PlanFile,
    ReportFile,
    Reports,
    Save,
    Seed,
    Steps,
    Timeout,
    TraceFile,
    Weights,
    data_of,
    model_of,
    print_outcome,
    read_plan,
)
from autopar.errors import UsageError

__all__ = ["command"]


def command(
    plan: PlanFile = Path("plan.json"),
    steps: Steps = 20,
    seed: Seed = None,
    weights: Weights = None,
    save: Save = None,
    report: ReportFile = DEFAULT_REPORT,
    trace: TraceFile = None,
    timeout_s: Timeout = 300.0,
    cpu_offload: CpuOffload = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Run one rank of a plan under torchrun: torchrun --nproc-per-node 4 -m autopar worker plan.json."""
    try:
        chosen = read_plan(plan, seed)
        reports = Reports(report, trace, save, overwrite)
        reports.check(recorded(chosen, plan))
        model = model_of(chosen, plan)

        from autopar.cli.progress import steps_progress
        from autopar.runtime.launch import RunOptions, join

        options = RunOptions(steps, weights, save, timeout_s, cpu_offload, data_of(chosen, plan))
        with steps_progress(steps, quiet=os.environ.get("RANK") != "0") as progress:
            outcome = join(chosen, model, options, progress)
    except UsageError:
        # Every rank finds the same mistake: one of them says it.
        if os.environ.get("RANK", "0") == "0":
            raise
        raise typer.Exit(UsageError.exit_code) from None
    if outcome is not None:
        reports.write(outcome.report, outcome.timeline)
        print_outcome(outcome.report, reports, as_json)
