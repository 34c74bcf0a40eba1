"""A verification as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape

from autopar.formats.verified import Difference, Verified
from autopar.report.table import new_table

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["render"]


def render(found: Verified, console: Console) -> None:
    """Print the largest difference of every kind beside what is allowed, and what differs by choice."""
    steps = f"{found.steps} step{'s' if found.steps > 1 else ''} of {found.ranks} ranks"
    title = f"{steps} and of the plain loop, in {found.computed}"
    columns = ("", ">compared", ">largest\ndifference", ">allowed", "where")
    table = new_table(title, columns, folded="where")
    for each in found.differences:
        row = (each.what, str(each.compared), _number(each), f"{each.allowed:.2g}", each.where)
        table.add_row(*map(escape, row), style=None if each.equal else "bold red")
    console.print(table)
    units = "; ".join(f"{each.what} by {each.unit}" for each in found.differences)
    console.print(f"differences are divided: {units}", highlight=False, markup=False)
    console.print(f"allowed: {found.rounding}", highlight=False, markup=False)
    for choice in found.by_choice:
        console.print(f"by choice: {choice}", highlight=False, markup=False)
    for note in found.notes:
        console.print(f"note: {note}", highlight=False, markup=False)


def _number(each: Difference) -> str:
    return "no number" if each.largest is None else f"{each.largest:.2g}"
