"""The one look of all pictures: colours, axes, units."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from autopar.formats.program import (
    BACKWARD,
    BEGIN_SUM,
    CORRECT,
    FORWARD,
    INPUT_BACKWARD,
    PREDICT,
    UPDATE,
    WEIGHT_BACKWARD,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#2b2f36"
FAINT = "#d9dce1"
COLOURS = {
    FORWARD: "#4f86c6",
    BACKWARD: "#f0a63c",
    INPUT_BACKWARD: "#e5803f",
    WEIGHT_BACKWARD: "#c8b24a",
    UPDATE: "#8b93a1",
    PREDICT: "#aab1bd",
    CORRECT: "#aab1bd",
    BEGIN_SUM: "#aab1bd",
    "send": "#3a9d7c",
    "receive": "#9a6fb8",
    "reduce": "#d1495b",
}
_BYTE_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def strip(axes: Axes, grid: Literal["x", "y"]) -> None:
    """Leave of the frame the line below, and faint lines across one axis, behind what is drawn."""
    axes.grid(axis=grid, color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)


def byte_unit(largest: float) -> tuple[int, str]:
    """Return the unit in which bytes up to the largest are read with ease: how many bytes it has, and its name."""
    return next((each for each in _BYTE_UNITS if largest >= each[0]), (1, "bytes"))
