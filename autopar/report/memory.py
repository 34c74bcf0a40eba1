"""A plan's memory: each stage's predicted peak beside what its devices have, or what it was found to hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from autopar.report.quantity import percentage, size
from autopar.report.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

    from autopar.formats.plan import Plan


_USED, _FREE, _INK = "#4f86c6", "#e4e7ec", "#2b2f36"


def render(plan: Plan, held_bytes: Sequence[int], console: Console) -> None:
    """Print every stage's predicted peak beside the bytes that it was found to hold."""
    columns = (">stage", ">predicted", ">rehearsed", ">predicted over rehearsed", ">device memory")
    table = Table("Memory (largest replica of each stage)", columns)
    limits = plan.predicted.limit_bytes
    for index, (peak, held) in enumerate(zip(plan.predicted.peak_bytes, held_bytes, strict=True)):
        error = percentage(peak / held - 1, signed=True) if held else ""
        table.add_row(str(index), size(peak), size(held), error, size(limits[index]) if limits else "")
    console.print(table)


def draw(plan: Plan, memory_bytes: Sequence[int]) -> Figure:
    """Return bars of each stage's peak; ``memory_bytes`` holds every device's memory in cluster order."""
    from matplotlib.figure import Figure

    limits = [min(memory_bytes[device] for device in stage.devices) for stage in plan.stages]
    figure = Figure(figsize=(8, 0.6 + 0.4 * len(limits)), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    places = range(len(limits))
    axes.barh(places, limits, color=_FREE, height=0.62, label="device memory")
    axes.barh(places, plan.predicted.peak_bytes, color=_USED, height=0.62, label="predicted peak")
    for place, (peak, limit) in enumerate(zip(plan.predicted.peak_bytes, limits, strict=True)):
        share = f" ({peak / limit:.1%})" if limit else ""
        axes.annotate(
            f"{size(peak)} of {size(limit)}{share}",
            (max(limits), place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            size=8,
            color=_INK,
        )
    axes.set_yticks(places, [f"stage {index}" for index in places])
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.tick_params(length=0, labelsize=8, colors=_INK)
    axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure
