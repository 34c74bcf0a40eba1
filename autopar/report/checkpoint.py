"""Table of the checkpoints of a folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.report.table import Table, say, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from autopar.formats.checkpoint import Checkpoint, CheckpointView, SavedPlan


def render(checkpoints: Sequence[CheckpointView], console: Console) -> None:
    """Print the checkpoints, and what is wrong with those that are not sound."""
    heads = (">step", ">size", "saved by", "torch", ">tensors", "state")
    table = Table(f"Checkpoints in {checkpoints[0].folder.parent}", heads)
    for each in checkpoints:
        if each.manifest is None:
            table.add_row(str(each.step), "", "", "", "", "damaged")
            continue
        plan = each.manifest.plan
        state = "damaged" if each.problem is not None else "verified" if each.verified else "not verified"
        row = (_carried_out(plan), plan.torch, str(len(each.manifest.tensors)), state)
        table.add_row(str(each.step), size(each.bytes), *row)
    console.print(table)
    for each in checkpoints:
        if each.problem is not None:
            say(console, f"step {each.step}: {each.problem}")


def render_manifest(manifest: Checkpoint, title: str, console: Console) -> None:
    """Print what a manifest says of a checkpoint's run and its files."""
    run, plan = manifest.run, manifest.plan
    say(console, f"{title}: saved by {_carried_out(plan)}, torch {plan.torch}")
    say(console, f"batch {run.batch}, seed {run.seed}, {run.samples or 'unknown'} samples, {plan.precision}")
    table = Table("Tensors", ("", ">tensors", ">pieces"))
    for kind in dict.fromkeys(each.kind for each in manifest.tensors):
        mine = [each for each in manifest.tensors if each.kind == kind]
        table.add_row(kind, str(len(mine)), str(sum(len(each.pieces) for each in mine)))
    console.print(table)
    files = Table("Files", ("", ">size"))
    for file in manifest.files:
        files.add_row(file.name, size(file.bytes))
    console.print(files)


def _carried_out(plan: SavedPlan) -> str:
    counts = (plan.ranks, "rank"), (plan.stages, "stage")
    return ", ".join((*(f"{count} {what}{'s' if count > 1 else ''}" for count, what in counts), plan.schedule))
