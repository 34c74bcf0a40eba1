"""Curves: seconds of messages and collectives as a cluster measured them, at sizes and places that it did not measure.

A collective depends on its ranks, and on how these fill their nodes: every rank of a node has a part of the node's ways
out, so that the node with fewest ranks says what all bytes take. Bytes take a + b / n with n on each node, so that
seconds of an n that was not measured lie between those of fewer and of more by 1 / n.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.formats.cluster import Curve
from autopar.formats.document import Provenance
from autopar.hardware.topology import Place

Collective = Literal["all_reduce", "all_gather", "reduce_scatter"]
ROUNDS: dict[Collective, int] = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""Rounds of a ring, in multiples of n - 1."""
Numbers = npt.NDArray[np.float64]


class MonotoneCurve:
    """A measured curve made monotone: flat before its first size, its last slope behind the last one.

    Where that slope is none, the link's bandwidth continues it, as it does a curve of one size.
    """

    def __init__(self, curve: Curve, bytes_per_s: float) -> None:
        self.curve_provenance: Provenance = curve.provenance
        self.sizes = np.array(curve.sizes, dtype=np.float64)
        self.seconds = np.maximum.accumulate(np.array(curve.seconds, dtype=np.float64))
        self.slope = 1 / bytes_per_s
        if len(self.sizes) > 1:
            self.slope = float((self.seconds[-1] - self.seconds[-2]) / (self.sizes[-1] - self.sizes[-2]))
        if self.slope == 0:
            rounds = 1.0 if curve.kind == "p2p" else ROUNDS[curve.kind] * (curve.ranks - 1) / curve.ranks
            self.slope = rounds / bytes_per_s

    def provenance(self, size_bytes: float) -> Provenance:
        """Return where the seconds at a size come from."""
        if self.curve_provenance == "estimated" or not self.sizes[0] <= size_bytes <= self.sizes[-1]:
            return "estimated"
        return self.curve_provenance if size_bytes in self.sizes else "interpolated"

    def __call__(self, sizes_bytes: Numbers) -> Numbers:
        beyond = np.maximum(sizes_bytes - self.sizes[-1], 0.0) * self.slope
        return np.asarray(np.interp(sizes_bytes, self.sizes, self.seconds) + beyond)


class _Taken(NamedTuple):
    """What collectives take, and what the least of them does."""

    seconds: Numbers
    latency_s: float


class CollectiveCurves:
    """The curves of an operation among ranks that a level connects.

    Of nodes that are filled unlike, bytes take what they take from as many ranks of every node as there are on the
    emptiest one, and the latency is that of the fullest one. Where no curve has exactly so many ranks in all, the
    nearest one is scaled as a ring's: bytes by (n - 1) / n, latency by n - 1.
    """

    def __init__(self, ring_s: Callable[[Numbers, int], Numbers]) -> None:
        """Take what a ring over the level's links takes, which stands for one rank on each node where no curve does."""
        self._ring_s = ring_s
        self._lines: dict[int, dict[int, MonotoneCurve]] = {}
        """By the ranks on each node, 0 where they are on one; and by all ranks."""

    def add(self, place: Place, line: MonotoneCurve) -> None:
        """Add the first curve of a place."""
        self._lines.setdefault(_filling(place), {}).setdefault(place.ranks, line)

    def at(self, place: Place) -> MonotoneCurve | None:
        """Return the curve of a place, if there is one."""
        even = place.fewest == place.most or place.level == "node"
        return self._lines.get(_filling(place), {}).get(place.ranks) if even else None

    def nearest(self, place: Place) -> int:
        """Return of how many ranks the curve is that stands for a place."""
        filling = _filling(place)
        lines = self._lines[min(self._lines, key=lambda each: (abs(each - filling), each))]
        return _nearest(lines, place.ranks)

    @property
    def sizes_bytes(self) -> Numbers:
        """The sizes of all curves."""
        return np.unique(np.concatenate([line.sizes for own in self._lines.values() for line in own.values()]))

    def seconds(self, sizes_bytes: Numbers, place: Place) -> Numbers:
        """Return what collectives take; of ranks whose nodes are not known, the least that they may."""
        if place.level == "node" or not place.nodes:
            return self._least(sizes_bytes, place)
        found = self._between(sizes_bytes, place.fewest, place.ranks)
        if place.most == place.fewest:
            return found.seconds
        return found.seconds + (self._between(sizes_bytes, place.most, place.ranks).latency_s - found.latency_s)

    def _least(self, sizes_bytes: Numbers, place: Place) -> Numbers:
        if place.level == "node":
            return self._scaled_times(sizes_bytes, 0, place.ranks).seconds
        every = [self._scaled_times(sizes_bytes, each, place.ranks) for each in self._fillings()]
        latency_s = min(each.latency_s for each in every)
        # Between fillings that are known, seconds rise or fall.
        fewer = [one for one, filling in zip(every, self._fillings(), strict=True) if filling <= place.fewest]
        fewer.append(self._between(sizes_bytes, place.fewest, place.ranks))
        return np.asarray(latency_s + np.minimum.reduce([each.seconds - each.latency_s for each in fewer]))

    def _fillings(self) -> list[int]:
        return sorted({1, *self._lines})

    def _between(self, sizes_bytes: Numbers, filling: int, ranks: int) -> _Taken:
        """Return what is taken with so many ranks on every node, between fewer and more that are known."""
        known = self._fillings()
        below = max((each for each in known if each <= filling), default=known[0])
        above = min((each for each in known if each >= filling), default=known[-1])
        one = self._scaled_times(sizes_bytes, below, ranks)
        if below == above:
            return one
        other = self._scaled_times(sizes_bytes, above, ranks)
        part = (1 / below - 1 / filling) / (1 / below - 1 / above)
        seconds = one.seconds + part * (other.seconds - one.seconds)
        return _Taken(seconds, one.latency_s + part * (other.latency_s - one.latency_s))

    def _scaled_times(self, sizes_bytes: Numbers, filling: int, ranks: int) -> _Taken:
        """Return what is taken with as many ranks on every node as some curves have, by the nearest of these."""
        lines = self._lines.get(filling)
        if lines is None:
            return _Taken(self._ring_s(sizes_bytes, ranks), float(self._ring_s(np.zeros(1), ranks)[0]))
        nearest = _nearest(lines, ranks)
        seconds, latency_s = lines[nearest](sizes_bytes), float(lines[nearest].seconds[0])
        if nearest == ranks:
            return _Taken(seconds, latency_s)
        bytes_part = ((ranks - 1) / ranks) / ((nearest - 1) / nearest)
        scaled_s = latency_s * (ranks - 1) / (nearest - 1)
        return _Taken(scaled_s + np.maximum(0.0, seconds - latency_s) * bytes_part, scaled_s)


def _filling(place: Place) -> int:
    return 0 if place.level == "node" else place.fewest


def _nearest(lines: dict[int, MonotoneCurve], ranks: int) -> int:
    return min(lines, key=lambda count: (abs(count - ranks), count))
