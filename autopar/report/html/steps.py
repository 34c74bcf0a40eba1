"""Charts of timelines: a row for ranks that are alike, what is held above it, and all of it on one axis of time.

A row has computation above and messages in thin strips below. Heights are in rows, downwards from 0; what is held is
drawn above 0, as a part of the most.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from autopar.formats.prediction import HeldBytes
from autopar.formats.program import WORDS
from autopar.formats.timeline import Event, Timeline, track_of
from autopar.report.folding import Alike, alike_ranks, evenly, left_out, ranges
from autopar.report.html.charts import Chart, keys, view
from autopar.report.memory import HELD_COLOURS
from autopar.report.style import COLOURS, GREEN
from autopar.report.table import duration, percentage, size

MOST_ACTIONS = 20_000
"""Drawn at once; of more, messages are left out first, then what repeats, then rows."""
_ROW_PIXELS = 28
_HELD_ROWS, _AIR = 4.5, 0.7
_COMPUTE, _STRIP = 0.58, 0.11
_STRIPS = ("send", "receive", "reduce")
_HELD_COLOURS = {**HELD_COLOURS, "held": GREEN}
_ACTION_COLOURS = {WORDS.get(kind, kind): colour for kind, colour in COLOURS.items()}


_GAP = "scale('x', datum.x2) - scale('x', datum.x) > 4 ? -0.8 : 0.2"
"""Pixels: neighbours are told apart, and what is narrow is seen."""


class _Row(NamedTuple):
    """Ranks of one timeline that are drawn once."""

    label: str
    events: Sequence[Event]


class _Block(NamedTuple):
    """A rectangle, and what is said of it where the pointer is."""

    x: float
    x2: float
    y: float
    y2: float
    what: str
    name: str
    value: str


class HeldByRank(NamedTuple):
    """What one rank holds over a step."""

    rank: int
    held: HeldBytes


def step(title: str, timelines: Mapping[str, Timeline], fullest: HeldByRank | None = None) -> Chart:
    """Return a step of one timeline; or of several by name, those of a rank below each other."""
    groups = alike_ranks(*timelines.values())
    shown = [groups[at] for at in evenly(len(groups))]
    rows = list(_rows(shown, timelines))
    end_s = max(timeline.end_s for timeline in timelines.values())
    rows, said = _fitting(rows, end_s)
    if len(shown) < len(groups):
        said.insert(0, f"{len(shown)} of {len(groups):,} rows are shown.")
    factor, unit = (1e3, "ms") if end_s < 1 else (1.0, "s")
    blocks = [block for at, row in enumerate(rows) for block in _blocks(row, at, factor)]
    held = [] if fullest is None else list(_held_blocks(fullest.held, end_s, factor))
    ticks = {at + _COMPUTE / 2: row.label for at, row in enumerate(rows)}
    if fullest is not None:
        most = _most(fullest.held)
        ticks |= {-_AIR: "0", -_AIR - _HELD_ROWS: f"{'limit ' if fullest.held.limit_bytes == most else ''}{size(most)}"}
        said.append(_fullest_text(fullest))
    held_colours = {} if fullest is None else {cause: _HELD_COLOURS[cause] for cause in fullest.held.causes}
    action_colours = _present(_ACTION_COLOURS, blocks)
    top = -_AIR - _HELD_ROWS - 0.3 if held else -0.2
    spec = _spec(blocks + held, held_colours | action_colours, ticks, (top, len(rows)), end_s * factor, unit)
    legends = keys(held_colours), keys(action_colours)
    return Chart(title, spec, tuple(filter(None, legends)), " ".join(said))


def summary(timeline: Timeline) -> str:
    """Return how long a step takes, and how much of it is bubble."""
    kind = "predicted" if timeline.origin == "simulated" else timeline.origin
    return f"{kind}: {duration(timeline.end_s)}, {percentage(timeline.bubble())} bubble"


def recorded_bytes(timeline: Timeline) -> HeldByRank | None:
    """Return what the fullest rank held, of a timeline whose bytes were counted."""
    peaks = timeline.peaks_bytes()
    if not peaks:
        return None
    rank = max(peaks, key=lambda each: (peaks[each] / timeline.limits_bytes.get(each, peaks[each]), -each))
    times_s, sizes = zip(*timeline.memory[rank], strict=True)
    return HeldByRank(rank, HeldBytes(times_s, {"held": sizes}, timeline.limits_bytes.get(rank)))


def _fullest_text(fullest: HeldByRank) -> str:
    limit, most = fullest.held.limit_bytes, max(fullest.held.totals, default=0)
    of = "" if limit is None else f" of {size(limit)}"
    return f"Above: what rank {fullest.rank} holds, the fullest: at most {size(most)}{of}."


def _rows(groups: Iterable[Alike], timelines: Mapping[str, Timeline]) -> Iterator[_Row]:
    firsts = {group.members[0] for group in groups}
    events: dict[tuple[str, int], list[Event]] = {(name, rank): [] for name in timelines for rank in firsts}
    for name, timeline in timelines.items():
        for event in timeline:
            if event.rank in firsts:
                events[name, event.rank].append(event)
    for group in groups:
        for at, name in enumerate(timelines):
            which = f"{ranges(group.members, 2)} ({group.times})" if group.times else str(group.members[0])
            label = ", ".join(filter(None, (which if at == 0 else "", name)))
            yield _Row(label, events[name, group.members[0]])


def _fitting(rows: list[_Row], end_s: float) -> tuple[list[_Row], list[str]]:
    """Return rows with no more actions than are drawn, and what was left out."""
    said = []
    if _count(rows) > MOST_ACTIONS:
        rows = [row._replace(events=[each for each in row.events if _track(each) == "compute"]) for row in rows]
        said.append("Messages are left out.")
    gaps = left_out([row.events for row in rows], end_s) if _count(rows) > MOST_ACTIONS else ()
    if gaps:
        rows = [row._replace(events=[each for each in row.events if not _is_in(each, gaps)]) for row in rows]
        said.append("The middle is left out, which repeats what is before and behind it.")
    if _count(rows) > MOST_ACTIONS:
        each = MOST_ACTIONS // len(rows)
        rows = [row._replace(events=row.events[:each]) for row in rows]
        said.append(f"Of each row, the first {each:,} actions are drawn.")
    return rows, said


def _count(rows: Iterable[_Row]) -> int:
    return sum(len(row.events) for row in rows)


def _is_in(event: Event, gaps: Iterable[tuple[float, float]]) -> bool:
    return any(start_s <= event.start_s < end_s for start_s, end_s in gaps)


def _track(event: Event) -> str:
    return track_of(event.action.kind)


def _blocks(row: _Row, at: int, factor: float) -> Iterator[_Block]:
    for event in row.events:
        track = _track(event)
        if track == "compute":
            top, height, what = 0.0, _COMPUTE, WORDS[event.action.kind]
        else:
            top, height, what = _COMPUTE + _STRIP * _STRIPS.index(track), _STRIP, track
        took = duration(max(0.0, event.end_s - event.start_s))
        yield _Block(
            event.start_s * factor, event.end_s * factor, at + top, at + top + height, what, str(event.action), took
        )


def _held_blocks(held: HeldBytes, end_s: float, factor: float) -> Iterator[_Block]:
    """Yield what is held for every cause from moment to moment, on top of the causes before."""
    most = _most(held) or 1
    below = [0] * len(held.times_s)
    ends_s = (*held.times_s[1:], end_s)
    for cause, sizes in held.causes.items():
        for at, (start_s, stop_s, bytes_) in enumerate(zip(held.times_s, ends_s, sizes, strict=True)):
            low, high = (-_AIR - _HELD_ROWS * each / most for each in (below[at], below[at] + bytes_))
            below[at] += bytes_
            if bytes_ and stop_s > start_s:
                yield _Block(start_s * factor, stop_s * factor, high, low, cause, cause, size(bytes_))


def _most(held: HeldBytes) -> int:
    """Return the bytes at the top of the drawing: the limit, unless it is far above what is held."""
    most = max(held.totals, default=0)
    return held.limit_bytes if held.limit_bytes is not None and held.limit_bytes < 3 * most else most


def _present(colours: Mapping[str, str], blocks: Iterable[_Block]) -> dict[str, str]:
    present = {block.what for block in blocks}
    return {name: colour for name, colour in colours.items() if name in present}


def _spec(
    blocks: Sequence[_Block],
    colours: Mapping[str, str],
    ticks: Mapping[float, str],
    rows: tuple[float, float],
    end: float,
    unit: str,
) -> dict[str, Any]:
    """Return the specification of rectangles on an axis of time, on which one moves by dragging and shift-scrolling."""
    places = sorted(ticks)
    labels = f"{json.dumps([ticks[at] for at in places])}[indexof({json.dumps(places)}, datum.value)]"
    move = {"zoom": "wheel![event.shiftKey]", "clear": "dblclick"}
    moved: dict[str, Any] = {
        "name": "moved",
        "select": {"type": "interval", "encodings": ["x"], **move},
        "bind": "scales",
    }
    rectangle: dict[str, Any] = {"type": "rect", "clip": True}
    axis = {"values": places, "labelExpr": labels, "grid": False, "ticks": False, "domain": False, "labelLimit": 120}
    time = {"title": f"{unit} since the step began", "scale": {"domain": [0, end or 1], "nice": False}}
    return view(
        round((rows[1] - rows[0]) * _ROW_PIXELS),
        data={"values": {"columns": _Block._fields, "rows": list(map(_rounded_fields, blocks))}},
        layer=[
            {"mark": rectangle | {"x2Offset": 0.4}, "transform": [{"filter": "datum.y < 0"}], "params": [moved]},
            {"mark": rectangle | {"x2Offset": {"expr": _GAP}}, "transform": [{"filter": "datum.y >= 0"}]},
        ],
        encoding={
            "x": {"field": "x", "type": "quantitative", **time},
            "x2": {"field": "x2"},
            "y": {
                "field": "y",
                "type": "quantitative",
                "title": "ranks",
                "axis": axis,
                "scale": {"domain": [*rows], "reverse": True, "nice": False, "zero": False},
            },
            "y2": {"field": "y2"},
            "color": {
                "field": "what",
                "type": "nominal",
                "legend": None,
                "scale": {"domain": list(colours), "range": list(colours.values())},
            },
            "tooltip": [{"field": "name", "title": "action"}, {"field": "what"}, {"field": "value", "title": "takes"}],
        },
    )


def _rounded_fields(block: _Block) -> tuple[float | str, ...]:
    return (*(float(f"{place:.7g}") for place in block[:4]), *block[4:])
