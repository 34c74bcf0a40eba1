"""PipeDreamLevels: PipeDream's dynamic program for one level of a cluster after the other.

With T the seconds of layers i to j on one machine of the level, w their parameters' bytes, B the level's bandwidth and
o_j what crosses behind layer j, m machines take for the first stage of a pipeline, and for every later one,

    (T + 4 (m - 1) w / (m B) / m') / m                                        m' machines of the level below are one
    max( (T + 4 (m - 1) w / (m B)) / m,  2 o_{i-1} / (m B),  2 o_j / (m B) )  o_j = 0 behind the last layer

and a pipeline takes what its slowest stage does. A machine is a device, or all of the level below, which takes for T
what its best pipeline does. (Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP
2019, section 3.1. The factors, m' in the first stage alone and no crossing there are those of its published optimizer,
with activations sent uncompressed.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from reproductions.pipedream_graph import Numbers, PipeDreamGraph

__all__ = ["Level", "LevelStage", "LevelTable", "data_parallel_s", "layer_seconds"]


_CACHED = 2**15
"""Numbers of a table that are worked on at a time."""


class Level(NamedTuple):
    """Equal machines, and what each sends the others."""

    machines: int
    bytes_per_s: float
    inside: int
    """Machines of the level below that form one of this level's; 1 for devices."""


class LevelStage(NamedTuple):
    """Layers ``first`` to before ``stop`` on some of a level's machines."""

    first: int
    stop: int
    machines: int


def layer_seconds(graph: PipeDreamGraph) -> Numbers:
    """Return the seconds of layers on one device, as ``[first, last]``; infinite where the last comes before."""
    return _between(graph.seconds) + np.where(np.tri(len(graph.seconds), k=-1, dtype=np.bool_), np.inf, 0.0)


def data_parallel_s(graph: PipeDreamGraph, levels: tuple[Level, ...]) -> float:
    """Return the seconds of a mini-batch where every device holds all layers, by PipeDream's formulas."""
    seconds = float(graph.seconds[-1])
    for level in levels:
        sent = 4 * (level.machines - 1) * float(graph.parameters_bytes[-1]) / (level.bytes_per_s * level.machines)
        seconds = (seconds + sent / level.inside) / level.machines
    return seconds


