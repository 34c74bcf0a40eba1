"""Cuts: which indices of a parameter each rank of a team has, where the ranks compute a replica's layers together.

A profile says of every layer how it splits in so many parts; a plan takes that over for its stages, and ranks obey it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Self

from pydantic import Field, model_validator

from autopar.formats.document import Count, Index, Name, Record, fault

Interval = tuple[Index, Count]
"""Indices ``start`` to ``stop - 1``."""


class ParameterCut(Record):
    """A parameter of which each part has some indices of one dimension.

    Where a part of two heads has two groups of queries each, several parts have the same keys.
    """

    parameter: Name
    dim: Index
    parts: tuple[Annotated[tuple[Interval, ...], Field(min_length=1)], ...] = Field(min_length=2)
    """By part: intervals that ascend, with gaps between them."""

    @model_validator(mode="after")
    def _intervals_ascend(self) -> Self:
        for index, part in enumerate(self.parts):
            bounds = [bound for interval in part for bound in interval]
            rises = [low < high for low, high in pairwise(bounds)]
            if not all(rises):
                fault(f"parts[{index}]", f"indices must ascend, with gaps between intervals, found {list(part)}")
        different = sorted(set(self.parts))
        intervals = sorted(interval for part in different for interval in part)
        if intervals[0][0] != 0 or any(stop != start for (_, stop), (start, _) in pairwise(intervals)):
            fault("parts", f"the parts of {self.parameter!r} must make up a dimension, and be alike or apart")
        return self

    @property
    def size(self) -> int:
        """How long the dimension is as a whole."""
        return max(stop for part in self.parts for _, stop in part)

    def size_of(self, part: int) -> int:
        """Return how many indices a part has."""
        return sum(stop - start for start, stop in self.parts[part])

    def first_with(self, part: int) -> int:
        """Return the first part that has the same indices: of all that do, it answers for them."""
        return self.parts.index(self.parts[part])

    def offsets(self, part: int) -> Iterator[tuple[int, int, int]]:
        """Yield (start in the whole, start in the part, length) of a part's intervals."""
        offset = 0
        for start, stop in self.parts[part]:
            yield start, offset, stop - start
            offset += stop - start


class LayerSplit(Record):
    """How a layer's parameters are cut in so many parts; those that are not named are whole on every part."""

    count: Annotated[int, Field(ge=2)]
    cuts: tuple[ParameterCut, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _parts_are_so_many(self) -> Self:
        for index, cut in enumerate(self.cuts):
            if len(cut.parts) != self.count:
                fault(f"cuts[{index}].parts", f"{len(cut.parts)} parts of {cut.parameter!r}, for {self.count}")
        return self
