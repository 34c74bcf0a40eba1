"""Which indices of a parameter each part has, and what is no such thing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from autopar.formats.cuts import LayerSplit, ParameterCut

FUSED = ParameterCut(parameter="qkv", dim=0, parts=(((0, 4), (8, 12)), ((4, 8), (12, 16))))
SHARED = ParameterCut(parameter="keys", dim=1, parts=(((0, 3),), ((0, 3),), ((3, 6),), ((3, 6),)))


KEYS = ParameterCut(parameter="qkv", dim=0, parts=(((0, 2), (4, 6)), ((2, 6),)))
"""Queries of each, and keys of both."""


def test_a_cut_says_what_parts_have_and_with_whom() -> None:
    assert FUSED.size == 16
    assert list(FUSED.pieces(1)) == [(4, 0, 4, (1,)), (12, 4, 4, (1,))]
    assert [piece.parts for part in range(4) for piece in SHARED.pieces(part)] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert list(KEYS.pieces(0)) == [(0, 0, 2, (0,)), (4, 2, 2, (0, 1))]
    assert list(KEYS.pieces(1)) == [(2, 0, 2, (1,)), (4, 2, 2, (0, 1))]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((((0, 4),), ((4, 4),)), "indices must ascend"),
        ((((0, 4), (4, 6)), ((6, 8),)), "indices must ascend, with gaps"),
        ((((0, 4),), ((5, 8),)), "no part of 'w' has indices 4 to 4"),
        ((((1, 4),), ((4, 8),)), "no part of 'w' has indices 0 to 0"),
        ((((0, 4),),), "at least 2 items"),
        (((), ((0, 8),)), "at least 1 item"),
    ],
)
def test_parts_that_make_up_no_dimension_are_refused(parts: Any, said: str) -> None:  # noqa: ANN401
    with pytest.raises(ValidationError, match=said):
        ParameterCut(parameter="w", dim=0, parts=parts)


def test_a_split_has_as_many_parts_as_it_says() -> None:
    assert LayerSplit(count=2, cuts=(FUSED,)).cuts == (FUSED,)
    with pytest.raises(ValidationError, match="4 parts of 'keys', for 2"):
        LayerSplit(count=2, cuts=(FUSED, SHARED))


@given(st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=4, max_size=24))
def test_any_division_of_indices_is_told_back(holders: list[set[int]]) -> None:
    """Every index is on some parts, and every part has some."""
    holders = [*holders, {0, 1, 2, 3}]
    own = [[index for index, parts in enumerate(holders) if part in parts] for part in range(4)]
    cut = ParameterCut(parameter="w", dim=0, parts=tuple(map(_intervals, own)))
    assert cut.size == len(holders)
    for part, indices in enumerate(own):
        found: list[int] = []
        for piece in cut.pieces(part):
            assert piece.offset == len(found)
            found += range(piece.start, piece.start + piece.size)
            assert all(tuple(sorted(holders[index])) == piece.parts for index in found[piece.offset :])
        assert found == indices


def _intervals(indices: list[int]) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for index in indices:
        if found and found[-1][1] == index:
            found[-1] = (found[-1][0], index + 1)
        else:
            found.append((index, index + 1))
    return tuple(found)
