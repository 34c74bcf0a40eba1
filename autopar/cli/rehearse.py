"""``autopar rehearse``: check a plan's memory by performing its program on tensors that hold no data."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.output import say, screen
from autopar.errors import InfeasibleError

_CPU_COUNTED = (
    "note: counted with the operators of a CPU, whose attention, dropout and autocast keep other bytes than a GPU's "
    "(docs/estimating.md)"
)


def command(
    plan: Annotated[Path, typer.Argument(help="What `autopar plan` wrote.")] = Path("plan.json"),
    as_json: Annotated[bool, typer.Option("--json", help="Put the stages' peaks on stdout as JSON.")] = False,
) -> None:
    """Check the memory of every stage of a plan, without its devices: perform its program on tensors without data.

    Operators are the CPU's: of a plan for GPUs, what attention, dropout and autocast keep is counted as a CPU keeps it.
    Exits with 3 if a stage holds more than its devices have.
    """
    from autopar import api
    from autopar.cli.progress import phases
    from autopar.formats.plan import Plan
    from autopar.report.plan import render_memory

    chosen = Plan.load(plan)
    with phases() as progress:
        peaks = api.rehearse(plan, progress=progress)
    console = screen()
    render_memory(chosen, peaks, console)
    if chosen.device_type == "cuda":
        say(console, _CPU_COUNTED)
    limits = chosen.predicted.limit_bytes
    if as_json:
        sys.stdout.write(json.dumps({"peak_bytes": peaks, "limit_bytes": limits or None}, indent=1) + "\n")
    over = [index for index, (peak, limit) in enumerate(zip(peaks, limits, strict=False)) if peak > limit]
    if over:
        stage = over[0]
        raise InfeasibleError(
            f"stage {stage} holds {peaks[stage]:,} bytes, its devices have {limits[stage]:,}; "
            f"plan again with a --memory that is smaller by the difference"
        )
