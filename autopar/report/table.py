"""The one look of all tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

__all__ = ["fill", "new_table"]

MOST_ROWS = 40
LAST_ROWS = 10
"""How many of the last ones are among them."""


def new_table(title: str, columns: tuple[str, ...], *, folded: str = "", footer: bool = False) -> Table:
    """Return an empty table whose columns keep their width; only the column ``folded`` gives way to a narrow terminal.

    A column whose name begins with ``>`` holds numbers, and is set to the right. Names may span lines; without any
    name the table has no head.
    """
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_header=any(columns),
        show_footer=footer,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for name in columns:
        justify = "right" if name.startswith(">") else "left"
        table.add_column(name.removeprefix(">"), justify=justify, overflow="fold", no_wrap=name != folded)  # type: ignore[arg-type]
    return table


def fill(table: Table, rows: Sequence[Sequence[str]]) -> None:
    """Add rows to a table; of more than :data:`MOST_ROWS` the first and the last ones, and how many are between."""
    if len(rows) <= MOST_ROWS:
        for row in rows:
            table.add_row(*row)
        return
    first = MOST_ROWS - LAST_ROWS
    for row in rows[:first]:
        table.add_row(*row)
    table.add_row("...", f"{len(rows) - MOST_ROWS} more")
    for row in rows[-LAST_ROWS:]:
        table.add_row(*row)
