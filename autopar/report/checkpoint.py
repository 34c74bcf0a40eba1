"""Table of the checkpoints of a folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.report.table import Table, say, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from autopar.formats.checkpoint import CheckpointView


def render(checkpoints: Sequence[CheckpointView], console: Console) -> None:
    """Print the checkpoints, and what is wrong with those that are not sound."""
    heads = (">step", ">size", "saved by", "torch", ">tensors", "state")
    table = Table(f"Checkpoints in {checkpoints[0].folder.parent}", heads)
    for each in checkpoints:
        if each.manifest is None:
            table.add_row(str(each.step), "", "", "", "", "damaged")
            continue
        plan = each.manifest.plan
        counts = ", ".join(
            f"{count} {what}{'s' if count > 1 else ''}"
            for count, what in ((plan.ranks, "rank"), (plan.stages, "stage"))
        )
        state = "damaged" if each.problem is not None else "verified" if each.verified else "not verified"
        row = (f"{counts}, {plan.schedule}", plan.torch, str(len(each.manifest.tensors)), state)
        table.add_row(str(each.step), size(each.bytes), *row)
    console.print(table)
    for each in checkpoints:
        if each.problem is not None:
            say(console, f"step {each.step}: {each.problem}")
