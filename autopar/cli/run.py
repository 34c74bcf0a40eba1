"""``autopar run``: train on processes of this host, the way a plan says."""

from __future__ import annotations

from pathlib import Path

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
    """Train on processes of this host, one per rank, and compare the step time with the prediction.

    The same program runs under torchrun with `autopar worker`.
    """
    chosen = read_plan(plan, seed)
    reports = Reports(report, trace, save, overwrite)
    reports.check(recorded(chosen, plan))
    model = model_of(chosen, plan)

    from autopar.cli.progress import steps_progress
    from autopar.runtime.launch import RunOptions, run

    options = RunOptions(steps, weights, save, timeout_s, cpu_offload, data_of(chosen, plan))
    with steps_progress(steps) as progress:
        outcome = run(chosen, model, options, progress)
    reports.write(outcome.report, outcome.timeline)
    print_outcome(outcome.report, reports, as_json)
