"""The one look of all tables, and of the text around them.

A table shows every cell whole, whatever the width, in the first of these layouts that fits:

1. as it is;
2. with names of columns broken at their spaces and hyphens;
3. with text folded at its commas and spaces, into at most three lines; a number keeps its unit and is never folded;
4. with the columns of long text on lines of their own below each row, the longest first;
5. as records, one line a field.

>>> from rich.console import Console
>>> table = Table("Plans", ("planner", ">step", "stages"))
>>> table.add_row("autopar", "12.5 ms", "0-3:1,4-7:1,8-11:1,12-15:1,16-19:1,20-23:1")
>>> Console(width=30, color_system=None).print(table)
Plans
<BLANKLINE>
planner     step
  stages
─────────────────────────────
autopar  12.5 ms
  0-3:1,4-7:1,8-11:1,12-15:1,
  16-19:1,20-23:1
<BLANKLINE>

Quantities as people read them: durations, sizes, bandwidths.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import StringIO
from typing import TYPE_CHECKING, NamedTuple

from rich.cells import cell_len, chop_cells
from rich.text import Text

from autopar.errors import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions


WIDTH = 120
"""Columns of text that goes to no terminal."""
MOST_ROWS = 40
LAST_ROWS = 10
"""How many of the last ones are among them."""
MOST_LINES = 3
"""Of a cell beside others; text that takes more goes below its row."""
LEAST_FOLDED = 10
"""Characters of a column that is folded, at least."""
GAP, INDENT = "  ", "  "

_GLUED = re.compile(
    # A number and its unit, a product, thousands.
    r"(?<=\d) (?=(?:[KMGT]iB|B|[kMG]?B/s|[mun]?s|MHz|x|%)(?![\w/]))|(?<=\dx) (?=\d)|(?<=\d x) (?=\d)"
)
_THOUSANDS = re.compile(r"(?<![\d:.,-])\d{1,3}(?:,\d{3})+(?![\d:,-])")
_HELD, _COMMA = "\ue000", "\ue001"
_PIECES = re.compile(r"[^ ,]*,[ ]?|[^ ,]+[ ]?|[ ]")
_LIST = re.compile(r".*?,[ ]|.+")
_PARTS = re.compile(r"[^./_:+-]*[./_:+-]|[^./_:+-]+")


class _Column(NamedTuple):
    name: str
    number: bool


class _Row(NamedTuple):
    cells: tuple[str, ...]
    style: str = ""
    ends_section: bool = False
    spans: bool = False
    """Whether its only cell is as wide as the table."""


class _TableLayout(NamedTuple):
    """How wide each column is, and which ones stand below the others; records have no widths."""

    widths: dict[int, int]
    below: tuple[int, ...] = ()


class Table:
    """Rows of texts under named columns, all of them plain text; to be printed by a console of rich.

    A column whose name begins with ``>`` holds numbers, and is set to the right: they are not folded, lists of them are
    at their commas. Without any name the table has no head.
    """

    def __init__(self, title: str, columns: Sequence[str], caption: str = "") -> None:
        self.title, self.caption = printable(title), caption
        self.columns = tuple(_Column(name.removeprefix(">"), name.startswith(">")) for name in columns)
        self.footer: tuple[str, ...] = ()
        self._rows: list[_Row] = []

    def add_row(self, *cells: str, style: str = "", end_section: bool = False) -> None:
        """Add a row; cells that are not given are empty."""
        self._rows.append(_Row(self._pad_cells(cells), style, end_section))

    def add_line(self, text: str) -> None:
        """Add a line that is as wide as the table, such as how many rows are left out."""
        self._rows.append(_Row((text,), spans=True))

    def _pad_cells(self, cells: Sequence[str]) -> tuple[str, ...]:
        assert len(cells) <= len(self.columns)
        shown = ("\n".join(map(printable, cell.split("\n"))) for cell in cells)
        return (*shown, *("" for _ in self.columns[len(cells) :]))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yield the lines that fit a console's width."""
        rule = "-" if options.ascii_only else "─"
        for text, style in self._lines(options.max_width, rule):
            yield Text(text.rstrip(), style, no_wrap=True, overflow="ignore", end="\n")

    def _lines(self, width: int, rule: str) -> Iterator[tuple[str, str]]:
        for line in fold(self.title, width):
            yield line, "bold"
        yield "", ""
        layout = self._layout(width)
        yield from self._records(width) if layout is None else self._table(layout, width, rule)
        yield "", ""
        if self.caption:
            yield from ((line, "italic") for line in fold(self.caption, width))

    def _table(self, layout: _TableLayout, width: int, rule: str) -> Iterator[tuple[str, str]]:
        across = max(_wide(layout.widths.values()), self._wide_below(layout, width))
        if any(column.name for column in self.columns):
            names = tuple(column.name for column in self.columns)
            yield from ((line, "bold") for line in self._row(names, layout, width, head=True))
            yield rule * across, ""
        for row in self._rows:
            lines = fold(row.cells[0], width) if row.spans else self._row(row.cells, layout, width)
            yield from ((line, row.style) for line in lines)
            if row.ends_section and row is not self._rows[-1]:
                yield "", ""
        if self.footer:
            yield "", ""
            yield from ((line, "") for line in self._row(self._pad_cells(self.footer), layout, width))

    def _row(self, cells: Sequence[str], layout: _TableLayout, width: int, *, head: bool = False) -> Iterator[str]:
        """Yield the lines of a row, or of the head, whose names stand at the foot of their columns."""
        folded = {
            at: _head_lines(cells[at], wide) if head else fold(cells[at], wide, numbers=self.columns[at].number)
            for at, wide in layout.widths.items()
        }
        count = max(map(len, folded.values()))
        for line in range(count):
            parts = []
            for at, lines in folded.items():
                index = line - (count - len(lines)) if head else line
                text = lines[index] if 0 <= index < len(lines) else ""
                parts.append(_set(text, layout.widths[at], right=self.columns[at].number))
            yield GAP.join(parts)
        for at in layout.below:
            if cells[at]:
                yield from _indent(f"{'' if head else self._label(at, layout)}{cells[at]}", width)

    def _label(self, at: int, layout: _TableLayout) -> str:
        """Return what stands before a cell below its row: the column's name, unless the head tells it."""
        name = self.columns[at].name
        return f"{name}: " if name and len(layout.below) > 1 else ""

    def _wide_below(self, layout: _TableLayout, width: int) -> int:
        lines = (
            line
            for at in layout.below
            for cell in (self.columns[at].name, *self._cells(at))
            for line in _indent(f"{self._label(at, layout)}{cell}", width)
        )
        return _longest(lines)

    def _records(self, width: int) -> Iterator[tuple[str, str]]:
        longest = max(cell_len(column.name) for column in self.columns)
        rows = [*self._rows, *([_Row(self._pad_cells(self.footer))] if self.footer else [])]
        for index, row in enumerate(rows):
            if index:
                yield "", ""
            if row.spans:
                yield from ((line, row.style) for line in fold(row.cells[0], width))
                continue
            for column, cell in zip(self.columns, row.cells, strict=True):
                yield from ((line, row.style) for line in _field(column.name, cell, longest, width))

    def _layout(self, width: int) -> _TableLayout | None:
        """Return the first layout that fits; none where only records do."""
        every = range(len(self.columns))
        natural = {at: max(self._natural(at), cell_len(self.columns[at].name)) for at in every}
        for found in (natural, broken := {at: max(self._natural(at), self._least_head(at)) for at in every}):
            if _wide(found.values()) <= width:
                return _TableLayout(found)
        long = sorted((at for at in every if self._folds(at)), key=lambda at: -broken[at])
        for count in range(len(long) + 1):
            below = tuple(sorted(long[:count]))
            widths = self._narrow_widths({at: wide for at, wide in broken.items() if at not in below}, width)
            if widths:
                return _TableLayout(widths, below)
        return None

    def _narrow_widths(self, natural: dict[int, int], width: int) -> dict[int, int] | None:
        """Return widths that are as wide as may be, the widest narrowed; none where a cell would get too long."""
        least = {at: min(wide, self._least(at)) for at, wide in natural.items()}
        if not natural or _wide(least.values()) > width:
            return None
        cap = max(natural.values())
        while _wide(widths := [max(least[at], min(natural[at], cap)) for at in natural]) > width:
            cap -= 1
        found = dict(zip(natural, widths, strict=True))
        lines = ((at, line) for at in found for cell in self._cells(at) for line in cell.split("\n"))
        folded = (fold(line, found[at], numbers=self.columns[at].number) for at, line in lines)
        return None if any(len(each) > MOST_LINES for each in folded) else found

    def _cells(self, at: int) -> Iterator[str]:
        yield from (row.cells[at] for row in self._rows if not row.spans)
        yield from self.footer[at : at + 1]

    def _natural(self, at: int) -> int:
        return max((_longest(cell.split("\n")) for cell in self._cells(at)), default=0)

    def _least_head(self, at: int) -> int:
        return _longest(re.findall(r"[^\s-]+-?|-", self.columns[at].name))

    def _least(self, at: int) -> int:
        """Return the width below which a word would be broken, or a column gets too narrow to be read."""
        number = self.columns[at].number
        words = max((_longest(_words(cell, number)) for cell in self._cells(at)), default=0)
        return max(words, self._least_head(at), LEAST_FOLDED)

    def _folds(self, at: int) -> bool:
        """Whether a column holds anything but numbers."""
        return not self.columns[at].number or any(", " in cell for cell in self._cells(at))


