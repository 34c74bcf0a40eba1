"""Gantt pictures of timelines: one row per rank, computation above, messages in thin strips below.

Of a rank with several stages, the later ones are lighter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from autopar.formats.program import BACKWARD, BACKWARDS, FORWARD, INPUT_BACKWARD, UPDATE, WEIGHT_BACKWARD
from autopar.formats.spent import spent
from autopar.formats.timeline import Event, Timeline, track_of
from autopar.report.quantity import duration, percentage
from autopar.report.table import Table, fill, say

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console


_INK = "#2b2f36"
_FAINT = "#d9dce1"
_LANE = "#f4f5f7"
_COLOURS = {
    FORWARD: "#4f86c6",
    BACKWARD: "#f0a63c",
    INPUT_BACKWARD: "#e5803f",
    WEIGHT_BACKWARD: "#c8b24a",
    UPDATE: "#8b93a1",
    "send": "#3a9d7c",
    "receive": "#9a6fb8",
    "reduce": "#d1495b",
}
_NAMES = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUT_BACKWARD: "backward, input half",
    WEIGHT_BACKWARD: "backward, weight half",
    UPDATE: "update",
}
_SPENT = ((FORWARD,), BACKWARDS, (UPDATE,))
"""Kinds whose times make a column of the table."""
_STRIPS = ("send", "receive", "reduce")

# Heights in units of one timeline's row: the lane of computation, then three strips, then air.
_COMPUTE, _STRIP, _GAP = 0.66, 0.07, 0.02
_LANE_HEIGHT = _COMPUTE + len(_STRIPS) * (_STRIP + _GAP)
_GROUP_AIR = 0.3
_OVER = 0.03
_LEGIBLE = 5.0  # points
_LEAST_WIDTH = 1.2  # points
_DIGIT = 0.64  # width of a digit over the font's size
_POINTS = 72
_TITLE_INCHES, _LETTER_INCHES = 0.4, 0.075
_MOST_INCHES = 100.0
"""Of all rows together: rows of a thousand ranks are only as high as this leaves."""


class _Row(NamedTuple):
    """One timeline's events of one rank, and where they are drawn."""

    rank: int
    label: str
    top: float
    events: list[Event]
    end_s: float
    """When the whole timeline ends: the step time."""


@dataclass(frozen=True)
class _Sheet:
    """A figure's measures: points per unit of each axis decide whether a number fits in its block."""

    figure: Figure
    axes: Axes
    points_per_s: float
    points_per_row: float


def draw(timeline: Timeline, head: Callable[[Axes], None] | None = None, head_inches: float = 0.0) -> Figure:
    """Return a picture of one timeline, with what ``head`` draws above it, in so many inches."""
    rows = _rows([timeline], [""])
    sheet = _sheet(rows, timeline.end_s, head, head_inches)
    for row in rows:
        _draw_row(sheet, row)
    kind = "Predicted" if timeline.origin == "simulated" else "Measured"
    bubble = f"{timeline.bubble():.0%} of the ranks' time is bubble"
    return _finish(sheet, rows, f"{kind} step: {_milliseconds(timeline.end_s)} ms, {bubble}")


def draw_over(measured: Timeline, predicted: Timeline) -> Figure:
    """Return a picture with every rank's measured row directly over its predicted row, on one time axis."""
    rows = _rows([measured, predicted], ["measured", "predicted"])
    sheet = _sheet(rows, max(measured.end_s, predicted.end_s))
    for row in rows:
        _draw_row(sheet, row)
    title = f"Measured step: {_milliseconds(measured.end_s)} ms, predicted: {_milliseconds(predicted.end_s)} ms"
    if measured.end_s > 0:
        title += f" ({predicted.end_s / measured.end_s - 1:+.1%})"
    return _finish(sheet, rows, title)


