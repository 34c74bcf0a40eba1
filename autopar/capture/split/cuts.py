"""Which indices of a layer's parameters every part has, as plain numbers that a plan can keep.

    cuts = cuts_of(analysis, choose(analysis, 2))
    cuts["up_weight"]      # AttributeCut(dim=0, parts=(((0, 4), (8, 12)), ((4, 8), (12, 16))))

Of a fused matrix of queries, keys and values a part has a range of each. Where there are fewer key heads than parts,
several parts have the same ranges.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from torch import fx

from autopar.capture.split.analysis import Analysis
from autopar.capture.split.names import Name
from autopar.capture.split.rules import Axis, Dims, Part, Ranges


class AttributeCut(NamedTuple):
    """How a parameter is divided among the parts of a layer."""

    dim: int
    parts: tuple[Ranges, ...]
    """By part, its indices along that dimension."""


@dataclass(frozen=True, eq=False)
class Split:
    """Names that are split together, with the operators that are computed in parts."""

    names: tuple[Name, ...]
    counts: tuple[int, ...]
    """In how many parts each name is split."""
    region: frozenset[fx.Node]
    numbers_saved: float
    """How many numbers of parameters a part has less than the whole."""
    numbers_summed: int
    """How many are summed among parts, for a sample."""

    def part(self, index: int) -> Part:
        """Return what the rank of that index has: the last name's parts come first."""
        return make_part(self.names, self.counts, index)

    def parts(self) -> list[Part]:
        """Return what every rank has, in their order."""
        return [self.part(index) for index in range(prod(self.counts))]


def make_part(names: tuple[Name, ...], counts: tuple[int, ...], index: int) -> Part:
    """Return the part of an index among all pairs of parts of names; the last name's index runs fastest."""
    axes: list[Axis] = []
    for name, count in zip(reversed(names), reversed(counts), strict=True):
        index, own = divmod(index, count)
        axes.insert(0, Axis(name, own, count))
    return Part(tuple(axes))


def split_dim(dims: Dims, part: Part) -> int | None:
    """Return which dimension of a tensor is cut, if one is."""
    return next((place for place, dim in enumerate(dims) if part.splits(dim)), None)


def cuts_of(analysis: Analysis, splits: Iterable[Split]) -> dict[str, AttributeCut]:
    """Return how parameters are divided, by attribute; those that are whole on every part are left out.

    It takes the parameters' lengths times the number of parts.
    """
    found: dict[str, AttributeCut] = {}
    for split in splits:
        parts = split.parts()
        for attribute, dims in analysis.parameters.items():
            at = split_dim(dims, parts[0])
            if at is not None:
                found[attribute] = AttributeCut(at, tuple(part.ranges(dims[at]) for part in parts))
    return found
