"""The page: blocks of a document, filled into ``page.html``; equal content, equal bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from autopar.errors import escape
from autopar.report.folding import Alike, alike, ranges
from autopar.report.html.charts import Chart
from autopar.report.table import Part, Table

if TYPE_CHECKING:
    from jinja2 import Environment, Template

MOST_BYTES = 6_000_000
"""Of a page, the drawing library included."""
MOST_ROWS = 2_000
_MOST_OPEN = 16
"""Lines to open that are shown at once; more are folded themselves."""
_LONGEST = 2_000
"""Letters of a cell or a paragraph."""
_UNITS = {
    **dict(zip(("ns", "us", "ms", "s"), (1e-9, 1e-6, 1e-3, 1.0), strict=True)),
    **dict(zip(("KiB", "MiB", "GiB", "TiB"), (2.0**10, 2.0**20, 2.0**30, 2.0**40), strict=True)),
    **dict(zip(("kB/s", "MB/s", "GB/s"), (1e3, 1e6, 1e9), strict=True)),
}
_QUANTITY = re.compile(r"(?P<number>[+-]?[\d,]*\.?\d+(?:e[+-]?\d+)?)(?: (?P<unit>[A-Za-z/]+))?")


class Fold(NamedTuple):
    """A line that opens to show more."""

    title: str
    texts: tuple[str, ...]


class Folds(NamedTuple):
    """Lines that open, below a heading."""

    title: str
    folds: Sequence[Fold]


class Commands(NamedTuple):
    """Lines to type."""

    about: str
    """Where, and what they do."""
    lines: Sequence[str]


Block = Part | Chart | Folds | Commands
"""Of a page, from top to bottom."""


class _Cell(NamedTuple):
    text: str
    is_number: bool
    key: float | None = None
    """What it is sorted by, where that is no text."""


def page(title: str, blocks: Iterable[Block]) -> str:
    """Return a page, with as many blocks as there is room for."""
    blocks = list(blocks)
    has_charts = any(isinstance(block, Chart) for block in blocks)
    library = _library() if has_charts else ""
    files = _files()
    style, script = (files.get_template(f"page.{kind}").render() for kind in ("css", "js"))
    fixed = {"style": _as_it_is(style), "script": _as_it_is(script), "library": _as_it_is(library)}
    room = MOST_BYTES - sum(len(each.encode()) for each in fixed.values()) - 2 * _LONGEST
    shown = [_as_it_is(text) for text in _fitting(map(_text, range(len(blocks)), blocks), room)]
    return files.get_template("page.html").render(title=_cut(title), blocks=shown, has_charts=has_charts, **fixed)


def _fitting(texts: Iterable[str], room: int) -> Iterator[str]:
    for text in texts:
        room -= len(text.encode()) + 1
        if room < 0:
            yield "<p>... there is more: <code>autopar show</code> prints all of it</p>"
            return
        yield text


def _text(number: int, block: Block) -> str:
    """Return a block of the page as HTML."""
    parts: tuple[object, ...] = (block,)
    match block:
        case str():
            macro, parts = "paragraph", (_cut(block),)
        case Table():
            macro, parts = "table", (_table(block),)
        case Chart():
            macro, parts = "chart", (block, f"chart-{number}")
        case Folds():
            macro, parts = "folds", (block, _MOST_OPEN)
        case Commands():
            macro = "commands"
    return str(getattr(_macros().module, macro)(*parts))


def _table(table: Table) -> dict[str, object]:
    """Return what of a table is shown: its columns with any text, and its rows, up to very many."""
    every = _folded_rows(table)
    rows = every[:MOST_ROWS]
    ends = [table.footer] if table.footer else []
    columns = [at for at in range(len(table.columns)) if not rows or any(row[at] for row in chain(rows, ends))]
    more = len(every) - len(rows)
    return {
        "title": table.title,
        "heads": [_Cell(table.columns[at], table.numbers[at]) for at in columns] if any(table.columns) else [],
        "rows": [[_cell(row[at], table.numbers[at]) for at in columns] for row in rows],
        "footer": [_cell(row[at], table.numbers[at]) for row in ends for at in columns],
        "below": [*([f"... {more:,} more rows"] if more else []), *([table.caption] if table.caption else [])],
    }


def _folded_rows(table: Table) -> list[tuple[str, ...]]:
    """Return a table's rows; of ranks, those that say the same as one."""
    rows = [row.cells for row in table.rows]
    if not table.columns or table.columns[0] != "rank" or not all(row[0].isdecimal() for row in rows):
        return rows
    cells = {int(row[0]): row[1:] for row in rows}
    return [(_ranks(group), *cells[group.members[0]]) for group in alike(cells)]


def _ranks(group: Alike) -> str:
    return f"{ranges(group.members)} ({group.times})" if group.times else str(group.members[0])


def _cell(text: str, is_number: bool) -> _Cell:
    return _Cell(_cut(text), is_number, sort_key(text) if is_number else None)


def sort_key(text: str) -> float | None:
    """Return the number that a cell begins with, in the basic unit; None where it begins with none.

    >>> [sort_key(text) for text in ("12.5 ms", "-3 us", "1,024", "2 GiB", "16-31", "+3.1 %", "", "none")]
    [0.0125, -3e-06, 1024.0, 2147483648.0, 16.0, 3.1, None, None]
    """
    found = _QUANTITY.match(text)
    if found is None:
        return None
    return float(found["number"].replace(",", "")) * _UNITS.get(found["unit"] or "", 1.0)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _as_it_is(text: str) -> str:
    """Return text that goes into the page as it stands: the package's own, and what the templates have made."""
    from markupsafe import Markup

    return Markup(text)


def _printable(value: object) -> object:
    """Return what a template shows of a value: of a text, what a reader sees as it is."""
    return escape(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


@cache
def _files() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("autopar.report.html", "")
    return Environment(
        loader=loader,
        autoescape=True,
        finalize=_printable,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@cache
def _macros() -> Template:
    return _files().get_template("block.html")


@cache
def _library() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script."""
    from vl_convert import javascript_bundle

    # Its stub knows no default.
    bundle: str = javascript_bundle()  # type: ignore[call-arg]
    return bundle.replace("</script", "<\\/script")
