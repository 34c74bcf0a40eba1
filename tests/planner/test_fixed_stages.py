"""Stages that a user writes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import UsageError
from autopar.planner.candidate import Candidate, Family, place
from autopar.planner.constraints import parse

NAMES = ["wte", "h.0", "h.1", "h.2", "ln-f", "head"]


@pytest.mark.parametrize(
    ("text", "cuts", "widths"),
    [
        ("0-5:2", (6,), (2,)),
        ("0-2:2,3-5:1", (3, 6), (2, 1)),
        ("wte-h.1:2, h.2-head:3", (3, 6), (2, 3)),
        ("wte-h.2,ln-f,head:2", (4, 5, 6), (1, 1, 2)),
        ("0-ln-f:1,5:2", (5, 6), (1, 2)),
    ],
)
def test_layers_may_be_indices_or_names_singly_or_as_ranges(
    text: str, cuts: tuple[int, ...], widths: tuple[int, ...]
) -> None:
    assert parse(text, NAMES)[:2] == (cuts, widths)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0-2:1,4-5:1", "h.2 is in no stage; stage 1 must begin with layer 3"),
        ("0-2:1", "h.2..head (layers 3-5) is in no stage"),
        ("0-2:1,2-5:1", "layer 2 (h.1) is in two stages; stage 1 must begin with layer 3"),
        ("0-9:1", "names layer 9; the profile has layers 0..5"),
        ("wte-h.7:1", "no layer is called 'h.7'; nearest: h."),
        ("0-5:0", "write layers:replicas"),
        ("0-5:-1", "write layers:replicas"),
        ("0-5:x", "write layers:replicas"),
        ("", "write layers:replicas"),
        ("0-2:1,,3-5:1", "write layers:replicas"),
        ("3-1:1", "ends before it begins"),
        ("hed", "nearest: head"),
    ],
)
def test_gaps_overlaps_and_unknown_layers_are_refused_with_what_to_write(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text, NAMES)
    assert message in str(caught.value)


@given(st.data())
def test_the_text_of_a_candidate_reads_back_as_its_stages(data: st.DataObject) -> None:
    layers = data.draw(st.integers(1, 12))
    cuts = (*sorted(data.draw(st.sets(st.integers(1, layers - 1)) if layers > 1 else st.just(set()))), layers)
    widths = tuple(data.draw(st.integers(1, 4)) for _ in cuts)
    candidate = Candidate(1, 4, "1f1b", place(Family(1, 4, "1f1b"), cuts, widths))
    assert parse(candidate.text(), [f"l{index}" for index in range(layers)])[:2] == (cuts, widths)
