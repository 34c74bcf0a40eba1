"""Pictures of timelines, clusters, and plans on them.

A timeline has one row per rank, computation above, messages in thin strips below; of a rank with several stages, the
later ones are lighter. A cluster: its devices, with the stages of a plan, above the step that is predicted of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from autopar.formats.program import (
    BACKWARDS,
    BEGIN_SUM,
    CORRECT,
    FORWARD,
    PREDICT,
    UPDATE,
    WORDS,
)
from autopar.formats.timeline import Event, Timeline, time_use, track_of
from autopar.report.style import COLOURS, FAINT, INK, byte_unit, strip
from autopar.report.table import Part, Table, duration, fill, percentage, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from autopar.formats.cluster import Cluster
    from autopar.formats.plan import Plan, Stage


_LANE = "#f4f5f7"
_SPENT = ((FORWARD,), BACKWARDS, (UPDATE, PREDICT, CORRECT, BEGIN_SUM))
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
_MEMORY_INCHES = 1.6
_NAMED_RANKS = 8
_MOST_INCHES = 100.0
"""Of all rows together: rows of a thousand ranks are only as high as this leaves."""


class _RankRow(NamedTuple):
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


def draw_timeline(timeline: Timeline, head: Callable[[Axes], None] | None = None, head_inches: float = 0.0) -> Figure:
    """Return a picture of one timeline, with what ``head`` draws above it, in so many inches."""
    kind = "Predicted" if timeline.origin == "simulated" else timeline.origin.capitalize()
    bubble = f"{timeline.bubble():.0%} of the ranks' time is bubble"
    rows, title = _rows([timeline], [""]), f"{kind} {extent(timeline)}: {_milliseconds(timeline.end_s)} ms, {bubble}"
    if head is None and timeline.memory:
        head, head_inches = partial(_draw_memory, timeline, timeline.end_s), _MEMORY_INCHES
    return _draw_rows(rows, _sheet(rows, timeline.end_s, head, head_inches), title)


def extent(timeline: Timeline) -> str:
    """Return what a timeline is of, in words: a step, or mini-batches that follow each other without flushes."""
    updates = Counter(event.rank for event in timeline if event.action.kind == UPDATE)
    most = max(updates.values(), default=0)
    return f"{most} mini-batches from fill to drain" if most > 1 else "step"


def draw_over(measured_timeline: Timeline, predicted_timeline: Timeline) -> Figure:
    """Return a picture with every rank's measured row directly over its predicted row, on one time axis."""
    kind = measured_timeline.origin
    rows = _rows([measured_timeline, predicted_timeline], [kind, "predicted"])
    measured_ms, predicted_ms = _milliseconds(measured_timeline.end_s), _milliseconds(predicted_timeline.end_s)
    title = f"{kind.capitalize()} {extent(measured_timeline)}: {measured_ms} ms, predicted: {predicted_ms} ms"
    if measured_timeline.end_s > 0:
        title += f" ({predicted_timeline.end_s / measured_timeline.end_s - 1:+.1%})"
    end_s = max(measured_timeline.end_s, predicted_timeline.end_s)
    if not measured_timeline.memory:
        return _draw_rows(rows, _sheet(rows, end_s), title)
    head = partial(_draw_memory, measured_timeline, end_s)
    return _draw_rows(rows, _sheet(rows, end_s, head, _MEMORY_INCHES), title)


def _draw_memory(timeline: Timeline, end_s: float, axes: Axes) -> None:
    """Draw what every rank holds over the step, and the least that a device has where that is near."""
    most = max(timeline.peaks_bytes().values())
    unit, name = byte_unit(most)
    ranks = len(timeline.memory)
    for at, (rank, moments) in enumerate(sorted(timeline.memory.items())):
        times, sizes = zip(*moments, (end_s, moments[-1][1]), strict=True)
        label = f"rank {rank}" if ranks <= _NAMED_RANKS else None
        colour = f"C{at}" if ranks <= _NAMED_RANKS else _shade(COLOURS[FORWARD], 0.7 * at / ranks)
        times_ms, heights = [each * 1e3 for each in times], [each / unit for each in sizes]
        axes.step(times_ms, heights, where="post", color=colour, label=label)
    limit = min(timeline.limits_bytes.values(), default=None)
    if limit is not None and limit < 3 * most:
        axes.axhline(limit / unit, color=INK, linestyle="--", linewidth=1.0)
        axes.annotate("limit", (0.0, limit / unit), xytext=(3, 2), textcoords="offset points", fontsize=8, color=INK)
    axes.set_xlim(0, _span_s(end_s) * 1e3)
    axes.set_ylim(0, 1.15 * max(most, limit if limit is not None and limit < 3 * most else 0) / unit)
    axes.set_ylabel(f"held, {name}")
    axes.tick_params(labelbottom=False)
    axes.spines[["top", "right"]].set_visible(False)
    if ranks <= _NAMED_RANKS:
        axes.legend(loc="upper right", ncols=ranks, fontsize=8, frameon=False)


