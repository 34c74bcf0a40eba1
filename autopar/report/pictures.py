"""Pictures of timelines: what ranks do when, as predicted, as measured, or one over the other.

A timeline has a row for ranks that are alike, computation above, messages in thin strips below; of a rank with several
stages, the later ones are lighter. What all rows repeat is a gap of the time axis (:mod:`autopar.report.folding`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from autopar.formats.program import (
    BACKWARDS,
    FORWARD,
    RECEIVES,
    SENDS,
    UPDATE,
    UPDATES,
    WORDS,
)
from autopar.formats.timeline import Event, Timeline, sending_of, time_use, track_of
from autopar.report.folding import MOST_ROWS, Alike, TimeAxis, alike_ranks, evenly, left_out, ranges
from autopar.report.style import (
    COLOURS,
    FAINT,
    GREY,
    INK,
    LANE,
    LETTER,
    POINTS,
    byte_unit,
    colour_of,
    ink_on,
    legend_above,
    shade,
    strip,
)
from autopar.report.table import Part, Table, duration, fill, percentage, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_SPENT = ((FORWARD,), BACKWARDS, UPDATES)
"""Kinds whose times make a column of the table."""
_STRIPS = ("send", "receive", "reduce")

# Heights in units of one timeline's row: the lane of computation, then three strips, then air.
_COMPUTE, _STRIP, _GAP = 0.66, 0.07, 0.02
_LANE_HEIGHT = _COMPUTE + len(_STRIPS) * (_STRIP + _GAP)
_GROUP_AIR = 0.3
_OVER = 0.03
_LEGIBLE = 5.0  # points
_LEAST_WIDTH = 1.2  # points
_LEAST_EDGED = 3.0  # points
_DIGIT = 0.64  # width of a digit over the font's size
_TITLE_INCHES, _LETTER_INCHES = 0.5, 0.075
_MEMORY_INCHES = 1.6
_MOST_LINES = 5
"""Of memory, in colours of their own."""
_MOST_NUMBERS = 1500
"""Micro-batches' numbers in blocks; to draw more takes seconds."""


class _RankRow(NamedTuple):
    """One timeline's events of a rank that stands for those alike, and where they are drawn."""

    group: Alike
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
    time: TimeAxis
    points_per_s: float
    points_per_row: float


Head = Callable[[TimeAxis, "Axes"], None]
"""Draws what stands above a timeline."""


def draw_timeline(
    timeline: Timeline, head: Head | None = None, head_inches: float = 0.0, *, messages: bool = False
) -> Figure:
    """Return a picture of one timeline, with what ``head`` draws above it, in so many inches.

    ``messages`` are drawn as arrows, from where a rank begins to send to where another has received.
    """
    kind = "Predicted" if timeline.origin == "simulated" else timeline.origin.capitalize()
    bubble = f"{timeline.bubble():.0%} of the ranks' time is bubble"
    title = f"{kind} {extent(timeline)}: {_milliseconds(timeline.end_s)} ms, {bubble}"
    if head is None and timeline.memory:
        head, head_inches = partial(_draw_memory, timeline), _MEMORY_INCHES
    groups = alike_ranks(timeline)
    sheet, rows = _draw_rows([timeline], [""], groups, title, head, head_inches)
    if messages:
        _draw_messages(sheet, rows, timeline, groups)
    return sheet.figure


def extent(timeline: Timeline) -> str:
    """Return what a timeline is of, in words: a step, or mini-batches that follow each other without flushes."""
    updates = Counter(event.rank for event in timeline if event.action.kind == UPDATE)
    most = max(updates.values(), default=0)
    return f"{most} mini-batches from fill to drain" if most > 1 else "step"


