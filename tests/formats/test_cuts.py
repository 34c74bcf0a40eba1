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


def test_a_cut_says_what_parts_have() -> None:
    assert (FUSED.size, FUSED.size_of(1)) == (16, 8)
    assert list(FUSED.offsets(1)) == [(4, 0, 4), (12, 4, 4)]
    assert [SHARED.first_with(part) for part in range(4)] == [0, 0, 2, 2]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((((0, 4),), ((4, 4),)), "indices must ascend"),
        ((((0, 4), (4, 6)), ((6, 8),)), "indices must ascend, with gaps"),
        ((((0, 4),), ((5, 8),)), "must make up a dimension"),
        ((((0, 4),), ((3, 8),)), "must make up a dimension"),
        ((((1, 4),), ((4, 8),)), "must make up a dimension"),
        ((((0, 4),), ((4, 8),), ((0, 5),)), "must make up a dimension"),
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


@given(st.lists(st.integers(0, 3), min_size=8, max_size=24), st.data())
def test_any_division_of_indices_is_told_back(owners: list[int], data: st.DataObject) -> None:
    """Every index has an owner, and every owner as many parts as it likes."""
    owners = [0, 1, 2, 3, *owners]
    own = [[index for index, owner in enumerate(owners) if owner == part] for part in range(4)]
    intervals = [_intervals(indices) for indices in own]
    times = [data.draw(st.integers(1, 3)) for _ in range(4)]
    parts = tuple(each for each, count in zip(intervals, times, strict=True) for _ in range(count))
    cut = ParameterCut(parameter="w", dim=0, parts=parts)
    assert cut.size == len(owners)
    for at, part in enumerate(parts):
        assert [start + step for start, _, length in cut.offsets(at) for step in range(length)] == own[
            intervals.index(part)
        ]
        assert cut.size_of(at) == len(own[intervals.index(part)])
        assert parts[cut.first_with(at)] == part


def _intervals(indices: list[int]) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for index in indices:
        if found and found[-1][1] == index:
            found[-1] = (found[-1][0], index + 1)
        else:
            found.append((index, index + 1))
    return tuple(found)
