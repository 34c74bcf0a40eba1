"""The picture of docs/concepts.md: a model cut into stages, the dimensions of a plan, and one step in time.

    python benchmarks/concepts.py docs/images/concepts.png

The plan is that of the page. The step is that of the schedule `1f1b`; a backward takes twice as long as a forward, and
messages take no time.
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
MICRO_BATCHES, SAMPLES, FORWARD_TIME, BACKWARD_TIME = 4, 4, 1.0, 2.0
REPLICAS = ((0, (0, 1)), (0, (2, 3)), (1, (4, 5, 6, 7)))
"""Stage and devices of each."""
LEFT, RIGHT = (27.0, 77.0), (67.0, 118.0)
"""Where stages begin and end."""
LOW, HIGH = 39.8, 58.6
"""Where a micro-batch's samples do."""
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
    """Draw micro-batches, and beside their samples who has them: stages to the right, replicas below each other."""
    _title(
        axes, 66.5, 2, "Eight devices run them: stage 0 has two replicas on two devices each, stage 1 has one on four."
    )
    _draw_micro_batches(axes)
    _arrow(axes, (LEFT[0], 62.9), (RIGHT[1], 62.9), "-|>")
    middle = (LEFT[0] + RIGHT[1]) / 2
    axes.text(
        middle, 62.9, " pipeline parallelism: stages ", ha="center", va="center", color=INK, backgroundcolor="white"
    )
    for stage, (left, right) in enumerate(zip(LEFT, RIGHT, strict=True)):
        x = (left + right) / 2
        axes.text(x, 60.4, f"stage {stage}", ha="center", va="center", color=STAGES[stage][1], weight="bold")
        _span(axes, left + 1, right - 1, 37.4, "tensor parallelism: a team")
    for index, (stage, devices) in enumerate(REPLICAS):
        height = HIGH - LOW if stage else (HIGH - LOW - 0.6) / 2
        low = HIGH - height if index == 0 else LOW
        _draw_team(axes, low, height, stage, devices, 0 if stage else index)
        if stage == 0:
            _arrow(axes, (19.2, low + height / 2), (LEFT[0] - 0.6, low + height / 2), "-|>")
            end = (LOW + HIGH) / 2 + (1.6 if index == 0 else -1.6)
            _arrow(axes, (RIGHT[0] + 0.6, low + height / 2), (LEFT[1] - 0.6, end), "<|-|>")


def _draw_micro_batches(axes: Axes) -> None:
    """Draw the micro-batches behind each other, the first one with its samples."""
    colours = ("#dfe3e8", "#d1d6de", "#c3cad4", "#b5bdc9")
    for index in reversed(range(MICRO_BATCHES)):
        shift = index * 0.9
        axes.add_patch(
            Rectangle((4.4 + shift, LOW + shift), 11, HIGH - LOW, facecolor=colours[index], edgecolor="white", lw=1.3)
        )
    for sample in range(SAMPLES):
        y = HIGH - (sample + 0.5) * (HIGH - LOW) / SAMPLES
        axes.text(9.9, y, f"sample {sample}", ha="center", va="center", color=INK, size=9.5)
        if sample:
            axes.plot([4.4, 15.4], [y + (HIGH - LOW) / SAMPLES / 2] * 2, color="white", lw=1.3)
    axes.text(11.3, HIGH + 3.2, "a mini-batch:\n4 micro-batches", ha="center", va="bottom", color=QUIET, size=9.5)
    _arrow(axes, (1.0, HIGH + 3.4), (1.0, LOW - 3.4), "-|>")
    words = " data parallelism: replicas "
    axes.text(1.0, (LOW + HIGH) / 2, words, rotation=90, ha="center", va="center", color=INK, backgroundcolor="white")


def _draw_team(axes: Axes, low: float, height: float, stage: int, devices: tuple[int, ...], replica: int) -> None:
    """Draw the devices that run a replica of a stage."""
    (fill, edge), left, right = STAGES[stage], LEFT[stage], RIGHT[stage]
    _box(axes, left, low, right - left, height, "white", edge, "--")
    rows = "samples 0 to 3" if stage else f"samples {2 * replica} and {2 * replica + 1}"
    text = f"replica {replica} of stage {stage}: {rows}"
    axes.text((left + right) / 2, low + height - 1.5, text, ha="center", va="center", color=INK, size=9.5)
    width = (right - left - 1.2) / len(devices)
    for part, device in enumerate(devices):
        x = left + 1.2 + part * width
        _box(axes, x, low + 0.9, width - 1.2, height - 3.7, fill, edge)
        middle, role = x + width / 2 - 0.6, "half of every layer" if stage == 0 else "a quarter\nof every\nlayer"
        y = low + height - (7.5 if stage else 4.7)
        axes.text(middle, y, f"GPU {device}", ha="center", va="center", color=INK, weight="bold")
        axes.text(middle, y - 1.6, role, ha="center", va="top", color=INK, size=9.5)


def _draw_step(axes: Axes) -> None:
    """Draw one step, with a row for the devices of every replica."""
    _title(axes, 32.6, 3, "One step in time: the schedule orders forwards and backwards of the micro-batches.")
    times = _times()
    end = max(stop for stage in times for _, stop in stage.values())
    x, scale = 11.0, 107 / end
    for row, (stage, devices) in enumerate(REPLICAS):
        y, others = 22.0 - row * 5.6 - stage * 1.2, "\u2013" if stage else ", "
        name = f"GPU {devices[0]}{others}{devices[-1]}"
        axes.text(x - 1.4, y + 2.3, name, ha="right", va="center", color=INK, size=10.5)
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
        axes.add_patch(Rectangle((x + left, 28.3), 1.8, 1.5, facecolor=colour, edgecolor="none"))
        axes.text(x + left + 2.6, 29.05, text, va="center", color=INK, size=9.5)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
