"""Timetables against a simulation of equal times."""

import pytest

from autopar.formats.stage import group_of, layout_of
from autopar.schedules import SCHEDULES
from autopar.schedules.timetable import draw, timetable
from timed import Times, orders, timed

CHUNKS = {"interleaved": 2, "zb-v": 2, "dualpipe-v": 2}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "zb-h2", "zb-v"])
def test_a_timetable_takes_the_slots_that_a_simulation_of_equal_times_says(schedule: str) -> None:
    for groups, micro_batches in ((1, 1), (2, 3), (3, 7), (5, 12)):
        stages = groups * CHUNKS.get(schedule, 1)
        ordered = orders(schedule, groups, CHUNKS.get(schedule, 1), micro_batches)
        rows = timetable(schedule, stages, micro_batches, groups=groups)
        halves = any(kind == "W" for order in ordered for kind, *_ in order)
        # Whole backwards are drawn in one slot where there are no halves.
        half_s = 1 if halves else 0.5
        assert len(rows[0]) == timed(ordered, stages, Times(1, half_s, half_s)).step_s


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_computation_stands_in_the_slots_after_those_that_it_needs(schedule: str) -> None:
    for groups, micro_batches in ((1, 1), (2, 4), (3, 9), (4, 8)):
        stages = groups * CHUNKS.get(schedule, 1)
        rows = timetable(schedule, stages, micro_batches, groups=groups)
        first: dict[tuple[str, int, int], int] = {}
        last: dict[tuple[str, int, int], int] = {}
        for group, row in enumerate(rows):
            for slot, computation in enumerate(row):
                if computation is not None:
                    assert group_of(layout_of(schedule), computation[1], groups) == group
                    first.setdefault(computation, slot)
                    last[computation] = slot
        for stage in range(stages):
            for index in range(micro_batches):
                forward, whole, half = ((kind, stage, index) for kind in "FBI")
                backward = whole if whole in first else half
                assert ("W", stage, index) in first or backward == whole
                assert last[forward] < first[backward]
                if backward == half:
                    assert last[half] < first["W", stage, index]
                if stage + 1 < stages:
                    behind = next(each for kind in "BI" if (each := (kind, stage + 1, index)) in first)
                    assert last[forward] < first["F", stage + 1, index]
                    assert last[behind] < first[backward]


def test_a_pipeline_of_two_is_drawn_as_by_hand() -> None:
    assert draw("gpipe", 2, 2).splitlines() == ["stage 0: F0 F1 .  .  B0 B1", "stage 1: .  F0 F1 B0 B1 ."]
