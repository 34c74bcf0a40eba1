"""ZB-H1, ZB-H2 and ZB-V against the closed forms of their paper."""

import pytest

from autopar.schedules.order import holdings, in_flight
from timed import Times, orders, timed

CASES = {
    "1f1b": lambda p, f, i, w: (p - 1) * (f + i + w),
    "zb-h1": lambda p, f, i, w: (p - 1) * (f + i - w),
    "zb-h2": lambda p, f, i, w: (p - 1) * (f + i - 2 * w),
}
"""The most that a group idles between its first computation and its last; f, i >= w and f + i >= 2 w."""


@pytest.mark.parametrize("times", [Times(1, 1, 1), Times(10, 12, 9), Times(10, 11.5, 9.3), Times(3, 2, 1)])
@pytest.mark.parametrize("schedule", CASES)
def test_a_group_idles_as_long_as_the_paper_says(schedule: str, times: Times) -> None:
    for groups in (1, 2, 3, 5, 8):
        for micro_batches in (2 * groups, 3 * groups + 1, 32):
            found = timed(orders(schedule, groups, 1, micro_batches), groups, times)
            assert max(found.idle_s) == pytest.approx(CASES[schedule](groups, *times), abs=1e-9)


@pytest.mark.parametrize("groups", [1, 2, 3, 5, 8])
def test_zb_v_does_not_idle_where_forward_and_halves_take_equally_long(groups: int) -> None:
    for micro_batches in (2 * groups, 2 * groups + 1, 32):
        found = timed(orders("zb-v", groups, 2, micro_batches), 2 * groups, Times(1, 1, 1))
        assert found.idle_s == [0] * groups
        assert found.step_s == 6 * micro_batches + groups - 1


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
