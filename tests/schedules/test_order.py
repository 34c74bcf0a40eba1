"""Schedules with backwards in halves against the closed forms of their papers."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest

from autopar.schedules import SCHEDULES, interleaved
from autopar.schedules.order import depths, holdings, in_flight
from timed import Times, orders, timed

CASES = {
    "1f1b": lambda p, f, i, w: (p - 1) * (f + i + w),
    "zb-h1": lambda p, f, i, w: (p - 1) * (f + i - w),
    "zb-h2": lambda p, f, i, w: (p - 1) * (f + i - 2 * w),
}
"""The most that a group idles between its first computation and its last; f, i >= w and f + i >= 2 w."""
HALVED = ("zb-h1", "zb-h2", "zb-v", "dualpipe-v")
CHUNKS = defaultdict(lambda: 1, {"zb-v": 2, "dualpipe-v": 2})


@pytest.mark.parametrize("groups", range(1, 7))
@pytest.mark.parametrize("chunks", range(2, 5))
def test_interleaved_holds_what_its_order_says(groups: int, chunks: int) -> None:
    for micro_batches in (*range(1, 3 * groups + 2), 64):
        found = SCHEDULES["interleaved"].warmups(groups, chunks, micro_batches)["all"]
        assert found == depths(interleaved.order, "loop", groups, chunks, micro_batches)


@pytest.mark.parametrize("groups", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("times", [Times(1, 1, 1), Times(10, 12, 9), Times(10, 11.5, 9.3), Times(3, 2, 1)])
@pytest.mark.parametrize("schedule", CASES)
def test_a_group_idles_as_long_as_the_paper_says(schedule: str, times: Times, groups: int) -> None:
    for micro_batches in (2 * groups, 3 * groups + 1, 32):
        found = timed(orders(schedule, groups, 1, micro_batches), groups, times)
        assert max(found.idle_s) == pytest.approx(CASES[schedule](groups, *times), abs=1e-9)


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2, 3, 5])
def test_interleaved_idles_for_one_of_its_stages_passes_per_group_behind(groups: int, chunks: int) -> None:
    for rounds in (1, 2, 5):
        found = timed(orders("interleaved", groups, chunks, rounds * groups), groups * chunks, Times(10, 12, 9))
        assert max(found.idle_s) == (groups - 1) * 31


@pytest.mark.parametrize("groups", [1, 2, 3, 5, 8])
def test_zb_v_does_not_idle_where_forward_and_halves_take_equally_long(groups: int) -> None:
    for micro_batches in (2 * groups, 2 * groups + 1, 32):
        found = timed(orders("zb-v", groups, 2, micro_batches), 2 * groups, Times(1, 1, 1))
        assert found.idle_s == [0] * groups
        assert found.step_s == 6 * micro_batches + groups - 1


@pytest.mark.parametrize("groups", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("times", [Times(1, 1, 1), Times(10, 12, 9), Times(10, 11.5, 9.3), Times(3, 2, 1)])
def test_dualpipe_v_idles_no_longer_than_the_original(times: Times, groups: int) -> None:
    f, i, w = times
    for micro_batches in (2 * groups, 3 * groups + 1, 32):
        found = timed(orders("dualpipe-v", groups, 2, micro_batches), 2 * groups, times)
        assert max(found.idle_s) <= (groups - 1) * (f + 2 * (i + w) - 3 * w) + 1e-9


@pytest.mark.parametrize("micro_batches", [1, 3, 8, 20])
@pytest.mark.parametrize("groups", [1, 2, 3, 8])
def test_zb_h1_holds_no_more_than_1f1b_and_zb_h2_twice_as_much(groups: int, micro_batches: int) -> None:
    first = min(groups, micro_batches)
    for group, order in enumerate(orders("zb-h1", groups, 1, micro_batches)):
        assert in_flight(order) == {group: min(groups - group, micro_batches)}
        holding = holdings(order)[group]
        assert holding.micro_batches == first
        # One more is pending for the moment in which its input half is done and the oldest one's weight half begins.
        assert holding.pending == (min(group + 1, micro_batches) if group else 0)
    for group, order in enumerate(orders("zb-h2", groups, 1, micro_batches)):
        assert in_flight(order) == {group: min(2 * (groups - group) - 1, micro_batches)}
        assert holdings(order)[group].micro_batches == min(2 * groups - 1, micro_batches)


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipe-v"])
@pytest.mark.parametrize("micro_batches", [1, 3, 8, 20])
@pytest.mark.parametrize("groups", [1, 2, 3, 8])
def test_a_vee_holds_what_its_stages_place_says(groups: int, micro_batches: int, schedule: str) -> None:
    for order in orders(schedule, groups, 2, micro_batches):
        for stage, depth in in_flight(order).items():
            assert depth == min(2 * groups - stage, micro_batches)
        both = _together(order)
        # Of half a stage each: the memory of 1F1B's first stage, and of DualPipe's one micro-batch more.
        assert both <= 2 * groups + (schedule == "dualpipe-v")


def _together(order: list[tuple[str, int, int]]) -> int:
    """Return the most micro-batches of all stages that a group keeps something of."""
    return holdings([(kind, 0, 2 * micro_batch + stage) for kind, stage, micro_batch in order])[0].micro_batches


@pytest.mark.parametrize("micro_batches", [1, 2, 5, 12])
@pytest.mark.parametrize("groups", [1, 2, 3, 6])
@pytest.mark.parametrize("schedule", HALVED)
def test_gradients_add_up_in_micro_batch_order(schedule: str, groups: int, micro_batches: int) -> None:
    for order in orders(schedule, groups, CHUNKS[schedule], micro_batches):
        for stage in {stage for _, stage, _ in order}:
            for kinds in ("F", "BI", "BW"):
                found = [micro_batch for kind, each, micro_batch in order if each == stage and kind in kinds]
                assert found == list(range(micro_batches))


@pytest.mark.parametrize("schedule", HALVED)
def test_the_first_stage_splits_no_backward_in_vain(schedule: str) -> None:
    for micro_batches in (1, 4, 9):
        order = orders(schedule, 4, CHUNKS[schedule], micro_batches)[0]
        assert not any(
            (first[0], second[0]) == ("I", "W") and first[1:] == second[1:] and first[1] == 0
            for first, second in pairwise(order)
        )
