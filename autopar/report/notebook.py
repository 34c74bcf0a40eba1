"""What notebooks show of an object: its tables and a small picture, in so many bytes and without scripts.

Pandas styles the tables; names are escaped, whatever is in them.
"""

from __future__ import annotations

import base64
import hashlib
import html
import io
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING

from autopar.report.table import MOST_ROWS, Part, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas.io.formats.style_render import CSSDict

MOST_BYTES = 100_000
"""Of an object in a notebook, which keeps what it shows."""
_IMAGE_BYTES = 60_000
_PIXELS, _MOST_DPI, _COLOURS = 900, 110, 64
_ROWS = MOST_ROWS + 1
_LONGEST = (300, 60)
"""Letters of a cell or a paragraph: as many, or where there is no room fewer."""
_LOOK: list[CSSDict] = [
    {"selector": "caption", "props": "text-align: left; font-weight: bold"},
    {"selector": "th, td", "props": "text-align: left; vertical-align: top; white-space: pre-line"},
]


def as_html(parts: Iterable[Part], picture: Figure | None) -> str:
    """Return a picture and parts, as many as there is room for."""
    shown = [] if picture is None else [_image(picture)]
    # Base64 and markup are ASCII; names may not be.
    left = MOST_BYTES - sum(map(len, shown)) - len(_MORE)
    for part in parts:
        fitting = (text for text in (_part(part, longest) for longest in _LONGEST) if len(text.encode()) < left)
        text = next(fitting, None)
        if text is None:
            return "\n".join((*shown, _MORE))
        shown.append(text)
        left -= len(text.encode()) + 1
    return "\n".join(shown)


_MORE = "<p>... there is more: print() shows all of it</p>"


def _part(part: Part, longest: int) -> str:
    return f"<p>{html.escape(_short(part, longest))}</p>" if isinstance(part, str) else _table(part, longest)


def _short(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[:longest]}..."


def _table(table: Table, longest: int) -> str:
    """Return the first rows of a table, and its sums."""
    import pandas

    printed = table.printed_rows()
    rows = [[_short(cell, longest) for cell in row.cells] for row in printed[:_ROWS]]
    if len(printed) > len(rows):
        rows.append([f"... {len(printed) - len(rows)} more", *("" for _ in table.columns[1:])])
    if table.footer:
        rows.append([*table.footer])
    seen = [at for at in range(len(table.columns)) if not rows or any(row[at] for row in rows)]
    numbers = ", ".join(f".col{place}" for place, at in enumerate(seen) if table.numbers[at])
    style = pandas.DataFrame(rows, columns=range(len(table.columns)), dtype=object)[seen].style
    style = style.hide(axis="index").relabel_index([html.escape(table.columns[at]) for at in seen], axis="columns")
    style = style.format(escape="html").set_caption(html.escape(table.title))
    style = style.set_table_styles([*_LOOK, {"selector": numbers or ".none", "props": "text-align: right"}])
    # What is in the table names it: the same table, the same bytes.
    style = style.set_uuid(hashlib.sha256(repr((table.title, rows)).encode()).hexdigest()[:12])
    text: str = style.to_html() if any(table.columns) else style.hide(axis="columns").to_html()
    return text + (f"<p>{html.escape(table.caption)}</p>" if table.caption else "")


def _image(figure: Figure) -> str:
    """Return a figure as a picture of few colours, whose bytes are in the page; nothing where they are too many."""
    from PIL import Image

    drawn, content = io.BytesIO(), io.BytesIO()
    with warnings.catch_warnings():
        # Nobody asked for it: letters that a font lacks are boxes.
        warnings.filterwarnings("ignore", "Glyph")
        figure.savefig(drawn, format="png", dpi=min(_MOST_DPI, _PIXELS / figure.get_figwidth()))
    Image.open(drawn).convert("RGB").quantize(_COLOURS).save(content, "png", optimize=True)
    data = base64.b64encode(content.getvalue()).decode()
    return (
        f'<img alt="" style="max-width: 100%; max-height: 28em" src="data:image/png;base64,{data}">'
        if len(data) < _IMAGE_BYTES
        else ""
    )
