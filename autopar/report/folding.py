"""Folding: which ranks are alike and are drawn once, and which repetitions of a step are left out.

Pictures and pages draw what is decided here, of numbers and texts alone. Replicas that do the same at about the same
speed are one row, "ranks 0-31 (x 32)"; of more rows than are read, some evenly chosen ones are drawn. Where all rows
repeat a pattern, :class:`TimeAxis` leaves out its middle.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from autopar.formats.timeline import Event, Timeline, track_of

MOST_RANGES = 3
"""Ranges of numbers in a label."""
MOST_ROWS = 32
"""Rows of a picture that are read."""
NEAR = 0.1
"""How much longer ranks may compute that are drawn as one: one that falls behind has a row of its own."""
MOST_BLOCKS = 96
"""Computations of a row, all of which are drawn."""
KEPT, LEAST_TIMES = 4, 12
"""Repetitions that are drawn at either end of a pattern, and how many make one."""
_LONGEST_PERIOD = 256
_LEAST_SHARE, _GAP_SHARE = 0.1, 0.03
"""Of the whole step, what is worth leaving out; of what is drawn, the gap that stands for it."""


class Alike(NamedTuple):
    """Ranks, devices or stages that are drawn once."""

    members: tuple[int, ...]
    """Ascending; the first one is drawn."""

    @property
    def times(self) -> str:
        """How many there are, as a label has it; nothing for one.

        >>> Alike((0, 1, 2)).times, Alike((3,)).times
        ('x 3', '')
        """
        return f"x {len(self.members):,}" if len(self.members) > 1 else ""

    def label(self, what: str = "rank") -> str:
        """Return which these are.

        >>> Alike((3,)).label(), Alike(tuple(range(32))).label(), Alike((0, 4)).label("node")
        ('rank 3', 'ranks 0-31', 'nodes 0, 4')
        """
        return f"{what}{'s' if len(self.members) > 1 else ''} {ranges(self.members)}"

    def name(self, what: str = "rank") -> str:
        """Return which these are, and how many.

        >>> Alike((3,)).name(), Alike(tuple(range(32))).name()
        ('rank 3', 'ranks 0-31 (x 32)')
        """
        return f"{self.label(what)} ({self.times})" if self.times else self.label(what)


def ranges(numbers: Sequence[int], most: int = MOST_RANGES) -> str:
    """Return ascending numbers with ranges in place of three or more that follow each other.

    Of more than ``most`` numbers and ranges the last ones are counted.

    >>> ranges((0, 1, 2, 3)), ranges((0, 1)), ranges((0, 1, 2, 8, 9, 10)), ranges(range(0, 64, 8))
    ('0-3', '0, 1', '0-2, 8-10', '0, 8, 16, 5 more')
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    found = [each for run in runs for each in ([run] if len(run) > 2 else [[number] for number in run])]
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found]
    if len(texts) <= most:
        return ", ".join(texts)
    return f"{', '.join(texts[:most])}, {sum(map(len, found[most:])):,} more"


def alike(keys: Mapping[int, Hashable]) -> list[Alike]:
    """Return those that have the same key, by their first.

    >>> alike({0: "a", 1: "b", 2: "a"})
    [Alike(members=(0, 2)), Alike(members=(1,))]
    """
    found: dict[Hashable, list[int]] = {}
    for number in sorted(keys):
        found.setdefault(keys[number], []).append(number)
    return [Alike(tuple(members)) for members in found.values()]


def alike_ranks(*timelines: Timeline) -> list[Alike]:
    """Return the ranks that do the same computations, and about as fast, in every one of some timelines."""
    count = max(timeline.rank_count() for timeline in timelines)
    keys: list[tuple[int, ...]] = [()] * count
    for timeline in timelines:
        done: list[list[Hashable]] = [[] for _ in range(count)]
        busy_s = [0.0] * count
        for rank, action, start_s, end_s in timeline:
            if track_of(action.kind) == "compute":
                done[rank].append((action.kind, action.stage, action.micro_batch, action.version))
                busy_s[rank] += end_s - start_s
        for same in alike(dict(enumerate(map(tuple, done)))):
            for about in about_equal({rank: busy_s[rank] for rank in same.members}):
                for rank in about.members:
                    keys[rank] = (*keys[rank], about.members[0])
    return alike(dict(enumerate(keys)))


def about_equal(values: Mapping[int, float], near: float = NEAR) -> list[Alike]:
    """Return those whose values are near each other: none is larger by more than a share than another one.

    >>> about_equal({0: 1.0, 1: 1.05, 2: 3.0, 3: 1.0})
    [Alike(members=(0, 1, 3)), Alike(members=(2,))]
    """
    keys, least = dict[int, float](), float("-inf")
    for number in sorted(values, key=lambda each: (values[each], each)):
        if values[number] > least * (1 + near):
            least = values[number]
        keys[number] = least
    return alike(keys)


def evenly(count: int, most: int = MOST_ROWS) -> list[int]:
    """Return as many of some rows as are read, from the first to the last at about equal distances.

    >>> evenly(3), evenly(1024, 5)
    ([0, 1, 2], [0, 256, 512, 767, 1023])
    """
    if count <= most:
        return list(range(count))
    return [round(at * (count - 1) / (most - 1)) for at in range(most)]


class Stretch(NamedTuple):
    """A part of a sequence in which a pattern repeats."""

    first: int
    stop: int
    period: int
    """How long the pattern is."""


