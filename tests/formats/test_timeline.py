"""Where ranks' time went, and what actions take by themselves, against timelines drawn by hand and slower counts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from autopar.errors import FileError
from autopar.formats.program import Action
from autopar.formats.timeline import (
    Timeline,
    TimeUse,
    compare_times,
    medians,
    own_times,
    time_use,
    time_use_between,
)
from drawn_timelines import timeline

# Rank 1 waits from 0 until the send begins at 3, and then for the transfer until 5; what follows is told likewise.
DRAWN = (
    "F0@0 1 3  S0@0>1@1 3 3.5  F1@0 3.5 5.5  S1@0>1@1 5.5 6  RG0@0<1@1 6 9  B0@0 9 11  U@0 11 12",
    "R0@1<0@0 0 5  F0@1 5 6  B0@1 6 8  SG0@1>0@0 8 8.5  R1@1<0@0 8.5 8.5  A@1 7 10  U@1 10 10.5",
)


def test_a_measured_step_is_parted_as_it_was_drawn() -> None:
    first, second = time_use_between([timeline("measured", *DRAWN)], 0, 13)
    assert first == TimeUse(compute_s=6, update_s=1, reduce_s=0, waiting_s=2, transfer_s=2, idle_s=2)
    # The reduction's first second is hidden by the backward; sending counts as reducing while both go on.
    assert second == TimeUse(compute_s=3, update_s=0.5, reduce_s=2, waiting_s=3, transfer_s=2, idle_s=2.5)


def test_a_simulated_send_occupies_no_rank() -> None:
    rows = ("F0@0 0 2  S0@0>1@1 2 5  U@0 2 2", "R0@1<0@0 0 5  F0@1 5 6  U@1 6 7")
    first, second = time_use(timeline("simulated", *rows))
    assert first == TimeUse(compute_s=2, idle_s=5)
    assert second == TimeUse(compute_s=1, update_s=1, waiting_s=2, transfer_s=3)


def test_what_a_rank_that_is_ahead_does_of_the_next_step_counts_in_the_one_that_others_end() -> None:
    this = timeline("measured", "F0@0 0 2  S0@0>1@1 2 3", "R0@1<0@0 0 4  F0@1 4 8")
    after = timeline("measured", "F0@0 3 5  S0@0>1@1 5 6", "R0@1<0@0 8 8  F0@1 8 12")
    first, second = time_use_between([this, after], 1, 8)
    assert first == TimeUse(compute_s=3, transfer_s=2, idle_s=2)
    assert second == TimeUse(compute_s=4, waiting_s=1, transfer_s=2)


def test_a_message_counts_where_its_receiver_was_waiting_for_it_alone() -> None:
    own = own_times(timeline("measured", *DRAWN))
    forth, late, back = (Action.parse(text) for text in ("S0@0>1@1", "S1@0>1@1", "SG0@1>0@0"))
    assert own[0, forth] == 2
    # The receiver came after the message; nothing tells when that arrived.
    assert (0, late) not in own
    assert own[1, back] == 1
    assert own[1, Action.parse("A@1")] == 3
    assert own[0, Action.parse("F1@0")] == 2
    assert not any(action.kind in ("R", "RG") for _, action in own)


def test_a_message_behind_another_one_of_its_queue_does_not_count() -> None:
    rows = (
        "S0@0>1@1 0 0.1  S1@0>1@1 0.2 0.3",
        "R0@1<0@0 0 4  R1@1<0@0 4 5",
    )
    own = own_times(timeline("measured", *rows))
    assert own == {(0, Action.parse("S0@0>1@1")): 4}


def test_a_reduction_takes_from_when_its_last_rank_has_come() -> None:
    own = own_times(timeline("measured", "A@0 1 7", "A@0 4 7", "T0@1 2 3", "T0@2 2.5 3"))
    assert [own[rank, Action.parse("A@0")] for rank in (0, 1)] == [3, 3]
    assert own[2, Action.parse("T0@1")] == own[3, Action.parse("T0@2")] == 0.5


def test_measured_over_predicted_is_the_median_of_the_actions_that_both_know() -> None:
    actions = [Action("F", 0, index) for index in range(3)]
    measured = medians(
        {(0, action): (step + 1.0) * (index + 1) for index, action in enumerate(actions)} for step in (0, 1, 2)
    )
    assert [measured[0, action] for action in actions] == [2, 4, 6]
    predicted = {(0, action): 2.0 for action in actions} | {(0, Action("U", 0)): 0.0, (0, Action("B", 0, 0)): 1.0}
    (row,) = compare_times(measured, predicted)
    assert (row.kind, row.actions, row.measured_s, row.predicted_s, row.ratio) == ("F", 3, 4, 2, 2)


@pytest.mark.parametrize("seed", range(20))
def test_parts_sum_to_the_step_and_agree_with_a_count_instant_by_instant(seed: int) -> None:
    draw = random.Random(seed)
    made = Timeline("measured")
    texts = ("F0@0", "B0@0", "W0@0", "U@0", "A@0", "S0@0>1@1", "RG0@0<1@1", "SG0@1>0@0", "R0@1<0@0")
    spans = []
    for text in texts:
        action = Action.parse(text)
        start = draw.randrange(40)
        spans.append((action.stage, action, start, start + draw.randrange(20)))
        made.add(*spans[-1])
    where = time_use_between([made], 0, 70)
    sent = {Action.parse("S0@0>1@1"): 0, Action.parse("SG0@1>0@0"): 0}
    sent |= {action: start for _, action, start, _ in spans if action in sent}
    begun = {Action.parse("R0@1<0@0"): sent[Action.parse("S0@0>1@1")]}
    begun |= {Action.parse("RG0@0<1@1"): sent[Action.parse("SG0@1>0@0")]}
    for rank in range(2):
        counted = dict.fromkeys(TimeUse._fields, 0)
        for instant in range(70):
            here = [each for each in spans if each[0] == rank and each[2] <= instant < each[3]]
            kinds = {each[1].kind for each in here}
            waits = any(each[1] in begun and instant < begun[each[1]] for each in here)
            if kinds & set("FBW"):
                counted["compute_s"] += 1
            elif "U" in kinds:
                counted["update_s"] += 1
            elif "A" in kinds:
                counted["reduce_s"] += 1
            elif waits:
                counted["waiting_s"] += 1
            elif kinds:
                counted["transfer_s"] += 1
            else:
                counted["idle_s"] += 1
        assert where[rank] == TimeUse(**counted)
        assert sum(where[rank]) == pytest.approx(70)


def test_what_was_held_is_written_and_read(tmp_path: Path) -> None:
    made = timeline("rehearsed", "F0@0 0 1", "F0@1 0 1")
    made.memory[1] = [(0.0, 5), (0.5, 7), (0.75, 5)]
    made.limits_bytes[1] = 9
    made.save(tmp_path / "trace.json")
    again = Timeline.load(tmp_path / "trace.json")
    assert (again.memory, again.limits_bytes, again.peaks_bytes()) == (made.memory, {1: 9}, {1: 7})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (('"bytes": 5', '"bytes": -5'), r"traceEvents\[\d+\]\.args\.bytes: expected the bytes"),
        (('"name": "memory"', '"name": "other"'), r"traceEvents\[\d+\]\.args\.bytes: expected the bytes"),
        (
            ('"limits_bytes": {"1": 9}', '"limits_bytes": {"one": 9}'),
            r"limits_bytes: expected bytes by rank",
        ),
        (('"limits_bytes": {"1": 9}', '"limits_bytes": [9]'), r"limits_bytes: expected bytes by rank"),
    ],
)
def test_counters_that_are_none_are_refused(tmp_path: Path, edit: tuple[str, str], message: str) -> None:
    made = timeline("rehearsed", "F0@0 0 1", "F0@1 0 1")
    made.memory[1] = [(0.0, 5)]
    made.limits_bytes[1] = 9
    path = tmp_path / "trace.json"
    made.save(path)
    assert edit[0] in path.read_text()
    path.write_text(path.read_text().replace(*edit))
    with pytest.raises(FileError, match=message):
        Timeline.load(path)


def test_a_rehearsed_step_is_parted_as_a_measured_one() -> None:
    rehearsed, measured = (time_use(timeline(origin, *DRAWN)) for origin in ("rehearsed", "measured"))
    assert rehearsed == measured