def render(timeline: Timeline, console: Console) -> None:
    """Print what every rank does with the step."""
    columns = (">rank", ">stage", ">forward", ">backward", ">update", ">reduce", ">waiting", ">transfer", ">idle")
    table = Table(f"{timeline.origin.capitalize()} step: {duration(timeline.end_s)}", columns)
    rows = []
    for row, where in zip(_rows([timeline], [""]), spent(timeline), strict=True):
        computed = [sum(e.end_s - e.start_s for e in row.events if e.action.kind in kinds) for kinds in _SPENT]
        blocked = where.reduce_s, where.waiting_s, where.transfer_s, where.idle_s
        times = [duration(seconds) for seconds in (*computed, *blocked)]
        rows.append((str(row.rank), _listed(row.events), *times))
    fill(table, rows)
    console.print(table)
    say(console, f"bubble: {percentage(timeline.bubble())} of the ranks' time")


def _rows(timelines: list[Timeline], labels: list[str]) -> list[_Row]:
    """Lay the timelines' rows out rank by rank, from top to bottom."""
    ranks = max(timeline.rank_count() for timeline in timelines)
    events: list[list[list[Event]]] = [[[] for _ in range(ranks)] for _ in timelines]
    for index, timeline in enumerate(timelines):
        for event in timeline:
            events[index][event.rank].append(event)
    pitch = len(timelines) + _GROUP_AIR
    ends_s = [timeline.end_s for timeline in timelines]
    return [
        _Row(rank, label, rank * pitch + index, events[index][rank], ends_s[index])
        for rank in range(ranks)
        for index, label in enumerate(labels)
    ]


def _sheet(
    rows: list[_Row], end_s: float, head: Callable[[Axes], None] | None = None, head_inches: float = 0.0
) -> _Sheet:
    from matplotlib.figure import Figure

    busiest = max((sum(track_of(event.action.kind) == "compute" for event in row.events) for row in rows), default=0)
    width = min(12.0 + max(0, busiest - 64) * 0.06, 20.0)
    height = rows[-1].top + 1 if rows else 1.0
    row_inches = min(max(7.0 / max(len(rows), 1), 0.36), 0.8, _MOST_INCHES / height)
    longest = max((len(f"stage {_listed(row.events)}") for row in rows), default=0)
    left = max(0.8, 0.1 + _LETTER_INCHES * longest) + (0.7 if any(row.label for row in rows) else 0.0)
    right, above, below = 0.3, 0.5, 0.85
    inches = height * row_inches
    above += 0.0 if head is None else head_inches + _TITLE_INCHES
    total = inches + above + below
    figure = Figure(figsize=(width, total), dpi=150)
    plot = (width - left - right) / width
    axes = figure.add_axes((left / width, below / total, plot, inches / total))
    span_s = end_s * 1.02 or 1.0
    if head is not None:
        head(figure.add_axes((left / width, 1 - (head_inches + _TITLE_INCHES) / total, plot, head_inches / total)))
    axes.set_xlim(0, span_s * 1e3)
    axes.set_ylim(height - (1 - _LANE_HEIGHT) / 2, -(1 - _LANE_HEIGHT) / 2)
    return _Sheet(figure, axes, (width - left - right) * _POINTS / span_s, row_inches * _POINTS)


def _draw_row(sheet: _Sheet, row: _Row) -> None:
    end_ms = sheet.axes.get_xlim()[1]
    sheet.axes.broken_barh([(0, end_ms)], (row.top, _LANE_HEIGHT), facecolors=_LANE, zorder=0)
    stages = _stages(row.events)
    for kind in _NAMES:
        for chunk, stage in enumerate(stages):
            blocks = [event for event in row.events if event.action.kind == kind and event.action.stage == stage]
            _bars(sheet, blocks, row.top, _COMPUTE, _shade(_COLOURS[kind], chunk / len(stages)), edge="white")
            if kind != UPDATE:
                _numbers(sheet, blocks, row.top, "white" if kind == FORWARD and chunk == 0 else _INK)
    for index, track in enumerate(_STRIPS):
        strip = [event for event in row.events if track_of(event.action.kind) == track]
        top = row.top + _COMPUTE + _GAP + index * (_STRIP + _GAP)
        _bars(sheet, strip, top, _STRIP, _COLOURS[track])
    end = row.end_s * 1e3
    sheet.axes.plot([end, end], [row.top - _OVER, row.top + _LANE_HEIGHT + _OVER], color=_INK, linewidth=1.4, zorder=4)


