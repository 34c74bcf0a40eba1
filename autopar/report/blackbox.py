"""Table of the last actions of every rank of a run that has failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.report.table import Table, duration, say

if TYPE_CHECKING:
    from rich.console import Console

    from autopar.formats.blackbox import BlackBox

SHOWN = 12
"""How many actions of a rank are listed; the file, and `--json`, have more."""


def render(box: BlackBox, console: Console) -> None:
    """Print what was said of the failure, what every rank was doing, and what it had begun before, newest first."""
    say(console, f"{box.date}: {box.message}")
    doing = Table("When the failure was noticed", (">rank", "doing", ">for"))
    for rank in box.ranks:
        doing.add_row(str(rank.rank), rank.doing, duration(rank.actions[-1].before_s) if rank.actions else "")
    console.print(doing)
    last = Table(
        "Last actions of every rank: STEP ACTION, newest first", tuple(f"rank {each.rank}" for each in box.ranks)
    )
    newest = [list(reversed(rank.actions))[:SHOWN] for rank in box.ranks]
    for index in range(max(map(len, newest), default=0)):
        row = (each[index] if index < len(each) else None for each in newest)
        last.add_row(*("" if action is None else f"{action.step} {action.action}" for action in row))
    console.print(last)