def draw_over(measured_timeline: Timeline, predicted_timeline: Timeline) -> Figure:
    """Return a picture with every rank's measured row directly over its predicted row, on one time axis."""
    kind = measured_timeline.origin
    measured_ms, predicted_ms = _milliseconds(measured_timeline.end_s), _milliseconds(predicted_timeline.end_s)
    title = f"{kind.capitalize()} {extent(measured_timeline)}: {measured_ms} ms, predicted: {predicted_ms} ms"
    if measured_timeline.end_s > 0:
        title += f" ({predicted_timeline.end_s / measured_timeline.end_s - 1:+.1%})"
    head = partial(_draw_memory, measured_timeline) if measured_timeline.memory else None
    both = [measured_timeline, predicted_timeline]
    sheet, _ = _draw_rows(both, [kind, "predicted"], alike_ranks(*both), title, head, _MEMORY_INCHES)
    return sheet.figure


def _draw_memory(timeline: Timeline, time: TimeAxis, axes: Axes) -> None:
    """Draw what ranks hold over the step, those that hold most in colours, and the least that a device has."""
    peaks = timeline.peaks_bytes()
    most = max(peaks.values())
    unit, name = byte_unit(most)
    groups = [each for each in alike_ranks(timeline) if each.members[0] in timeline.memory]
    fullest = sorted(groups, key=lambda each: -peaks[each.members[0]])[:_MOST_LINES]
    for group in sorted(groups, key=fullest.__contains__):
        moments = [(at, held) for at, held in timeline.memory[group.members[0]] if time.shows(at)]
        times, sizes = zip(*moments, (time.end_s, moments[-1][1]), strict=True)
        times_ms, heights = [time.place(each) * 1e3 for each in times], [each / unit for each in sizes]
        colour = colour_of(groups.index(group)) if group in fullest else FAINT
        label = group.name() if group in fullest else None
        axes.step(times_ms, heights, where="post", linewidth=1.2, color=colour, label=label)
    limit = min(timeline.limits_bytes.values(), default=None)
    near = limit is not None and limit < 3 * most
    if limit is not None and near:
        axes.axhline(limit / unit, color=INK, linestyle="--", linewidth=1.0, label="limit")
    axes.set_xlim(0, _span_s(time.length_s) * 1e3)
    axes.set_ylim(0, 1.15 * max(most, limit if limit is not None and near else 0) / unit)
    axes.set_ylabel(f"held, {name}", size=9, color=INK)
    strip(axes, "y")
    mark_gaps(axes, time)
    axes.tick_params(labelbottom=False, length=0)
    legend_above(axes, _MOST_LINES + 1)


def _span_s(length_s: float) -> float:
    return length_s * 1.02 or 1.0


def render(timeline: Timeline) -> Iterator[Part]:
    """Yield what every rank does with the step, or with what it is a timeline of."""
    columns = (">rank", ">stage", ">forward", ">backward", ">update", ">reduce", ">waiting", ">transfer", ">idle")
    table = Table(f"{timeline.origin.capitalize()} {extent(timeline)}: {duration(timeline.end_s)}", columns)
    rows = []
    every = _rows([timeline], [""], [Alike((rank,)) for rank in range(timeline.rank_count())])
    for row, where in zip(every, time_use(timeline), strict=True):
        computed = [sum(e.end_s - e.start_s for e in row.events if e.action.kind in kinds) for kinds in _SPENT]
        blocked = where.reduce_s, where.waiting_s, where.transfer_s, where.loading_s + where.idle_s
        times = [duration(seconds) for seconds in (*computed, *blocked)]
        rows.append((str(row.group.members[0]), ", ".join(map(str, _stages(row.events))), *times))
    fill(table, rows)
    yield table
    yield f"bubble: {percentage(timeline.bubble())} of the ranks' time"
    peaks = timeline.peaks_bytes()
    if peaks:
        rank = max(peaks, key=lambda each: (peaks[each], -each))
        limit = timeline.limits_bytes.get(rank)
        of = "" if limit is None else f" of {size(limit)}"
        yield f"most memory: rank {rank} holds {size(peaks[rank])}{of}"


