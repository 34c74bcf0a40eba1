"""The one look of all pictures: colours, axes, units, and how long a name may be.

The colours are Okabe's and Ito's (2008, "Color universal design"), which people with any colour vision tell apart:
blue, orange, green, purple, sky blue, vermilion, yellow; and greys.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Literal

from autopar.errors import printable
from autopar.formats.program import (
    BACKWARD,
    BEGIN_SUM,
    CORRECT,
    FORWARD,
    INPUT_BACKWARD,
    PREDICT,
    PUSH,
    UPDATE,
    WEIGHT_BACKWARD,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#2b2f36"
FAINT = "#d9dce1"
GREY = "#8b93a1"
LANE = "#f4f5f7"
BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#e69f00", "#009e73", "#cc79a7"
SKY, VERMILION, YELLOW = "#56b4e9", "#d55e00", "#f0e442"
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION, YELLOW)
"""In the order in which they are given to stages, ranks and lines; what comes next begins again."""
COLOURS = {
    FORWARD: BLUE,
    BACKWARD: ORANGE,
    INPUT_BACKWARD: VERMILION,
    WEIGHT_BACKWARD: YELLOW,
    UPDATE: GREY,
    PREDICT: "#aab1bd",
    CORRECT: "#aab1bd",
    BEGIN_SUM: "#aab1bd",
    PUSH: "#aab1bd",
    "send": GREEN,
    "receive": SKY,
    "reduce": PURPLE,
}
_BYTE_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
LONGEST_NAME = 29
"""Letters of a name beside or below an axis."""
LETTER = 0.62
"""Width of a letter over the font's size, of wide ones among narrow ones."""
POINTS = 72
"""Of an inch."""


def colour_of(number: int) -> str:
    """Return the colour of a stage, or of what else is numbered.

    >>> colour_of(0) == colour_of(7) == BLUE, colour_of(1) == ORANGE
    (True, True)
    """
    return PALETTE[number % len(PALETTE)]


def shade(colour: str, share: float) -> str:
    """Return a colour that is lightened by a share.

    >>> shade("#4f86c6", 0.0), shade("#4f86c6", 0.5)
    ('#4f86c6', '#a7c2e2')
    """
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{int(part + (255 - part) * share):02x}" for part in parts)


def ink_on(colour: str) -> str:
    """Return the colour of letters that are read on another.

    >>> ink_on(BLUE), ink_on(YELLOW) == INK
    ('white', True)
    """
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 125 else INK


def short(name: str, longest: int = LONGEST_NAME) -> str:
    """Return a name's end, which tells layers apart, where the whole would leave no room for what is drawn.

    >>> short("head"), short("model.decoder.transformer.layers.12")
    ('head', '...oder.transformer.layers.12')
    """
    name = printable(name)
    return name if len(name) <= longest else f"...{name[3 - longest :]}"


def text_points(text: str, size: float) -> float:
    """Return how wide a text is in a font of some size."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextToPath

    with warnings.catch_warnings():
        # Letters that the font lacks are boxes.
        warnings.filterwarnings("ignore", "Glyph")
        width, _, _ = TextToPath().get_text_width_height_descent(text, FontProperties(size=size), ismath=False)
    return float(width)


def fitting(name: str, points: float, size: float) -> str:
    """Return as much of a name's end as is no wider than so many points.

    >>> fitting("head", 100, 7), fitting("W" * 40, 100, 7)
    ('head', '...WWWWWWWWWWWWW')
    """
    longest, name = LONGEST_NAME, printable(name)
    while longest > 4 and text_points(short(name, longest), size) > points:
        longest -= 1
    return short(name, longest)


def strip(axes: Axes, grid: Literal["x", "y"]) -> None:
    """Leave of the frame the line below, and faint lines across one axis, behind what is drawn."""
    axes.grid(axis=grid, color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)


def legend_above(axes: Axes, columns: int = 4) -> None:
    """Say what colours are above an axis, where nothing that is drawn can be in the way."""
    legend = axes.legend(
        loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.1, ncols=columns, frameon=False, fontsize=8
    )
    for text in legend.get_texts():
        # Names are no formulas, whatever is in them.
        text.set_parse_math(False)


def byte_unit(largest: float) -> tuple[int, str]:
    """Return the unit in which bytes up to the largest are read with ease: how many bytes it has, and its name."""
    return next((each for each in _BYTE_UNITS if largest >= each[0]), (1, "bytes"))