def stretches_of(sequence: Sequence[Hashable], times: int = LEAST_TIMES) -> list[Stretch]:
    """Return the stretches of a sequence in which a pattern repeats at least so often, the shortest patterns first.

    >>> stretches_of("FFFFBFBFBFBBBB", times=3)
    [Stretch(first=0, stop=4, period=1), Stretch(first=10, stop=14, period=1), Stretch(first=4, stop=10, period=2)]
    >>> stretches_of("FFBFFBFFBFFB", times=4)
    [Stretch(first=0, stop=12, period=3)]
    """
    import numpy as np

    number = {each: at for at, each in enumerate(dict.fromkeys(sequence))}
    codes = np.array([number[each] for each in sequence], dtype=np.int64)
    free, found = np.ones(len(codes), dtype=bool), list[Stretch]()
    for period in range(1, min(_LONGEST_PERIOD, len(codes) // times) + 1):
        same = np.concatenate(([False], codes[period:] == codes[:-period], [False]))
        begins, ends = (np.flatnonzero(np.diff(same.astype(np.int8)) == step) for step in (1, -1))
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            # What shorter patterns have taken is theirs.
            taken = np.flatnonzero(~free[begin : end + period]) + begin
            edges = (begin - 1, *taken.tolist(), end + period)
            for before, after in pairwise(edges):
                if after - before - 1 >= times * period:
                    found.append(Stretch(before + 1, after, period))
                    free[before + 1 : after] = False
    return found


Span = tuple[float, float]
"""From one moment to a later one, in seconds."""


def left_out(rows: Iterable[Sequence[Event]], end_s: float) -> tuple[Span, ...]:
    """Return when every row repeats what it has done before, and will do again, so that nobody misses it.

    Nothing, where no row has so many computations that they cannot all be seen.
    """
    computed = [_computations(row) for row in rows]
    computed = [blocks for blocks in computed if blocks]
    if max(map(len, computed), default=0) <= MOST_BLOCKS:
        return ()
    common: list[Span] = [(0.0, end_s)]
    for blocks in computed:
        kinds = [(event.action.kind, event.action.stage) for event in blocks]
        own = sorted(_middle(blocks, stretch) for stretch in stretches_of(kinds))
        common = list(_overlaps(common, own))
    return tuple(span for span in common if span[1] - span[0] > _LEAST_SHARE * end_s)


def _computations(row: Sequence[Event]) -> list[Event]:
    return sorted((event for event in row if track_of(event.action.kind) == "compute"), key=lambda each: each.start_s)


def _middle(blocks: Sequence[Event], stretch: Stretch) -> Span:
    """Return the time of a stretch, but for the repetitions that are drawn."""
    first, last = stretch.first + KEPT * stretch.period, stretch.stop - KEPT * stretch.period
    return blocks[first].start_s, blocks[last].start_s


def _overlaps(ones: Iterable[Span], others: Sequence[Span]) -> Iterator[Span]:
    for one in ones:
        for other in others:
            start_s, end_s = max(one[0], other[0]), min(one[1], other[1])
            if start_s < end_s:
                yield start_s, end_s


@dataclass(frozen=True)
class TimeAxis:
    """Where moments are drawn on an axis that leaves some time out.

    >>> axis = TimeAxis(10.0, ((2.0, 8.0),))
    >>> axis.windows, round(axis.length_s, 2)
    ([(0.0, 2.0), (8.0, 10.0)], 4.12)
    >>> [round(axis.place(at), 2) for at in (1.0, 2.0, 8.0, 9.0)], axis.pieces(1.0, 2.5), axis.pieces(3.0, 4.0)
    ([1.0, 2.0, 2.12, 3.12], [(1.0, 2.0)], [])
    """

    end_s: float
    """Of the whole."""
    gaps: tuple[Span, ...] = ()
    """What is left out, ascending; each is drawn as a gap of the same width."""

    @property
    def windows(self) -> list[Span]:
        """What is drawn."""
        edges = [0.0, *(moment for gap in self.gaps for moment in gap), self.end_s]
        return list(zip(edges[::2], edges[1::2], strict=True))

    @property
    def gap_s(self) -> float:
        """How wide a gap is drawn."""
        return _GAP_SHARE * sum(end_s - start_s for start_s, end_s in self.windows)

    @property
    def length_s(self) -> float:
        """How long the axis is drawn."""
        return self.place(self.end_s)

    def shows(self, at_s: float) -> bool:
        """Whether a moment is drawn."""
        return not any(start_s < at_s < end_s for start_s, end_s in self.gaps)

    def place(self, at_s: float) -> float:
        """Return where a moment is drawn."""
        shift_s = 0.0
        for start_s, end_s in self.gaps:
            if at_s > start_s:
                shift_s += (min(at_s, end_s) - start_s) * (1 - self.gap_s / (end_s - start_s))
        return at_s - shift_s

    def pieces(self, start_s: float, end_s: float) -> list[Span]:
        """Return where what lasts from one moment to another is drawn: nowhere, or in one or several pieces."""
        seen = ((max(start_s, window[0]), min(end_s, window[1])) for window in self.windows)
        # What takes no time is seen, too, where it is not left out.
        return [(self.place(one), self.place(two)) for one, two in seen if one < two or one == two == start_s]


def time_axis(timeline: Timeline, ranks: Iterable[int]) -> TimeAxis:
    """Return the axis of some ranks of a timeline."""
    rows: dict[int, list[Event]] = {rank: [] for rank in ranks}
    for event in timeline:
        if event.rank in rows:
            rows[event.rank].append(event)
    return TimeAxis(timeline.end_s, left_out(rows.values(), timeline.end_s))