def _span_s(end_s: float) -> float:
    return end_s * 1.02 or 1.0


def render(timeline: Timeline) -> Iterator[Part]:
    """Yield what every rank does with the step, or with what it is a timeline of."""
    columns = (">rank", ">stage", ">forward", ">backward", ">update", ">reduce", ">waiting", ">transfer", ">idle")
    table = Table(f"{timeline.origin.capitalize()} {extent(timeline)}: {duration(timeline.end_s)}", columns)
    rows = []
    for row, where in zip(_rows([timeline], [""]), time_use(timeline), strict=True):
        computed = [sum(e.end_s - e.start_s for e in row.events if e.action.kind in kinds) for kinds in _SPENT]
        blocked = where.reduce_s, where.waiting_s, where.transfer_s, where.loading_s + where.idle_s
        times = [duration(seconds) for seconds in (*computed, *blocked)]
        rows.append((str(row.rank), _stage_text(row.events), *times))
    fill(table, rows)
    yield table
    yield f"bubble: {percentage(timeline.bubble())} of the ranks' time"
    peaks = timeline.peaks_bytes()
    if peaks:
        rank = max(peaks, key=lambda each: (peaks[each], -each))
        limit = timeline.limits_bytes.get(rank)
        of = "" if limit is None else f" of {size(limit)}"
        yield f"most memory: rank {rank} holds {size(peaks[rank])}{of}"


def _rows(timelines: list[Timeline], labels: list[str]) -> list[_RankRow]:
    """Lay the timelines' rows out rank by rank, from top to bottom."""
    ranks = max(timeline.rank_count() for timeline in timelines)
    events: list[list[list[Event]]] = [[[] for _ in range(ranks)] for _ in timelines]
    for index, timeline in enumerate(timelines):
        for event in timeline:
            events[index][event.rank].append(event)
    pitch = len(timelines) + _GROUP_AIR
    ends_s = [timeline.end_s for timeline in timelines]
    return [
        _RankRow(rank, label, rank * pitch + index, events[index][rank], ends_s[index])
        for rank in range(ranks)
        for index, label in enumerate(labels)
    ]


def _sheet(
    rows: list[_RankRow], end_s: float, head: Callable[[Axes], None] | None = None, head_inches: float = 0.0
) -> _Sheet:
    from matplotlib.figure import Figure

    busiest = max((sum(track_of(event.action.kind) == "compute" for event in row.events) for row in rows), default=0)
    width = min(12.0 + max(0, busiest - 64) * 0.06, 20.0)
    height = rows[-1].top + 1 if rows else 1.0
    row_inches = min(max(7.0 / max(len(rows), 1), 0.36), 0.8, _MOST_INCHES / height)
    longest = max((len(f"stage {_stage_text(row.events)}") for row in rows), default=0)
    left = max(0.8, 0.1 + _LETTER_INCHES * longest) + (0.7 if any(row.label for row in rows) else 0.0)
    right, above, below = 0.3, 0.5, 0.85
    inches = height * row_inches
    above += 0.0 if head is None else head_inches + _TITLE_INCHES
    total = inches + above + below
    figure = Figure(figsize=(width, total), dpi=150)
    plot = (width - left - right) / width
    axes = figure.add_axes((left / width, below / total, plot, inches / total))
    span_s = _span_s(end_s)
    if head is not None:
        head(figure.add_axes((left / width, 1 - (head_inches + _TITLE_INCHES) / total, plot, head_inches / total)))
    axes.set_xlim(0, span_s * 1e3)
    axes.set_ylim(height - (1 - _LANE_HEIGHT) / 2, -(1 - _LANE_HEIGHT) / 2)
    return _Sheet(figure, axes, (width - left - right) * _POINTS / span_s, row_inches * _POINTS)