def _shade(colour: str, share: float) -> str:
    """Return a colour that is lightened by a share: the later of a rank's stages are lighter.

    >>> _shade("#4f86c6", 0.0), _shade("#4f86c6", 0.5)
    ('#4f86c6', '#a7c2e2')
    """
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{int(part + (255 - part) * share):02x}" for part in parts)


def _bars(sheet: _Sheet, events: list[Event], top: float, height: float, colour: str, edge: str = "none") -> None:
    # A message may take less than a pixel, and would then be drawn or not by chance.
    least_s = 0.0 if edge != "none" else _LEAST_WIDTH / sheet.points_per_s
    spans = [(event.start_s * 1e3, max(event.end_s - event.start_s, least_s) * 1e3) for event in events]
    # Edges part neighbours, but must not swallow blocks that are only a few points wide.
    narrowest = min((event.end_s - event.start_s for event in events), default=0.0) * sheet.points_per_s
    line = min(0.8, narrowest / 8)
    sheet.axes.broken_barh(spans, (top, height), facecolors=colour, edgecolors=edge, linewidth=line, zorder=2)


def _numbers(sheet: _Sheet, events: list[Event], top: float, colour: str) -> None:
    """Write micro-batch numbers into the blocks of a row, all in one size; leave them out where none is legible."""
    texts = [str(event.action.micro_batch) for event in events]
    widths = sorted((event.end_s - event.start_s) * sheet.points_per_s for event in events)
    if not widths:
        return
    fitting = widths[len(widths) // 10] / (_DIGIT * (max(map(len, texts)) + 0.5))
    size = min(9.0, 0.6 * _COMPUTE * sheet.points_per_row, fitting)
    if size < _LEGIBLE:
        return
    for text, event in zip(texts, events, strict=True):
        middle = (event.start_s + event.end_s) / 2 * 1e3
        at = (middle, top + _COMPUTE / 2)
        sheet.axes.text(*at, text, size=size, color=colour, ha="center", va="center_baseline", zorder=3)


def _finish(sheet: _Sheet, rows: list[_Row], title: str) -> Figure:
    from matplotlib.patches import Patch

    axes = sheet.axes
    axes.set_title(title, loc="left", size=11, color=_INK, pad=10)
    axes.set_xlabel("time since the step began (ms)", color=_INK, size=9)
    axes.tick_params(axis="x", colors=_INK, labelsize=8)
    axes.grid(axis="x", color=_FAINT, linewidth=0.6, zorder=1)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_FAINT)
    _label_rows(sheet, rows)
    handles = [Patch(color=_COLOURS[key], label=_NAMES.get(key, key)) for key in _drawn(rows)]
    sheet.figure.legend(
        handles=handles, loc="lower center", ncols=len(handles) or 1, frameon=False, fontsize=9, handlelength=1.2
    )
    return sheet.figure


def _label_rows(sheet: _Sheet, rows: list[_Row]) -> None:
    sheet.axes.set_yticks([])
    size = min(9.0, 0.34 * sheet.points_per_row)
    for row in rows:
        _margin(sheet, -8, row.top + _COMPUTE / 2, row.label, size)
    pairs = max(1, len({row.label for row in rows}))
    for index in range(0, len(rows), pairs):
        group = rows[index : index + pairs]
        stages = _listed([event for row in group for event in row.events])
        middle = (group[0].top + group[-1].top + _COMPUTE) / 2
        _margin(sheet, -64 if group[0].label else -8, middle, f"rank {group[0].rank}\nstage {stages}", size)


def _margin(sheet: _Sheet, offset: float, middle: float, text: str, size: float) -> None:
    sheet.axes.annotate(
        text,
        xy=(0, middle),
        xycoords=("axes fraction", "data"),
        xytext=(offset, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        size=size,
        color=_INK,
        annotation_clip=False,
    )


def _drawn(rows: Iterable[_Row]) -> list[str]:
    kinds = {event.action.kind for row in rows for event in row.events}
    present = kinds | {track_of(kind) for kind in kinds}
    return [key for key in _COLOURS if key in present]


def _stages(events: list[Event]) -> list[int]:
    return sorted({event.action.stage for event in events})


def _listed(events: list[Event]) -> str:
    return ", ".join(map(str, _stages(events)))


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"
