"""The one look of all tables, and of the text around them.

Rich folds and aligns. A table shows every cell whole, whatever the width. Where its columns do not fit beside each
other, names of columns are broken at their spaces and hyphens, then the widest text is folded into at most three lines,
or stands below its row, and so do the last columns:

>>> from rich.console import Console
>>> table = Table("Plans", ("planner", ">step", "stages"))
>>> table.add_row("autopar", "12.5 ms", "0-3:1, 4-7:1, 8-11:1, 12-15:1, 16-19:1")
>>> Console(width=30, color_system=None).print(table)
Plans
<BLANKLINE>
planner     step
────────────────
autopar  12.5 ms
  stages: 0-3:1, 4-7:1,
  8-11:1, 12-15:1, 16-19:1
<BLANKLINE>

Quantities as people read them: durations, sizes, bandwidths.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from io import StringIO
from typing import TYPE_CHECKING, NamedTuple

from rich.cells import cell_len
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from autopar.errors import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType


WIDTH = 120
"""Columns of text that goes to no terminal."""
MOST_ROWS = 40
_LAST_ROWS = 10
"""How many of the last ones are among them."""
_MOST_LINES = 3
"""Of a cell that is folded beside others; text that takes more goes below its row."""
GAP, INDENT = 2, 2


class Row(NamedTuple):
    """Of a table."""

    cells: tuple[str, ...]
    style: str = ""
    ends_section: bool = False


class Table:
    """Rows of texts under named columns, all of them plain text; to be printed by a console of rich.

    A column whose name begins with ``>`` holds numbers, and is set to the right; its cells are not folded. A column
    without a text in any row is left out. Without any name the table has no head.
    """

    def __init__(self, title: str, columns: Sequence[str], caption: str = "", footer: Sequence[str] = ()) -> None:
        self.title, self.caption = printable(title), caption
        self.columns = [name.removeprefix(">") for name in columns]
        self.numbers = [name.startswith(">") for name in columns]
        """Which columns are set to the right."""
        self.rows: list[Row] = []
        self.footer = self._cells(footer) if footer else ()
        self.most_rows: int | None = None
        """That are printed, the last ones among them; of more, it is said how many are between."""

    def add_row(self, *cells: str, style: str = "", end_section: bool = False) -> None:
        """Add a row; cells that are not given are empty."""
        self.rows.append(Row(self._cells(cells), style, end_section))

    def _cells(self, cells: Sequence[str]) -> tuple[str, ...]:
        assert len(cells) <= len(self.columns)
        shown = ("\n".join(map(printable, cell.split("\n"))) for cell in cells)
        return (*shown, *("" for _ in self.columns[len(cells) :]))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yield the lines that fit a console's width."""
        for part, style in self._parts(options):
            for line in console.render_lines(part, options, pad=False):
                # Nobody wants the spaces behind a line, which rich fills up to the width of its column.
                yield Text("".join(segment.text for segment in line).rstrip(), style, no_wrap=True, overflow="ignore")

    def _parts(self, options: ConsoleOptions) -> Iterator[tuple[RenderableType, str]]:
        """Yield title, head, rows, footer and caption, with their styles."""
        widths = self._widths(options.max_width)
        yield Text(self.title), "bold"
        yield "", ""
        if any(self.columns):
            # Rich breaks lines at spaces alone.
            names = [
                name if widths.get(at, 0) >= cell_len(name) else _broken(name) for at, name in enumerate(self.columns)
            ]
            yield self._side_by_side(names, widths, is_head=True), "bold"
            yield Text(("-" if options.ascii_only else "─") * _total(widths)), ""
        for row in self.printed_rows():
            yield from ((part, row.style) for part in self._row(row.cells, widths))
            if row.ends_section and row is not self.rows[-1]:
                yield "", ""
        if self.footer:
            yield "", ""
            yield from ((part, "") for part in self._row(self.footer, widths))
        yield "", ""
        if self.caption:
            yield Text(self.caption), "italic"
            yield "", ""

    def printed_rows(self) -> list[Row]:
        """Return the rows, but of very many the first and the last ones, and between them how many more there are."""
        if self.most_rows is None or len(self.rows) <= self.most_rows:
            return self.rows
        first = self.most_rows - _LAST_ROWS
        more = Row(self._cells([f"... {len(self.rows) - self.most_rows} more"]))
        return [*self.rows[:first], more, *self.rows[-_LAST_ROWS:]]

    def _row(self, cells: Sequence[str], widths: dict[int, int]) -> Iterator[RenderableType]:
        """Yield the cells that stand beside each other, and then those that do not, by the names of their columns."""
        yield self._side_by_side(cells, widths)
        for at, (name, cell) in enumerate(zip(self.columns, cells, strict=True)):
            if at not in widths and cell:
                text = f"{name}: {cell}" if name else cell
                yield Padding(Text(text.replace("\n", ", "), overflow="fold"), (0, 0, 0, INDENT))

    def _side_by_side(self, cells: Sequence[str], widths: dict[int, int], *, is_head: bool = False) -> Grid:
        grid = Grid.grid(padding=(0, GAP, 0, 0))
        for at, width in widths.items():
            justify: JustifyMethod = "right" if self.numbers[at] else "left"
            grid.add_column(width=width, justify=justify, vertical="bottom" if is_head else "top")
        grid.add_row(*(Text(cells[at], overflow="fold") for at in widths))
        return grid

    def _widths(self, most: int) -> dict[int, int]:
        """Return how wide the columns are that stand beside each other."""
        rows = [*(row.cells for row in self.printed_rows()), *([self.footer] if self.footer else [])]
        cells = [[row[at] for row in rows] for at in range(len(self.columns))]
        natural = [_longest(line for cell in own for line in cell.split("\n")) for own in cells]
        shown = [at for at, own in enumerate(natural) if own or not self.rows]
        widths = {at: max(natural[at], cell_len(self.columns[at])) for at in shown}
        if _total(widths) > most:
            widths = {at: max(natural[at], _longest(_broken(self.columns[at]).split())) for at in shown}
        for at in sorted(shown, key=lambda each: -natural[each]):
            width = widths[at] - max(0, _total(widths) - most)
            words = _longest(word for cell in cells[at] for word in cell.split())
            if not self.numbers[at] and width >= max(words, -(-natural[at] // _MOST_LINES)):
                widths[at] = width
            elif at and width < widths[at] and not self.numbers[at]:
                del widths[at]
        while len(widths) > 1 and _total(widths) > most:
            widths.popitem()
        return {at: min(width, most) for at, width in widths.items()}


def _broken(name: str) -> str:
    return name.replace("-", "- ")


def _total(widths: dict[int, int]) -> int:
    """Return how wide columns are together."""
    return sum(widths.values()) + GAP * (len(widths) - 1)


def _longest(texts: Iterable[str]) -> int:
    return max(map(cell_len, texts), default=0)


Part = Table | str
"""Of what is shown of anything: a table, or a paragraph."""


def print_parts(parts: Iterable[Part], console: Console) -> None:
    """Print tables as wide as the console, and text folded at its words."""
    for part in parts:
        if isinstance(part, str):
            say(console, part)
        else:
            console.print(part)


def as_text(parts: Iterable[Part]) -> str:
    """Return parts as plain text."""
    from rich.console import Console

    text = StringIO()
    # In a notebook, rich would show a cell's output instead.
    print_parts(parts, Console(file=text, width=WIDTH, color_system=None, force_jupyter=False))
    return text.getvalue()


def fill(table: Table, rows: Sequence[Sequence[str]]) -> None:
    """Add rows to a table, of which at most :data:`MOST_ROWS` are printed."""
    table.most_rows = MOST_ROWS
    for row in rows:
        table.add_row(*row)


def say(console: Console, text: str, style: str = "") -> None:
    """Print text folded at its words; words stay whole, paths among them, whatever the width."""
    for line in textwrap.wrap(printable(text), console.width, break_long_words=False, break_on_hyphens=False):
        console.print(Text(line, style), soft_wrap=True, highlight=False)


def duration(seconds: float) -> str:
    """Return seconds in the unit that leaves one to three digits before the point.

    >>> duration(0), duration(0.0000123), duration(-0.01234), duration(0.5), duration(75.25)
    ('0 s', '12.3 us', '-12.3 ms', '500 ms', '75.2 s')
    """
    if seconds <= 0:
        return f"-{duration(-seconds)}" if seconds else "0 s"
    return _in_unit(seconds, {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9})


def size(count: int) -> str:
    """Return bytes in binary units.

    >>> size(0), size(1000), size(1536), size(16 * 2**30)
    ('0 B', '1000 B', '1.5 KiB', '16 GiB')
    """
    return _in_unit(count, {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1})


def bandwidth(bytes_per_s: float) -> str:
    """Return bytes per second in decimal units, as makers of links do.

    >>> bandwidth(25e9), bandwidth(1.5e6)
    ('25 GB/s', '1.5 MB/s')
    """
    return _in_unit(bytes_per_s, {"GB/s": 1e9, "MB/s": 1e6, "kB/s": 1e3, "B/s": 1})


def _in_unit(value: float, units: dict[str, float]) -> str:
    """Return a number in the largest unit of which there is one, rounded to three digits; else in the last one."""
    *_, smallest = units
    unit = next((unit for unit, factor in units.items() if value >= 0.9995 * factor), smallest)
    number = value / units[unit]
    digits = 0 if number >= 100 else 1 if number >= 10 else 2
    text = f"{number:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if digits else text} {unit}"


def percentage(share: float, *, with_sign: bool = False) -> str:
    """Return a share in per cent.

    >>> percentage(0.256), percentage(0.031, with_sign=True)
    ('25.6 %', '+3.1 %')
    """
    return f"{share:{'+' if with_sign else ''}.1%}".replace("%", " %")


def figure(value: float) -> str:
    """Return a number without a unit, in four digits or, where it has more before its point, in all of them.

    >>> figure(58.4912), figure(32123.456), figure(0.5), figure(1.5e-05)
    ('58.49', '32,123', '0.5', '1.5e-05')
    """
    return f"{value:.4g}" if abs(value) < 9999.5 else f"{value:,.0f}"


def long_duration(seconds: float) -> str:
    """Return how long something takes in days, hours or minutes, whichever leaves a number above one.

    >>> long_duration(8_143_200), long_duration(5400), long_duration(59)
    ('94.25 days', '1.5 hours', '59 s')
    """
    for unit, length_s in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= length_s:
            return f"{figure(seconds / length_s)} {unit}"
    return duration(seconds)


def amount(count: float) -> str:
    """Return a number of things as people say it.

    >>> amount(15e12), amount(2e9), amount(1_500_000), amount(12)
    ('15T', '2B', '1.5M', '12')
    """
    found = next((each for each in (("T", 1e12), ("B", 1e9), ("M", 1e6)) if count >= each[1]), ("", 1.0))
    return f"{figure(count / found[1])}{found[0]}"