def _draw_row(sheet: _Sheet, row: _RankRow) -> None:
    end_ms = sheet.axes.get_xlim()[1]
    sheet.axes.broken_barh([(0, end_ms)], (row.top, _LANE_HEIGHT), facecolors=_LANE, zorder=0)
    stages = _stages(row.events)
    for kind in (each for each in COLOURS if each not in _STRIPS):
        for chunk, stage in enumerate(stages):
            blocks = [event for event in row.events if event.action.kind == kind and event.action.stage == stage]
            _bars(sheet, blocks, row.top, _COMPUTE, _shade(COLOURS[kind], chunk / len(stages)), edge="white")
            if kind in (FORWARD, *BACKWARDS):
                _numbers(sheet, blocks, row.top, "white" if kind == FORWARD and chunk == 0 else INK)
    for index, track in enumerate(_STRIPS):
        strip = [event for event in row.events if track_of(event.action.kind) == track]
        top = row.top + _COMPUTE + _GAP + index * (_STRIP + _GAP)
        _bars(sheet, strip, top, _STRIP, COLOURS[track])
    end = row.end_s * 1e3
    sheet.axes.plot([end, end], [row.top - _OVER, row.top + _LANE_HEIGHT + _OVER], color=INK, linewidth=1.4, zorder=4)


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


def _draw_rows(rows: list[_RankRow], sheet: _Sheet, title: str) -> Figure:
    from matplotlib.patches import Patch

    for row in rows:
        _draw_row(sheet, row)
    axes = sheet.axes
    axes.set_title(title, loc="left", size=11, color=INK, pad=10)
    axes.set_xlabel("time since the step began (ms)", color=INK, size=9)
    strip(axes, "x")
    _label_rows(sheet, rows)
    kinds = {event.action.kind for row in rows for event in row.events}
    present = kinds | {track_of(kind) for kind in kinds}
    handles = [Patch(color=colour, label=WORDS.get(key, key)) for key, colour in COLOURS.items() if key in present]
    sheet.figure.legend(
        handles=handles, loc="lower center", ncols=len(handles) or 1, frameon=False, fontsize=9, handlelength=1.2
    )
    return sheet.figure


def _label_rows(sheet: _Sheet, rows: list[_RankRow]) -> None:
    sheet.axes.set_yticks([])
    size = min(9.0, 0.34 * sheet.points_per_row)
    for row in rows:
        _margin(sheet, -8, row.top + _COMPUTE / 2, row.label, size)
    pairs = max(1, len({row.label for row in rows}))
    for index in range(0, len(rows), pairs):
        group = rows[index : index + pairs]
        stages = _stage_text([event for row in group for event in row.events])
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
        color=INK,
        annotation_clip=False,
    )


def _stages(events: list[Event]) -> list[int]:
    return sorted({event.action.stage for event in events})


def _stage_text(events: list[Event]) -> str:
    return ", ".join(map(str, _stages(events)))


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"


_LETTER, _LEAST_LETTERS = 0.58, 3.5
"""Width of a letter over the font's size, and points of the smallest that are read."""
_IN_A_ROW = 8
"""Nodes beside each other."""
_AIR = 0.7
"""Between nodes; devices are one apart."""
_INCHES, _MOST_WIDE, _MOST_HIGH = 0.5, 9.0, 4.0
"""Of a device, and of all of them."""
MOST_NUMBERED, MOST_ARROWS = 256, 32
"""Devices whose stages are written on them, and stages between which arrows are drawn."""


class _DeviceMap(NamedTuple):
    """Where devices are drawn."""

    at: dict[int, tuple[float, float]]
    boxes: dict[str, tuple[float, float, float, float]]
    """By the text below it, a node's left, top, width and height."""

    @property
    def width(self) -> float:
        """Of all nodes."""
        return max(left + width for left, _, width, _ in self.boxes.values()) + _AIR

    @property
    def height(self) -> float:
        """Of all nodes, with the texts below."""
        return max(top + height for _, top, _, height in self.boxes.values()) + _AIR

    @property
    def inches(self) -> float:
        """Of a device."""
        return min(_INCHES, _MOST_HIGH / self.height, _MOST_WIDE / self.width)


def draw_placement(plan: Plan, cluster: Cluster, timeline: Timeline) -> Figure:
    """Return a picture of a plan's stages on a cluster, and of the step that is predicted."""
    places = _places(cluster)
    head = partial(_draw_places, plan.stages, places)
    return draw_timeline(timeline, head, places.inches * places.height)


