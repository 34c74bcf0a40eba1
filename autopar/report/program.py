"""Program as a table: every rank's actions in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.report.table import Table

if TYPE_CHECKING:
    from rich.console import Console

    from autopar.formats.program import Program


_SHOWN_ACTIONS = 200


def render(program: Program, console: Console) -> None:
    """Print every rank's actions, the first of them where there are many."""
    table = Table(f"Program of {len(program.ranks)} ranks", (">rank", ">actions", "in order"))
    for rank, actions in enumerate(program.ranks):
        shown = " ".join(str(actions[index]) for index in range(min(len(actions), _SHOWN_ACTIONS)))
        left = len(actions) - _SHOWN_ACTIONS
        table.add_row(str(rank), str(len(actions)), shown + (f" and {left} more" if left > 0 else ""))
    console.print(table)