class LevelTable:
    """The least bottleneck of layers on any number of a level's machines, all of them used."""

    def __init__(
        self, graph: PipeDreamGraph, seconds: Numbers, level: Level, *, only_from_first: bool, only_ends: bool = False
    ) -> None:
        """Fill the table; ``seconds`` are those of layers on one machine, as ``[first, last]``.

        With ``only_from_first``, only for layers from the first one on. With ``only_ends``, only on all machines, and
        for layers from the first one on or up to the last one: more is not asked of a level of which there are two.
        """
        self._seconds, self._level = seconds, level
        self._parameters = _between(graph.parameters_bytes)
        self._sent = 2.0 * graph.outputs_bytes
        self._work = graph.seconds / level.inside
        self._firsts = 1 if only_from_first else len(self._sent)
        self._least: dict[int, Numbers] = {}
        self._later: dict[int, Numbers] = {}
        self._only_ends = only_ends
        if only_ends:
            self._least[level.machines] = self._ends()
            return
        for machines in range(1, level.machines + 1):
            self._least[machines] = self._fill(machines)

    @property
    def seconds(self) -> Numbers:
        """The least bottleneck on all of the level's machines, as ``[first, last]``."""
        return self._least[self._level.machines]

    def best(self) -> tuple[int, float]:
        """Return the fewest machines on which all layers have the least bottleneck of any number, and that."""
        return min(
            ((machines, float(table[0, -1])) for machines, table in self._least.items()), key=lambda each: each[1]
        )

    def stages(self, first: int, stop: int, machines: int) -> list[LevelStage]:
        """Return the stages of the least bottleneck on so many machines.

        Of equals, those with the longer last stage on the fewer machines.
        """
        found: list[LevelStage] = []
        rows = self._row(first) if self._only_ends else {count: table[first] for count, table in self._least.items()}
        while stop > first:
            cut, used = self._last_stage(rows, first, stop, machines)
            found.append(LevelStage(cut, stop, used))
            stop, machines = cut, machines - used
        return found[::-1]

    def _last_stage(self, rows: dict[int, Numbers], first: int, stop: int, machines: int) -> tuple[int, int]:
        """Return where the last stage begins, and its machines; ``rows`` are the least of layers from the first on."""
        least, chosen = float(self._whole(machines)[first, stop - 1]), (first, machines)
        for used in range(1, machines if stop - first > 1 else 1):
            before = rows[machines - used][first : stop - 1]
            behind = self._behind(used, slice(first + 1, stop), slice(stop - 1, stop))[:, 0]
            slowest = np.maximum(before, behind)
            cut = int(slowest.argmin())
            if slowest[cut] < least:
                least, chosen = float(slowest[cut]), (first + 1 + cut, used)
        return chosen

    def _ends(self) -> Numbers:
        """Return the least on all machines, infinite for layers that neither begin nor end the model."""
        count, machines = len(self._sent), self._level.machines
        table = np.full((count, count), np.inf)
        table[0] = self._row(0)[machines]
        # From the last layer to the first: stages behind another one, then a first stage before them.
        chains: dict[int, Numbers] = {}
        for used in range(1, machines + 1):
            chains[used] = self._behind_all(used)[:, -1].copy()
            for own in range(1, used):
                chains[used] = np.minimum(chains[used], _before(self._behind_all(own), chains[used - own]))
        column = self._whole(machines)[:, -1]
        for own in range(1, machines):
            column = np.minimum(column, _before(self._whole(own), chains[machines - own]))
        table[1:, -1] = column[1:]
        return table

    def _row(self, first: int) -> dict[int, Numbers]:
        """Return the least of layers from one on, on any number of machines."""
        rows: dict[int, Numbers] = {}
        for machines in range(1, self._level.machines + 1):
            rows[machines] = self._whole(machines)[first]
            for used in range(1, machines):
                before = rows[machines - used][:-1, np.newaxis]
                slowest = np.maximum(before, self._behind_all(used)[1:])
                rows[machines] = np.minimum(rows[machines], slowest.min(axis=0, initial=np.inf))
        return rows

    def _behind_all(self, machines: int) -> Numbers:
        if machines not in self._later:
            self._later[machines] = self._behind(machines, slice(None), slice(None))
        return self._later[machines]

    def _fill(self, machines: int) -> Numbers:
        table = self._whole(machines)
        for used in range(1, machines):
            before = self._least[machines - used]
            behind = self._behind(used, slice(None), slice(None))
            for rows in self._blocks():
                ranges = self._useful(table[rows], rows, machines - used, used)
                _split(table[rows], before[rows], behind, rows.start, ranges)
        return table

    def _useful(self, table: Numbers, rows: slice, before: int, used: int) -> list[tuple[int, int]]:
        """Return, for each layer that a last stage may begin with, between which last layers it may lower the table.

        No pipeline is quicker than its work divided evenly among its machines, neither the last stage nor the others.
        """
        least = self._work * (1 - 1e-9)
        most = table.max(axis=0)
        started = np.concatenate([[0.0], least[:-1]])
        last = np.minimum.accumulate((least - used * most)[::-1])[::-1].searchsorted(started)
        # Of the block's first layers, the last one leaves the least to the others.
        finite = np.where(np.isfinite(most), most, 0.0)
        first = np.maximum.accumulate(finite).searchsorted((started - started[rows.stop - 1]) / before)
        return list(zip(first.tolist(), last.tolist(), strict=True))

    def _blocks(self) -> Iterator[slice]:
        """First layers in blocks whose part of a table stays in a processor's cache."""
        size = max(1, _CACHED // len(self._sent))
        return (slice(first, min(first + size, self._firsts)) for first in range(0, self._firsts, size))

    def _whole(self, machines: int) -> Numbers:
        """Seconds of the first stage of a pipeline, or its only one."""
        synchronised = self._synchronised(machines, slice(self._firsts), slice(None)) / self._level.inside
        return np.asarray((self._seconds[: self._firsts] + synchronised) / machines)

    def _behind(self, machines: int, firsts: slice, lasts: slice) -> Numbers:
        """Seconds of a later stage, and of what crosses its ends; meaningless for the first layer of all."""
        crossing = self._sent / (self._level.bytes_per_s * machines)
        into = np.roll(crossing, 1)[firsts]
        out = np.append(crossing[:-1], 0.0)[lasts]
        busy = (self._seconds[firsts, lasts] + self._synchronised(machines, firsts, lasts)) / machines
        return np.asarray(np.maximum(np.maximum(busy, into[:, np.newaxis]), out))

    def _synchronised(self, machines: int, firsts: slice, lasts: slice) -> Numbers:
        share = 4.0 * (machines - 1) / (self._level.bytes_per_s * machines)
        return np.asarray(self._parameters[firsts, lasts] * share)


def _before(stages: Numbers, chain: Numbers) -> Numbers:
    """Return the least of a stage, ``[first, last]``, and a chain that begins behind it, by the stage's first layer."""
    return np.asarray(np.maximum(stages[:, :-1], chain[1:]).min(axis=1, initial=np.inf))


def _split(table: Numbers, before: Numbers, behind: Numbers, first: int, ranges: Sequence[tuple[int, int]]) -> None:
    """Lower a table to what pipelines take whose last stage begins anywhere and ends in the range given for that.

    The table's rows are those of the first layers from ``first`` on.
    """
    room = np.empty_like(table)
    for cut in range(first + 1, len(behind)):
        rows, lasts = slice(min(cut - first, len(table))), slice(max(cut, ranges[cut][0]), ranges[cut][1])
        if lasts.start < lasts.stop:
            slowest = room[rows, lasts]
            np.maximum(before[rows, cut - 1 : cut], behind[cut, lasts], out=slowest)
            np.minimum(table[rows, lasts], slowest, out=table[rows, lasts])


def _between(sums: Numbers) -> Numbers:
    """Return the sums from one layer to another, as ``[first, last]``."""
    before = np.concatenate([[0.0], sums[:-1]])
    return np.asarray(sums[np.newaxis, :] - before[:, np.newaxis])
