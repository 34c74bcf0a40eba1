"""Page: tables and pictures as one HTML file that needs nothing beside it, no network and no scripts."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_WIDTH = 110
_HEAD = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ margin: 2em auto; max-width: 75em; padding: 0 1em; font-family: system-ui, sans-serif;
        color: #2b2f36; background: #ffffff; }}
h1 {{ font-size: 1.2em; overflow-wrap: anywhere; }}
pre {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 0.85em;
       line-height: 1.3; overflow-x: auto; }}
figure {{ margin: 0; overflow-x: auto; }}
</style>
</head>
<body>
<h1>{title}</h1>
"""


def page(title: str, render: Callable[[Console], None], figures: Sequence[Figure] = ()) -> str:
    """Return an HTML page of what ``render`` prints, and of figures as inline SVG; equal content, equal bytes."""
    console = Console(file=io.StringIO(), record=True, width=_WIDTH, force_terminal=True, color_system="truecolor")
    render(console)
    tables = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>\n")
    pictures = "".join(f"<figure>\n{_svg(figure)}</figure>\n" for figure in figures)
    return f"{_HEAD.format(title=html.escape(title))}{pictures}{tables}</body>\n</html>\n"


def _svg(figure: Figure) -> str:
    import matplotlib as mpl

    content = io.StringIO()
    # No date, and names that follow from the content: the same figure gives the same bytes.
    unsaid = {"Date": None, "Creator": None, "Format": None, "Type": None}
    with mpl.rc_context({"svg.hashsalt": "autopar", "svg.fonttype": "none"}):
        figure.savefig(content, format="svg", metadata=unsaid)
    text = content.getvalue()
    return text[text.index("<svg") :]
