"""1F1B, interleaved, against the closed form of its paper, and its depths against its order."""

import pytest

from autopar.schedules import SCHEDULES
from autopar.schedules.one_forward_one_backward import interleaved_order
from autopar.schedules.order import depths
from timed import Times, orders, timed


@pytest.mark.parametrize("groups", range(1, 7))
@pytest.mark.parametrize("chunks", range(2, 5))
def test_interleaved_holds_what_its_order_says(groups: int, chunks: int) -> None:
    for micro_batches in (*range(1, 3 * groups + 2), 64):
        found = SCHEDULES["interleaved"].warmups(groups, chunks, micro_batches)["all"]
        assert found == depths(interleaved_order, "loop", groups, chunks, micro_batches)


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2, 3, 5])
def test_interleaved_idles_for_one_of_its_stages_passes_per_group_behind(groups: int, chunks: int) -> None:
    for rounds in (1, 2, 5):
        found = timed(orders("interleaved", groups, chunks, rounds * groups), groups * chunks, Times(10, 12, 9))
        assert max(found.idle_s) == (groups - 1) * 31
