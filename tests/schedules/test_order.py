"""Orders: what they hold, in which order gradients add up; sound by torch's checks, and no longer than torch's own."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed.pipelining.schedules as torch_schedules

from autopar.formats.stage import group_of, layout_of
from autopar.schedules.order import holdings, in_flight
from timed import Times, orders, timed

HALVED = ("zb-h1", "zb-h2", "zb-v", "dualpipe-v")
CHUNKS = defaultdict(lambda: 1, {"zb-v": 2, "dualpipe-v": 2})


@pytest.mark.parametrize("schedule", HALVED)
def test_gradients_add_up_in_order_and_the_first_stage_splits_no_backward_in_vain(schedule: str) -> None:
    for groups, micro_batches in product((1, 2, 3, 6), (1, 2, 5, 12)):
        for order in orders(schedule, groups, CHUNKS[schedule], micro_batches):
            for stage in {stage for _, stage, _ in order}:
                for kinds in ("F", "BI", "BW"):
                    found = [micro_batch for kind, each, micro_batch in order if each == stage and kind in kinds]
                    assert found == list(range(micro_batches))
    for micro_batches in (1, 4, 9):
        order = orders(schedule, 4, CHUNKS[schedule], micro_batches)[0]
        assert not any(
            (first[0], second[0]) == ("I", "W") and first[1:] == second[1:] and first[1] == 0
            for first, second in pairwise(order)
        )


Ranks = Mapping[int, Sequence[Any]]
CASES = [(groups, micro_batches) for groups in (1, 2, 3, 4, 6) for micro_batches in (2 * groups, 2 * groups + 3, 18)]
OWN = {"interleaved": "ScheduleInterleaved1F1B", "zb-v": "ScheduleZBVZeroBubble", "dualpipe-v": "ScheduleDualPipeV"}


def in_torch(schedule: str, groups: int, chunks: int, micro_batches: int) -> dict[int, list[Any]]:
    return {
        rank: [
            torch_schedules._Action(stage, torch_schedules._ComputationType.from_str(kind), each)
            for kind, stage, each in order
        ]
        for rank, order in enumerate(orders(schedule, groups, chunks, micro_batches))
    }


def slots(ranks: Ranks, schedule: str, groups: int, chunks: int) -> int:
    """Return how many slots torch's simulation takes, one for every computation or message."""
    stages = groups * chunks

    def rank_of(stage: int) -> int:
        return group_of(layout_of(schedule), stage, groups)

    with_messages = torch_schedules._add_send_recv(
        {rank: [action for action in ranks[rank] if action] for rank in ranks}, rank_of, stages
    )
    return max(map(len, torch_schedules._simulate_comms_compute(with_messages, rank_of, stages).values()))


def theirs(schedule: str, groups: int, chunks: int, micro_batches: int) -> dict[int, list[Any]]:
    """Return the order of torch's own schedule of this kind; it needs no stages of modules for that."""
    kind = getattr(torch_schedules, OWN[schedule])
    asked = SimpleNamespace(
        pp_group_size=groups,
        n_local_stages=chunks,
        num_stages=groups * chunks,
        _num_stages=groups * chunks,
        _n_microbatches=micro_batches,
        number_of_rounds=max(1, micro_batches // groups),
        microbatches_per_round=micro_batches // max(1, micro_batches // groups),
    )
    ranks = [filter(None, kind._calculate_single_rank_operations(asked, rank)) for rank in range(groups)]
    # What torch would run side by side comes one after the other.
    return {at: [each for one in order for each in (one.sub_actions or (one,))] for at, order in enumerate(ranks)}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"])
def test_torchs_checks_find_every_order_sound(schedule: str) -> None:
    chunks = 1 if layout_of(schedule) == "line" else 2
    for groups, micro_batches in [*CASES, (4, 1), (4, 3)]:
        ranks = in_torch(schedule, groups, chunks, micro_batches)
        torch_schedules._validate_schedule(ranks, groups, groups * chunks, micro_batches)
        assert slots(ranks, schedule, groups, chunks) >= 2 * chunks * micro_batches


@pytest.mark.parametrize("times", [Times(1, 1, 1), Times(10, 11.5, 9.3)])
@pytest.mark.parametrize("schedule", OWN)
def test_no_order_takes_longer_than_torchs_own(schedule: str, times: Times) -> None:
    for groups, micro_batches in CASES:
        if schedule == "interleaved" and micro_batches % groups:
            continue
        other = [
            [(action.computation_type.value, action.stage_index, action.microbatch_index) for action in order]
            for order in theirs(schedule, groups, 2, micro_batches).values()
        ]
        ours = timed(orders(schedule, groups, 2, micro_batches), 2 * groups, times)
        assert ours.step_s <= timed(other, 2 * groups, times).step_s + 1e-9


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipe-v"])
def test_a_vee_is_torchs_but_for_its_first_stage_and_holds_what_its_place_says(schedule: str) -> None:
    for groups, micro_batches in CASES:
        ours, other = in_torch(schedule, groups, 2, micro_batches), theirs(schedule, groups, 2, micro_batches)
        for rank in range(groups):
            assert _halved(ours[rank]) == _halved(other[rank])
    for groups, micro_batches in product((1, 2, 3, 8), (1, 3, 8, 20)):
        for order in orders(schedule, groups, 2, micro_batches):
            for stage, depth in in_flight(order).items():
                assert depth == min(2 * groups - stage, micro_batches)
            # Of half a stage each: the memory of 1F1B's first stage, and of DualPipe's one micro-batch more.
            together = holdings([(kind, 0, 2 * micro_batch + stage) for kind, stage, micro_batch in order])[0]
            assert together.micro_batches <= 2 * groups + (schedule == "dualpipe-v")


def _halved(order: Sequence[Any]) -> list[str]:
    return [
        half
        for text in map(str, order)
        for half in ((text.replace("B", "I"), text.replace("B", "W")) if "B" in text else (text,))
    ]
