"""PiperMoves: the stages that can be put before others, while no stage may take longer than a limit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from reproductions.piper_options import Numbers
from reproductions.piper_stages import Counts, PiperStages, Stage

__all__ = ["PiperMoves", "in_flight"]

_ROUNDING = 1 + 1e-12
"""So that no bound excludes what it equals but for rounding."""


def in_flight(behind: int, replicas: int) -> int:
    """Return the micro-batches that each replica of a stage has in flight, with so many replicas behind.

    >>> in_flight(0, 4), in_flight(4, 4), in_flight(5, 4)
    (1, 2, 3)
    """
    return 1 + -(-behind // replicas)


class _Entries(NamedTuple):
    """Stages that end before the same layer, by group, first layer and replicas; arrays of one entry each."""

    group: Counts
    first: Counts
    replicas: Counts
    devices: Counts
    left: Numbers
    """Devices that the layers before the stage do not need."""
    fastest_s: Numbers
    per_flight: Numbers
    beyond: Numbers
    """Bytes beside those per micro-batch in flight, less the memory."""
    least_per_flight: Numbers
    room: Numbers
    segment: Counts
    """Equal where group and first layer are."""


class PiperMoves:
    """Stages whose quickest options take no longer than a limit, on devices that the other layers can spare."""

    def __init__(self, stages: PiperStages, most_s: float) -> None:
        self._stages, self._most_s = stages, most_s
        needed = stages.work_s / (most_s * _ROUNDING)
        self._entries = [self._prepared(stop, needed) for stop in range(1, stages.layers + 1)]

    def before(self, stop: int, devices: int, replicas: int) -> Iterator[tuple[Stage, float]]:
        """Yield stages that end before ``stop``, and their seconds, with so many devices and replicas behind.

        For each first layer and group only the one with the fewest replicas: more would use more devices, and leave
        more in flight on the stages before.
        """
        entries, done = self._entries[stop - 1], set()
        waiting = 1 + -(-replicas // entries.replicas)
        quick, tight = self._fitting(entries, waiting, devices, replicas)
        useful = np.flatnonzero(tight | _first_of(quick, entries.segment))
        columns = (entries.segment, entries.group, entries.first, entries.replicas, waiting, entries.fastest_s, tight)
        for segment, group, first, count, flights, fastest_s, is_tight in zip(
            *(column[useful].tolist() for column in columns), strict=True
        ):
            if segment in done:
                continue
            stage = Stage(first, stop, self._stages.groups[group], count)
            seconds = fastest_s + (self._stages.beyond_s(stage, flights) if is_tight else 0.0)
            if seconds <= self._most_s:
                done.add(segment)
                yield stage, seconds

    def _fitting(
        self, entries: _Entries, waiting: Counts, devices: int, replicas: int
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Return which stages fit with their quickest options, and which may do so with others."""
        task = self._stages.task
        possible = (entries.devices + devices <= entries.left) & (entries.replicas + replicas <= task.micro_batches)
        excess = entries.per_flight * waiting + entries.beyond
        quick = possible & (excess <= 0)
        tight = possible & (excess > 0) & (entries.least_per_flight * waiting <= entries.room)
        at = np.flatnonzero(tight)
        rates = self._stages.rates[entries.group[at], waiting[at]]
        bound_s = entries.fastest_s[at] + excess[at] * rates / entries.replicas[at]
        tight[at] = bound_s <= self._most_s * _ROUNDING
        return quick, tight

    def _prepared(self, stop: int, needed: Numbers) -> _Entries:
        stages = self._stages
        counts, groups = np.array(stages.replicas), np.array(stages.groups)
        devices = groups[:, np.newaxis, np.newaxis] * counts
        left = (stages.task.devices - needed[:stop])[np.newaxis, :, np.newaxis]
        behind = needed[-1] - needed[stop]
        chosen = (stages.fastest_s[stop - 1, :, :stop] <= self._most_s) & (devices + behind * (1 - 1e-9) <= left)
        group, first, place = np.nonzero(chosen)
        at = (stop - 1, group, first, place)
        plain = (stop - 1, group, first, 0)
        return _Entries(
            group=group,
            first=first,
            replicas=counts[place],
            devices=groups[group] * counts[place],
            left=left[0, first, 0],
            fastest_s=stages.fastest_s[at],
            per_flight=stages.per_flight[at],
            beyond=stages.fixed[at] - stages.task.memory_bytes,
            least_per_flight=stages.least_per_flight[plain],
            room=stages.room[plain],
            segment=group * stop + first,
        )


def _first_of(flags: npt.NDArray[np.bool_], segments: Counts) -> npt.NDArray[np.bool_]:
    """Return the first flag of each segment; equal segments stand together."""
    at = np.flatnonzero(flags)
    kept = np.zeros(len(flags), dtype=np.bool_)
    found = segments[at]
    kept[at[:1]] = True
    kept[at[1:][found[1:] != found[:-1]]] = True
    return kept
