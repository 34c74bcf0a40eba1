"""Compared plans as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.markup import escape

from autopar.formats.compared import Compared
from autopar.report.quantity import duration, percentage, size
from autopar.report.table import new_table

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["render"]


def render(rows: Sequence[Compared], own_step_s: float, console: Console) -> None:
    """Print the plans of a comparison against the one that takes ``own_step_s``."""
    columns = (
        "planner",
        ">step",
        ">over\nautopar",
        "schedule",
        ">micro-\nbatches",
        ">peak\nmemory",
        "stages, or why not",
    )
    table = new_table("Planners", columns, folded="stages, or why not")
    for row in rows:
        count = "" if row.micro_batches is None else str(row.micro_batches)
        peak = "" if row.peak_bytes is None else size(row.peak_bytes)
        ending = (row.schedule or "", count, peak, row.infeasible or row.stages or "")
        table.add_row(*map(escape, (row.name, *_times(row, own_step_s), *ending)))
    console.print(table)


def _times(row: Compared, own_step_s: float) -> tuple[str, str]:
    if row.step_s is None:
        return "", ""
    over = percentage(row.step_s / own_step_s - 1, signed=True) if own_step_s > 0 and row.name != "autopar" else ""
    return duration(row.step_s), over
