"""PiperChoice: which option each layer of a stage takes, so that all fit and together take the least time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

__all__ = ["Choice", "Way", "quickest"]


class Way(NamedTuple):
    """One option of a layer."""

    seconds: float
    bytes: int


class Choice(NamedTuple):
    """An option for every layer, by index."""

    options: tuple[int, ...]
    seconds: float
    bytes: int


class _Partial(NamedTuple):
    bytes: int
    seconds: float
    option: int
    before: _Partial | None


def quickest(layers: Sequence[Sequence[Way]], memory_bytes: int) -> Choice | None:
    """Return the options that take the least time in the memory; of equals, the least memory; none if none fit.

    Exact: keeps all partial choices of which none is beaten in both time and memory (Nemhauser and Ullmann, 1969), and
    which leave the other layers the least that they need. Layers that are nearly alike leave few.

    >>> recompute = [Way(3.0, 10), Way(4.0, 4)]
    >>> quickest([recompute, recompute, [Way(1.0, 5)]], 20)
    Choice(options=(1, 0, 0), seconds=8.0, bytes=19)
    """
    needed = [min(way.bytes for way in ways) for ways in layers]
    left = [*accumulate(needed[::-1], initial=0)][::-1]
    front = [_Partial(0, 0.0, -1, None)]
    for ways, rest in zip(layers, left[1:], strict=True):
        front = _front(front, ways, memory_bytes - rest)
    if not front:
        return None
    best: _Partial = front[-1]
    options = []
    step: _Partial | None = best
    while step is not None and step.before is not None:
        options.append(step.option)
        step = step.before
    return Choice(tuple(options[::-1]), best.seconds, best.bytes)


def _front(front: list[_Partial], ways: Sequence[Way], room: int) -> list[_Partial]:
    """Return the choices with one layer more, by ascending memory and falling time."""
    longer = [
        _Partial(partial.bytes + way.bytes, partial.seconds + way.seconds, option, partial)
        for option, way in enumerate(ways)
        for partial in front
        if partial.bytes + way.bytes <= room
    ]
    # Sorted by the first two alone: the sort is stable, so ties fall to the lower option.
    longer.sort(key=lambda partial: partial[:2])
    kept: list[_Partial] = []
    for partial in longer:
        if not kept or partial.seconds < kept[-1].seconds:
            kept.append(partial)
    return kept
