"""The picture of docs/concepts.md: a model cut into stages, who runs them, and one step in time.

    python benchmarks/concepts.py docs/images/concepts.png

The step is that of the schedule `1f1b`; a backward takes twice as long as a forward, and messages take no time.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

mpl.rcParams.update({"font.size": 11, "font.family": "DejaVu Sans"})
INK, FAINT, LANE, QUIET = "#2b2f36", "#d9dce1", "#f4f5f7", "#6a7280"
FORWARD, BACKWARD, UPDATE, REDUCTION = "#4f86c6", "#f0a63c", "#8b93a1", "#d1495b"
STAGES = (("#cfe0f3", "#4f86c6"), ("#cfe9df", "#3a9d7c"))
LAYERS = ("embed", *(f"block {index}" for index in range(6)), "head")
MICRO_BATCHES, FORWARD_TIME, BACKWARD_TIME = 4, 1.0, 2.0
ORDERS = (("F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"), ("F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"))


def main(output: Path) -> None:
    """Draw the picture."""
    figure = Figure(figsize=(12, 7.95), dpi=150)
    axes = figure.add_axes((0.02, 0.01, 0.96, 0.98))
    axes.set_xlim(0, 120)
    axes.set_ylim(4.6, 84)
    axes.axis("off")
    _draw_model(axes)
    _draw_devices(axes)
    _draw_step(axes)
    figure.savefig(output)
    sys.stdout.write(f"{output}\n")


def _title(axes: Axes, y: float, number: int, text: str) -> None:
    axes.text(0, y, f"{number}", color="white", ha="center", va="center", weight="bold", size=10, bbox=_badge())
    axes.text(2.2, y, text, color=INK, va="center", weight="bold", size=12.5)


def _badge() -> dict[str, object]:
    return {"boxstyle": "circle,pad=0.25", "facecolor": INK, "edgecolor": INK}


def _box(axes: Axes, x: float, y: float, width: float, height: float, fill: str, edge: str, style: str = "-") -> None:
    shape = FancyBboxPatch(
        (x, y), width, height, "round,pad=0,rounding_size=0.7", facecolor=fill, edgecolor=edge, linestyle=style, lw=1.3
    )
    axes.add_patch(shape)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], style: str) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle=style, mutation_scale=13, color=QUIET, lw=1.5))


def _span(axes: Axes, start: float, end: float, y: float, text: str, colour: str = INK) -> None:
    """Draw a measure with a text in its middle."""
    axes.annotate("", (start, y), (end, y), arrowprops={"arrowstyle": "|-|,widthA=0.25,widthB=0.25", "color": colour})
    axes.text((start + end) / 2, y, text, ha="center", va="center", color=colour, backgroundcolor="white", size=10.5)


def _draw_model(axes: Axes) -> None:
    """Draw the layers in a row, with the cut between the stages."""
    _title(axes, 82, 1, "Your model is a row of layers. A cut makes stages of it.")
    width, gap = 11.6, 1.0
    for index, name in enumerate(LAYERS):
        fill, edge = STAGES[index >= 4]
        x = 9 + index * (width + gap) + (3.4 if index >= 4 else 0)
        _box(axes, x, 73.4, width, 4.6, fill, edge)
        axes.text(x + width / 2, 75.7, name, ha="center", va="center", color=INK)
        if index not in (3, 7):
            axes.plot([x + width, x + width + gap], [75.7, 75.7], color=QUIET, lw=1.3)
    middle = 9 + 4 * (width + gap) + 1.2
    axes.plot([middle, middle], [71.2, 79.4], color="#d1495b", lw=1.8, linestyle=(0, (4, 3)))
    axes.text(middle, 80, "cut", ha="center", va="bottom", color="#d1495b", size=10.5)
    _span(axes, 9, 9 + 4 * width + 3 * gap, 71.3, "stage 0", STAGES[0][1])
    start = 9 + 4 * (width + gap) + 3.4
    _span(axes, start, start + 4 * width + 3 * gap, 71.3, "stage 1", STAGES[1][1])


def _draw_devices(axes: Axes) -> None:
    """Draw the mini-batch, the replicas of stage 0, and the team of stage 1."""
    _title(axes, 66.5, 2, "Devices run the stages: two replicas of stage 0, and one of stage 1, by a team of two.")
    colours = ("#eceef1", "#dfe3e8", "#d1d6de", "#c3cad4")
    for index in range(MICRO_BATCHES):
        y = 57.2 - index * 4.4
        axes.add_patch(Rectangle((3.4, y), 10, 3.9, facecolor=colours[index], edgecolor="white"))
        axes.text(8.4, y + 1.95, f"micro-batch {index}", ha="center", va="center", color=INK, size=8.6)
    axes.text(8.4, 62.7, "mini-batch", ha="center", color=INK, size=10.5)
    axes.text(8.4, 43.2, "the samples\nof one step", ha="center", va="top", color=QUIET, size=9.5)
    for replica, y in enumerate((53.6, 43.2)):
        _draw_device(axes, 30, y, 26, f"GPU {replica}", f"replica {replica} of stage 0", 0)
        _arrow(axes, (14.2, 52.4), (29.4, y + 4), "-|>")
        _arrow(axes, (56.6, y + 4), (70.6, 52.4 - (replica * 2 - 1) * 1.2), "<|-|>")
    axes.text(21.6, 58, "half of each\nmicro-batch", ha="center", va="bottom", color=QUIET, size=9.5)
    axes.text(63.6, 58, "activations forth,\ngradients back", ha="center", va="bottom", color=QUIET, size=9.5)
    _box(axes, 71, 41.2, 47, 21.6, "white", STAGES[1][1], "--")
    axes.text(94.5, 61.2, "replica 0 of stage 1: a team", ha="center", va="center", color=INK, size=10.5)
    for part, x in enumerate((73, 96)):
        _draw_device(axes, x, 47.4, 20, f"GPU {2 + part}", f"half of every layer: part {part}", 1)
    axes.text(94.5, 43.8, "they add up their results within every layer", ha="center", color=QUIET, size=9.5)


def _draw_device(axes: Axes, x: float, y: float, width: float, name: str, role: str, stage: int) -> None:
    fill, edge = STAGES[stage]
    height = 8.2 if stage == 0 else 11.2
    _box(axes, x, y, width, height, fill, edge)
    axes.text(x + width / 2, y + height - 2.3, name, ha="center", va="center", color=INK, weight="bold")
    axes.text(x + width / 2, y + height - 5.4, role, ha="center", va="center", color=INK, size=9.5)
    if stage:
        axes.text(
            x + width / 2, y + height - 8.6, "the whole micro-batch", ha="center", va="center", color=QUIET, size=9.5
        )


def _draw_step(axes: Axes) -> None:
    """Draw one step, with a row for every device."""
    _title(axes, 38.2, 3, "One step in time: the schedule orders forwards and backwards of the micro-batches.")
    times = _times()
    end = max(stop for stage in times for _, stop in stage.values())
    x, scale = 11.0, 107 / end
    for device in range(4):
        stage, y = device // 2, 27.6 - device * 5.6 - (device // 2) * 1.2
        axes.text(x - 1.4, y + 2.3, f"GPU {device}", ha="right", va="center", color=INK, size=10.5)
        axes.add_patch(Rectangle((x, y), end * scale, 4.6, facecolor=LANE, edgecolor="none"))
        for action, (start, stop) in times[stage].items():
            _draw_action(axes, x + start * scale, y, (stop - start) * scale, action)
        for start, length in ((2.0, 2.0),) if stage == 0 else ((0.0, 1.0), (13.8, end - 13.8)):
            middle = x + (start + length / 2) * scale
            axes.text(middle, y + 2.3, "bubble", ha="center", va="center", color=QUIET, size=9.5, style="italic")
    _span(axes, x, x + end * scale, 6.6, "one step")
    _legend(axes, x)


def _times() -> list[dict[str, tuple[float, float]]]:
    """Return when each stage's actions begin and end: after the one before, and after the other stage's it needs."""
    times: list[dict[str, tuple[float, float]]] = [{}, {}]
    free, waiting = [0.0, 0.0], [list(order) for order in ORDERS]
    while any(waiting):
        for stage in (0, 1):
            while waiting[stage]:
                action = waiting[stage][0]
                needed = times[0] if action[0] == "F" else times[1]
                is_first = (action[0] == "F") == (stage == 0)
                if not is_first and action not in needed:
                    break
                begin = free[stage] if is_first else max(free[stage], needed[action][1])
                length = FORWARD_TIME if action[0] == "F" else BACKWARD_TIME
                times[stage][waiting[stage].pop(0)] = begin, begin + length
                free[stage] = begin + length
    times[0]["A"] = free[0], free[0] + 0.4
    times[0]["U"] = free[0] + 0.4, free[0] + 1.2
    times[1]["U"] = free[1], free[1] + 0.8
    return times


def _draw_action(axes: Axes, x: float, y: float, width: float, action: str) -> None:
    colour = {"F": FORWARD, "B": BACKWARD, "A": REDUCTION, "U": UPDATE}[action[0]]
    axes.add_patch(Rectangle((x, y), width, 4.6, facecolor=colour, edgecolor="white", lw=1.2))
    ink = "white" if action[0] in "FU" else INK
    axes.text(x + width / 2, y + 2.3, action[1:], ha="center", va="center", color=ink, size=10.5)


def _legend(axes: Axes, x: float) -> None:
    named = (
        (FORWARD, "forward of a micro-batch", 0.0),
        (BACKWARD, "its backward", 26.0),
        (REDUCTION, "replicas add up their gradients", 42.5),
        (UPDATE, "optimizer's update", 73.5),
    )
    for colour, text, left in named:
        axes.add_patch(Rectangle((x + left, 33.9), 1.8, 1.5, facecolor=colour, edgecolor="none"))
        axes.text(x + left + 2.6, 34.65, text, va="center", color=INK, size=9.5)


if __name__ == "__main__":
    main(Path(__file__).with_suffix(".png"))