def _rows(timelines: Sequence[Timeline], labels: Sequence[str], groups: Sequence[Alike]) -> list[_RankRow]:
    """Lay the timelines' rows out group by group, from top to bottom."""
    events: list[dict[int, list[Event]]] = [{group.members[0]: [] for group in groups} for _ in timelines]
    for own, timeline in zip(events, timelines, strict=True):
        for event in timeline:
            if event.rank in own:
                own[event.rank].append(event)
    pitch = len(timelines) + _GROUP_AIR
    return [
        _RankRow(group, label, at * pitch + index, events[index][group.members[0]], timelines[index].end_s)
        for at, group in enumerate(groups)
        for index, label in enumerate(labels)
    ]


def _draw_rows(
    timelines: Sequence[Timeline],
    labels: Sequence[str],
    groups: Sequence[Alike],
    title: str,
    head: Head | None,
    head_inches: float,
) -> tuple[_Sheet, list[_RankRow]]:
    """Draw a row for every group of ranks, or for some of many."""
    drawn = [groups[at] for at in evenly(len(groups), MOST_ROWS // len(timelines))]
    if len(drawn) < len(groups):
        title += f"; {len(drawn)} of {len(groups):,} unlike ranks are drawn"
    rows = _rows(timelines, labels, drawn)
    end_s = max(timeline.end_s for timeline in timelines)
    time = TimeAxis(end_s, left_out([row.events for row in rows], end_s))
    sheet = _sheet(rows, time, head, head_inches)
    _draw_blocks(sheet, rows, title)
    return sheet, rows


def _sheet(rows: Sequence[_RankRow], time: TimeAxis, head: Head | None, head_inches: float) -> _Sheet:
    from matplotlib.figure import Figure

    computed = (sum(track_of(e.action.kind) == "compute" and time.shows(e.start_s) for e in row.events) for row in rows)
    width = min(12.0 + max(0, max(computed, default=0) - 64) * 0.06, 20.0)
    height = rows[-1].top + 1 if rows else 1.0
    row_inches = min(max(7.0 / max(len(rows), 1), 0.36), 0.8)
    longest = max((len(line) for row in rows for line in _label(row.group, row.events)), default=0)
    left = max(0.8, 0.2 + _LETTER_INCHES * longest) + (0.7 if any(row.label for row in rows) else 0.0)
    right, above, below = 0.3, 0.5, 0.85
    inches = height * row_inches
    above += 0.0 if head is None else head_inches + _TITLE_INCHES
    total = inches + above + below
    figure = Figure(figsize=(width, total), dpi=150)
    plot = (width - left - right) / width
    axes = figure.add_axes((left / width, below / total, plot, inches / total))
    span_s = _span_s(time.length_s)
    if head is not None:
        top = 1 - (head_inches + _TITLE_INCHES) / total
        head(time, figure.add_axes((left / width, top, plot, head_inches / total)))
    axes.set_xlim(0, span_s * 1e3)
    axes.set_ylim(height - (1 - _LANE_HEIGHT) / 2, -(1 - _LANE_HEIGHT) / 2)
    return _Sheet(figure, axes, time, (width - left - right) * POINTS / span_s, row_inches * POINTS)


def _draw_blocks(sheet: _Sheet, rows: Sequence[_RankRow], title: str) -> None:
    from matplotlib.patches import Patch

    events = (event for row in rows for event in row.events if sheet.time.shows(event.start_s))
    blocks = sum(event.action.kind in (FORWARD, *BACKWARDS) for event in events)
    for row in rows:
        _draw_row(sheet, row, numbered=blocks <= _MOST_NUMBERS)
    axes = sheet.axes
    axes.set_title(title, loc="left", size=11, color=INK, pad=10)
    axes.set_xlabel("time since the step began (ms)", color=INK, size=9)
    strip(axes, "x")
    mark_gaps(axes, sheet.time)
    _say_gaps(sheet, rows)
    _label_rows(sheet, rows)
    kinds = {event.action.kind for row in rows for event in row.events}
    present = kinds | {track_of(kind) for kind in kinds}
    handles = [Patch(color=colour, label=WORDS.get(key, key)) for key, colour in COLOURS.items() if key in present]
    sheet.figure.legend(
        handles=handles, loc="lower center", ncols=len(handles) or 1, frameon=False, fontsize=9, handlelength=1.2
    )


def _draw_row(sheet: _Sheet, row: _RankRow, *, numbered: bool) -> None:
    end_ms = sheet.axes.get_xlim()[1]
    sheet.axes.broken_barh([(0, end_ms)], (row.top, _LANE_HEIGHT), facecolors=LANE, zorder=0)
    stages = _stages(row.events)
    for kind in (each for each in COLOURS if each not in _STRIPS):
        for chunk, stage in enumerate(stages):
            blocks = [event for event in row.events if event.action.kind == kind and event.action.stage == stage]
            colour = shade(COLOURS[kind], chunk / len(stages))
            _bars(sheet, blocks, row.top, _COMPUTE, colour, edge="white")
            if numbered and kind in (FORWARD, *BACKWARDS):
                _numbers(sheet, blocks, row.top, ink_on(colour))
    for index, track in enumerate(_STRIPS):
        strip = [event for event in row.events if track_of(event.action.kind) == track]
        top = row.top + _COMPUTE + _GAP + index * (_STRIP + _GAP)
        _bars(sheet, strip, top, _STRIP, COLOURS[track])
    end = sheet.time.place(row.end_s) * 1e3
    sheet.axes.plot([end, end], [row.top - _OVER, row.top + _LANE_HEIGHT + _OVER], color=INK, linewidth=1.4, zorder=4)


def _bars(sheet: _Sheet, events: list[Event], top: float, height: float, colour: str, edge: str = "none") -> None:
    # A message may take less than a pixel, and would then be drawn or not by chance.
    least_s = 0.0 if edge != "none" else _LEAST_WIDTH / sheet.points_per_s
    pieces = [piece for event in events for piece in sheet.time.pieces(event.start_s, event.end_s)]
    spans = [(start_s * 1e3, max(end_s - start_s, least_s) * 1e3) for start_s, end_s in pieces]
    # Edges part neighbours, but must not swallow blocks that are only a few points wide.
    narrowest = min((event.end_s - event.start_s for event in events), default=0.0) * sheet.points_per_s
    line = min(0.8, narrowest / 8) if narrowest > _LEAST_EDGED else 0.0
    sheet.axes.broken_barh(
        spans, (top, height), facecolors=colour, edgecolors=edge if line else "none", linewidth=line, zorder=2
    )


def _numbers(sheet: _Sheet, events: list[Event], top: float, colour: str) -> None:
    """Write micro-batch numbers into the blocks of a row, all in one size; leave them out where none is legible."""
    whole = [event for event in events if sheet.time.shows(event.start_s) and sheet.time.shows(event.end_s)]
    texts = [str(event.action.micro_batch) for event in whole]
    widths = sorted((event.end_s - event.start_s) * sheet.points_per_s for event in whole)
    if not widths:
        return
    fitting = widths[len(widths) // 10] / (_DIGIT * (max(map(len, texts)) + 0.5))
    size = min(9.0, 0.6 * _COMPUTE * sheet.points_per_row, fitting)
    if size < _LEGIBLE:
        return
    for text, event in zip(texts, whole, strict=True):
        middle = sheet.time.place((event.start_s + event.end_s) / 2) * 1e3
        at = (middle, top + _COMPUTE / 2)
        sheet.axes.text(*at, text, size=size, color=colour, ha="center", va="center_baseline", zorder=3)


def _say_gaps(sheet: _Sheet, rows: Sequence[_RankRow]) -> None:
    """Say how many micro-batches are left out."""
    for start_s, end_s in sheet.time.gaps:
        text = f"{max(_computation_count(row, start_s, end_s) for row in rows):,} more"
        letters = min(9.0, sheet.points_per_row * (rows[-1].top + 1) / LETTER / len(text))
        middle = sum(sheet.time.place(moment) * 500 for moment in (start_s, end_s)), (rows[-1].top + _LANE_HEIGHT) / 2
        sheet.axes.text(*middle, text, size=letters, color=INK, rotation=90, ha="center", va="center", zorder=6)


def mark_gaps(axes: Axes, time: TimeAxis) -> None:
    """Draw the gaps of an axis of time in milliseconds, and name moments on either side."""
    from matplotlib.ticker import MaxNLocator

    ticks = []
    for start_s, end_s in time.windows if time.gaps else ():
        air_s = 0.02 * time.length_s
        values = MaxNLocator(max(1, round(8 * (end_s - start_s) / time.length_s))).tick_values(
            start_s * 1e3, end_s * 1e3
        )
        ticks += [each for each in values if start_s + air_s * (start_s > 0) <= each / 1e3 <= end_s - air_s]
    for gap in time.gaps:
        edges = [time.place(moment) * 1e3 for moment in gap]
        axes.axvspan(*edges, facecolor="white", edgecolor=GREY, linewidth=0.8, linestyle=":", zorder=5)
        axes.set_xticks([time.place(each / 1e3) * 1e3 for each in ticks], [f"{each:,.6g}" for each in ticks])


def _computation_count(row: _RankRow, start_s: float, end_s: float) -> int:
    """Return how many forwards or backwards a row begins in some time, of which there are more."""
    kinds = [event.action.kind for event in row.events if start_s <= event.start_s < end_s]
    return max(map(kinds.count, (FORWARD, *BACKWARDS)))


def _draw_messages(sheet: _Sheet, rows: Sequence[_RankRow], timeline: Timeline, groups: Sequence[Alike]) -> None:
    """Draw an arrow for every message that a drawn rank receives from one whose like is drawn in another row."""
    first = {rank: group.members[0] for group in groups for rank in group.members}
    tops = {row.group.members[0]: row.top for row in rows}
    begun = {(event.rank, event.action): event.start_s for event in timeline if event.action.kind in SENDS}
    arrows: list[tuple[float, float, float, float]] = []
    for row in rows:
        for event in (each for each in row.events if each.action.kind in RECEIVES):
            sender, sent = sending_of(event)
            top, start_s = tops.get(first[sender], row.top), begun.get((sender, sent), event.start_s)
            if top != row.top and sheet.time.shows(start_s) and sheet.time.shows(event.end_s):
                above, below = (_LANE_HEIGHT, 0.0) if top < row.top else (0.0, _LANE_HEIGHT)
                begin, end = (sheet.time.place(at) * 1e3 for at in (start_s, event.end_s))
                arrows.append((begin, top + above, end - begin, row.top + below - top - above))
    if arrows:
        sheet.axes.quiver(
            *map(list, zip(*arrows, strict=True)),
            angles="xy",
            scale_units="xy",
            scale=1,
            color=INK,
            width=0.0012,
            headwidth=5,
            headlength=6,
            headaxislength=6,
            zorder=5,
        )


def _label_rows(sheet: _Sheet, rows: Sequence[_RankRow]) -> None:
    sheet.axes.set_yticks([])
    size = min(9.0, 0.34 * sheet.points_per_row)
    for row in rows:
        _margin(sheet, -8, row.top + _COMPUTE / 2, row.label, size)
    pairs = max(1, len({row.label for row in rows}))
    for index in range(0, len(rows), pairs):
        beside = rows[index : index + pairs]
        middle = (beside[0].top + beside[-1].top + _COMPUTE) / 2
        text = "\n".join(_label(beside[0].group, [event for row in beside for event in row.events]))
        _margin(sheet, -64 if beside[0].label else -8, middle, text, size)


def _label(group: Alike, events: Sequence[Event]) -> tuple[str, str]:
    """Return the lines that name a row."""
    return group.name(), f"stage {ranges(_stages(events))}"


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
        color=INK,
        annotation_clip=False,
    )


def _stages(events: Sequence[Event]) -> list[int]:
    return sorted({event.action.stage for event in events})


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"
