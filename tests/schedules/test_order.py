"""Orders with backwards in halves: what they hold, how long they idle, and the order in which gradients add up."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest

from autopar.schedules.order import holdings, in_flight
from timed import Times, orders, timed

HALVED = ("zb-h1", "zb-h2", "zb-v", "dualpipe-v")
CHUNKS = defaultdict(lambda: 1, {"zb-v": 2, "dualpipe-v": 2})


@pytest.mark.parametrize("groups", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("times", [Times(1, 1, 1), Times(10, 12, 9), Times(10, 11.5, 9.3), Times(3, 2, 1)])
def test_dualpipe_v_idles_no_longer_than_the_original(times: Times, groups: int) -> None:
    f, i, w = times
    for micro_batches in (2 * groups, 3 * groups + 1, 32):
        found = timed(orders("dualpipe-v", groups, 2, micro_batches), 2 * groups, times)
        assert max(found.idle_s) <= (groups - 1) * (f + 2 * (i + w) - 3 * w) + 1e-9


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