def as_text(render: Callable[[Console], None]) -> str:
    """Return what ``render`` prints as plain text."""
    from rich.console import Console

    text = StringIO()
    render(Console(file=text, width=WIDTH, color_system=None))
    return text.getvalue()


def fill(table: Table, rows: Sequence[Sequence[str]]) -> None:
    """Add rows to a table; of more than :data:`MOST_ROWS` the first and the last ones, and how many are between."""
    first = len(rows) if len(rows) <= MOST_ROWS else MOST_ROWS - LAST_ROWS
    for row in rows[:first]:
        table.add_row(*row)
    if first < len(rows):
        table.add_line(f"... {len(rows) - MOST_ROWS} more")
        for row in rows[-LAST_ROWS:]:
            table.add_row(*row)


def say(console: Console, text: str, style: str = "") -> None:
    """Print text folded at its words; words stay whole, paths among them, whatever the width."""
    for line in fold(printable(text), console.width, whole=True):
        console.print(Text(line, style), soft_wrap=True, highlight=False)


def fold(text: str, width: int, *, numbers: bool = False, whole: bool = False) -> list[str]:
    """Return text as lines, folded behind commas and spaces, numbers together with their units.

    Args:
        text: of one line or several.
        width: of a line. A word that is longer is broken, at its points, hyphens and the like where it has some.
        numbers: fold lists only, behind their commas.
        whole: leave longer words as they are.

    >>> fold("0-1:1,2-3:1,4-5:1", 12), fold("takes 12.5 ms", 8), fold("model.layers.0.self_attn.q_proj", 16)
    (['0-1:1,2-3:1,', '4-5:1'], ['takes', '12.5 ms'], ['model.layers.0.', 'self_attn.q_proj'])
    """
    lines = []
    for paragraph in text.split("\n"):
        line = ""
        for piece in _pieces(paragraph, numbers):
            if cell_len(line) + cell_len(piece.rstrip(" ")) > width:
                if line.strip(" "):
                    lines.append(line.rstrip(" "))
                line = ""
                if not whole:
                    *broken, piece = _break_word(piece, width)
                    lines += broken
            line += piece
        lines.append(line.rstrip(" "))
    return lines


