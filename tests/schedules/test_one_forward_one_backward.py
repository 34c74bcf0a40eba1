"""1F1B, interleaved, against the closed form of its paper; depths of schedules with chunks against their orders."""

import pytest

from autopar.schedules import SCHEDULES
from autopar.schedules.order import in_flight
from timed import Times, orders, timed


@pytest.mark.parametrize("groups", range(1, 7))
@pytest.mark.parametrize(
    ("schedule", "chunks"), [("interleaved", 2), ("interleaved", 4), ("zb-v", 2), ("dualpipe-v", 2)]
)
def test_as_many_are_in_flight_as_the_orders_say(schedule: str, groups: int, chunks: int) -> None:
    for micro_batches in (*range(1, 4 * groups + 2), 8 * groups):
        found = SCHEDULES[schedule].warmups(groups, chunks, micro_batches)["all"]
        held = map(in_flight, orders(schedule, groups, chunks, micro_batches))
        assert dict(enumerate(found)) == {stage: depth for each in held for stage, depth in each.items()}


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2, 3, 5])
def test_interleaved_idles_for_one_of_its_stages_passes_per_group_behind(groups: int, chunks: int) -> None:
    for rounds in (1, 2, 5):
        found = timed(orders("interleaved", groups, chunks, rounds * groups), groups * chunks, Times(10, 12, 9))
        assert max(found.idle_s) == (groups - 1) * 31
