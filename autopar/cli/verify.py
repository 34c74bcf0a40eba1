"""``autopar verify``: whether a plan's ranks train what plain training does."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.output import screen
from autopar.errors import TrainingError


def command(
    plan: Annotated[Path, typer.Argument(help="What `autopar plan` wrote.")] = Path("plan.json"),
    steps: Annotated[int, typer.Option("--steps", help="Optimizer steps to train and compare.", min=1)] = 3,
    timeout_s: Annotated[
        float, typer.Option("--timeout", help="Seconds that a rank may stand still before the run is given up.")
    ] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Put the differences on stdout as JSON.")] = False,
) -> None:
    """Check that a plan's ranks train what one process does: run them here for some steps, and a plain loop beside.

    Both compute in float64 where the model can, on CPUs, whatever the plan is for. Losses, the first step's gradients,
    parameters and buffers are compared. Exits with 5 if they differ by more than docs/howto/verify.md allows.
    """
    from autopar import api
    from autopar.cli.progress import phases
    from autopar.report.run import render_verification

    with phases() as progress:
        found = api.verify(plan, steps=steps, timeout_s=timeout_s, progress=progress)
    render_verification(found, screen())
    if as_json:
        sys.stdout.write(json.dumps(found.as_dict(), indent=1) + "\n")
    worst = next((each for each in found.differences if not each.equal), None)
    if worst is not None:
        largest = "differ" if worst.largest is None else f"differ by {worst.largest:.2g} ({worst.allowed:.2g} allowed)"
        raise TrainingError(
            f"{plan}: the ranks did not train what plain training does: {worst.what} {largest}, most at {worst.where}; "
            "please report it with the plan and the model file"
        )
