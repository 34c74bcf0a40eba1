"""A verification as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.formats.verified import Difference, Verified
from autopar.report.table import Table, say

if TYPE_CHECKING:
    from rich.console import Console


def render(found: Verified, console: Console) -> None:
    """Print the largest difference of every kind beside what is allowed, and what differs by choice."""
    steps = f"{found.steps} step{'s' if found.steps > 1 else ''} of {found.ranks} ranks"
    title = f"{steps} and of the plain loop, in {found.computed}"
    columns = ("", ">compared", ">largest difference", ">allowed", "where")
    table = Table(title, columns)
    for each in found.differences:
        row = (each.what, str(each.compared), _number(each), f"{each.allowed:.2g}", each.where)
        table.add_row(*row, style="" if each.equal else "bold red")
    console.print(table)
    units = "; ".join(f"{each.what} by {each.unit}" for each in found.differences)
    say(console, f"differences are divided: {units}")
    say(console, f"allowed: {found.rounding}")
    for choice in found.by_choice:
        say(console, f"by choice: {choice}")
    for note in found.notes:
        say(console, f"note: {note}")


def _number(each: Difference) -> str:
    return "no number" if each.largest is None else f"{each.largest:.2g}"