def _pieces(text: str, numbers: bool) -> list[str]:
    """Return what text consists of that is not to be broken."""
    held = _THOUSANDS.sub(lambda match: match[0].replace(",", _COMMA), _GLUED.sub(_HELD, text))
    found = (_LIST if numbers else _PIECES).findall(held)
    return [piece.replace(_HELD, " ").replace(_COMMA, ",") for piece in found]


def _words(text: str, numbers: bool) -> list[str]:
    return [piece for line in text.split("\n") for piece in _pieces(line, numbers)]


def _break_word(word: str, width: int) -> list[str]:
    """Return a word as parts that are no wider than a line."""
    if cell_len(word.rstrip(" ")) <= width:
        return [word]
    lines, line = list[str](), ""
    for part in _PARTS.findall(word):
        if line and cell_len(line + part.rstrip(" ")) > width:
            lines.append(line)
            line = ""
        *full, last = chop_cells(part, width) if cell_len(part.rstrip(" ")) > width else [part]
        lines += full
        line += last
    return [*lines, line]


def _head_lines(name: str, width: int) -> list[str]:
    lines = [""]
    for match in re.finditer(r"([^\s-]+-?|-)(\s*)", name):
        if lines[-1] and cell_len(lines[-1] + match[1]) > width:
            lines.append("")
        lines[-1] += match[0]
    return [line.rstrip() for line in lines]


