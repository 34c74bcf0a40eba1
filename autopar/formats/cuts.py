"""Cuts: which indices of a parameter each rank of a team has, and which tensors between layers ranks have slices of."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, NamedTuple, Self

from pydantic import Field, model_validator

from autopar.formats.document import Count, Index, Name, Record, fault

_Interval = tuple[Index, Count]
"""Indices ``start`` to ``stop - 1``."""


class CutPiece(NamedTuple):
    """Neighbouring indices of a dimension that the same parts have."""

    start: int
    """In the whole."""
    offset: int
    """Of the first of them within a part."""
    size: int
    """How many there are."""
    parts: tuple[int, ...]
    """All that have them; the first answers for them where each counts once."""


class ParameterCut(Record):
    """A parameter of which each part has some indices of one dimension.

    Where there are fewer keys than parts, several parts have the same ones, beside queries of their own or without.
    """

    parameter: Name
    """By the model's own name."""
    dim: Index
    """The dimension, from 0."""
    parts: tuple[Annotated[tuple[_Interval, ...], Field(min_length=1)], ...] = Field(min_length=2)
    """By part: intervals that ascend, with gaps between them."""

    @model_validator(mode="after")
    def _intervals_ascend(self) -> Self:
        for index, part in enumerate(self.parts):
            bounds = [bound for interval in part for bound in interval]
            rises = [low < high for low, high in pairwise(bounds)]
            if not all(rises):
                fault(f"parts[{index}]", f"indices must ascend, with gaps between intervals, found {list(part)}")
        reached = 0
        for start, stop in sorted(interval for part in self.parts for interval in part):
            if start > reached:
                fault("parts", f"no part of {self.parameter!r} has indices {reached} to {start - 1}")
            reached = max(reached, stop)
        return self

    @property
    def size(self) -> int:
        """How long the dimension is as a whole."""
        return max(stop for part in self.parts for _, stop in part)

    def pieces(self, part: int) -> Iterator[CutPiece]:
        """Yield what a part has, ascending, in pieces that the same parts have as a whole."""
        bounds = sorted({bound for each in self.parts for interval in each for bound in interval})
        offset = 0
        for start, stop in self.parts[part]:
            inside = [bound for bound in bounds if start <= bound <= stop]
            for low, high in pairwise(inside):
                parts = (at for at, each in enumerate(self.parts) if any(a <= low < b for a, b in each))
                yield CutPiece(low, offset, high - low, tuple(parts))
                offset += high - low


class SequenceCut(Record):
    """A tensor between layers of which each part has an even slice of one dimension (sequence parallelism)."""

    tensor: Name
    """By its name."""
    dim: Index
    """The dimension, from 0."""