def draw_devices(cluster: Cluster) -> Figure:
    """Return a picture of a cluster's devices in their nodes."""
    from matplotlib.figure import Figure

    places = _places(cluster)
    wide, high = places.inches * places.width, places.inches * places.height
    figure = Figure(figsize=(wide + 0.4, high + _TITLE_INCHES), dpi=150)
    _draw_places(
        (), places, figure.add_axes((0.2 / (wide + 0.4), 0, wide / (wide + 0.4), high / (high + _TITLE_INCHES)))
    )
    return figure


def _places(cluster: Cluster) -> _DeviceMap:
    nodes: dict[tuple[int, int], list[int]] = {}
    for index, device in enumerate(cluster.devices):
        nodes.setdefault((device.rack, device.node), []).append(index)
    racks = len({rack for rack, _ in nodes}) > 1
    # As many in a row of a node as lets all nodes be about as wide as the picture.
    columns = max(2, min(8, 32 // min(_IN_A_ROW, len(nodes))))
    at: dict[int, tuple[float, float]] = {}
    boxes: dict[str, tuple[float, float, float, float]] = {}
    wide = float(min(columns, max(map(len, nodes.values()))))
    high = float(-(-max(map(len, nodes.values())) // columns))
    for number, ((rack, node), devices) in enumerate(nodes.items()):
        left, top = number % _IN_A_ROW * (wide + _AIR), number // _IN_A_ROW * (high + 2 * _AIR)
        for place, index in enumerate(devices):
            at[index] = left + place % columns + 0.5, top + place // columns + 0.5
        kinds = ", ".join(dict.fromkeys(cluster.devices[index].type for index in devices))
        name = f"node {node}: {kinds}"
        boxes[f"rack {rack}, {name}" if racks else name] = left, top, wide, high
    return _DeviceMap(at, boxes)


def _draw_places(placed: Sequence[Stage], places: _DeviceMap, axes: Axes) -> None:
    import networkx as nx
    from matplotlib import colormaps
    from matplotlib.patches import FancyBboxPatch

    stages: dict[int, list[int]] = {device: [] for device in places.at}
    for index, stage in enumerate(placed):
        for device in stage.devices:
            stages[device].append(index)
    axes.set(xlim=(-0.1, places.width), ylim=(places.height, -_AIR), aspect="equal", anchor="W")
    axes.axis("off")
    for text, (left, top, width, height) in places.boxes.items():
        edge = FancyBboxPatch((left, top), width, height, "round,pad=0.08", facecolor="none", edgecolor=FAINT)
        axes.add_patch(edge)
        letters = min(7.0, width * places.inches * _POINTS / len(text) / _LETTER)
        if letters >= _LEAST_LETTERS:
            axes.text(left, top + height + 0.2, text, size=letters, color=INK, va="top", parse_math=False)
    graph = nx.DiGraph()
    graph.add_nodes_from(places.at)
    if len(placed) <= MOST_ARROWS:
        ends = ((one.devices[-1], other.devices[0]) for one, other in pairwise(placed))
        # Stages that come round to the first devices again are known by their numbers.
        graph.add_edges_from((one, other) for one, other in ends if one < other)
    points = 0.8 * _POINTS * places.inches
    colours = [colormaps["tab20"](own[0] % 20) if own else _LANE for own in stages.values()]
    shapes = {"node_size": points**2, "node_shape": "s"}
    nx.draw_networkx_nodes(graph, places.at, ax=axes, node_color=colours, edgecolors=FAINT, **shapes)
    nx.draw_networkx_edges(
        graph, places.at, ax=axes, edge_color=INK, width=0.8, arrowsize=8, connectionstyle="arc3,rad=-0.25", **shapes
    )
    if len(stages) <= MOST_NUMBERED:
        labels = {device: ",".join(map(str, own)) for device, own in stages.items() if own}
        size = min(8.0, points / 2, 1.5 * points / max(map(len, labels.values()), default=1))
        nx.draw_networkx_labels(graph, places.at, labels, ax=axes, font_size=size, font_color=INK)
    used = sum(map(bool, stages.values()))
    of = f"{len(placed)} stages on {used} of " if placed else ""
    axes.set_title(f"{of}{len(stages)} devices", loc="left", size=11)