def _field(name: str, cell: str, longest: int, width: int) -> Iterator[str]:
    """Yield a record's field: its name, and its text beside it, or below where there is no room."""
    room = width - longest - len(GAP)
    if room >= max(_longest(_words(cell, False)), LEAST_FOLDED):
        for index, line in enumerate(fold(cell, room)):
            yield f"{_set('' if index else name, longest, right=False)}{GAP}{line}"
        return
    yield from fold(name, width)
    yield from _indent(cell, width)


def _indent(text: str, width: int) -> Iterator[str]:
    yield from (f"{INDENT}{line}" for line in fold(text, width - len(INDENT)))


def _longest(lines: Iterable[str]) -> int:
    return max((cell_len(line.rstrip(" ")) for line in lines), default=0)


def _wide(widths: Iterable[int]) -> int:
    """Return how wide columns are together."""
    found = list(widths)
    return sum(found) + len(GAP) * (len(found) - 1)


def _set(text: str, width: int, *, right: bool) -> str:
    space = " " * (width - cell_len(text))
    return f"{space}{text}" if right else f"{text}{space}"


def duration(seconds: float) -> str:
    """Return seconds in the unit that leaves one to three digits before the point.

    >>> duration(0), duration(0.0000123), duration(0.01234), duration(0.5), duration(75.25)
    ('0 s', '12.3 us', '12.3 ms', '500 ms', '75.2 s')
    """
    if seconds == 0:
        return "0 s"
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 0.9995:
            return f"{_three_digits(seconds * factor)} {unit}"
    return f"{_three_digits(seconds * 1e9)} ns"


def size(count: int) -> str:
    """Return bytes in binary units.

    >>> size(0), size(1000), size(1536), size(16 * 2**30)
    ('0 B', '1000 B', '1.5 KiB', '16 GiB')
    """
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{_three_digits(value)} {unit}"
        value /= 1024
    return f"{_three_digits(value)} TiB"


def bandwidth(bytes_per_s: float) -> str:
    """Return bytes per second in decimal units, as makers of links do.

    >>> bandwidth(25e9), bandwidth(1.5e6)
    ('25 GB/s', '1.5 MB/s')
    """
    for unit, factor in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_s >= factor:
            return f"{_three_digits(bytes_per_s / factor)} {unit}"
    return f"{_three_digits(bytes_per_s)} B/s"


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


def _three_digits(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.2f}".rstrip("0").rstrip(".") if value < 10 else f"{value:.1f}".removesuffix(".0")
