"""Orders against those of torch's pipelining: sound by its own checks, and no longer than its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from autopar.formats.plan import group_of, layout_of
from timed import Times, orders, timed

schedules: Any = pytest.importorskip("torch.distributed.pipelining.schedules")

Ranks = Mapping[int, Sequence[Any]]
CASES = [(groups, micro_batches) for groups in (1, 2, 3, 4, 6) for micro_batches in (2 * groups, 2 * groups + 3, 18)]
OWN = {
    "interleaved": "ScheduleInterleaved1F1B",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}


def in_torch(schedule: str, groups: int, chunks: int, micro_batches: int) -> dict[int, list[Any]]:
    return {
        rank: [schedules._Action(stage, schedules._ComputationType.from_str(kind), each) for kind, stage, each in order]
        for rank, order in enumerate(orders(schedule, groups, chunks, micro_batches))
    }


def slots(ranks: Ranks, schedule: str, groups: int, chunks: int) -> int:
    """Return how many slots torch's simulation takes, one for every computation or message."""
    stages = groups * chunks

    def rank_of(stage: int) -> int:
        return group_of(layout_of(schedule), stage, groups)

    with_messages = schedules._add_send_recv(
        {rank: [action for action in ranks[rank] if action] for rank in ranks}, rank_of, stages
    )
    return max(map(len, schedules._simulate_comms_compute(with_messages, rank_of, stages).values()))


def theirs(schedule: str, groups: int, chunks: int, micro_batches: int) -> dict[int, list[Any]]:
    """Return the order of torch's own schedule of this kind; it needs no stages of modules for that."""
    kind = getattr(schedules, OWN[schedule])
    asked = SimpleNamespace(
        pp_group_size=groups,
        n_local_stages=chunks,
        num_stages=groups * chunks,
        _num_stages=groups * chunks,
        _n_microbatches=micro_batches,
        number_of_rounds=max(1, micro_batches // groups),
        microbatches_per_round=micro_batches // max(1, micro_batches // groups),
    )
    return {rank: _plain(kind._calculate_single_rank_operations(asked, rank)) for rank in range(groups)}


def _plain(order: Sequence[Any]) -> list[Any]:
    """Lay what torch would run side by side one after the other."""
    return [each for action in order if action for each in (action.sub_actions or (action,))]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"])
def test_torchs_checks_find_every_order_sound(schedule: str) -> None:
    chunks = 1 if layout_of(schedule) == "line" else 2
    for groups, micro_batches in [*CASES, (4, 1), (4, 3)]:
        ranks = in_torch(schedule, groups, chunks, micro_batches)
        schedules._validate_schedule(ranks, groups, groups * chunks, micro_batches)
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
def test_a_vees_order_is_torchs_but_for_whole_backwards_of_the_first_stage(schedule: str) -> None:
    for groups, micro_batches in CASES:
        ours, other = in_torch(schedule, groups, 2, micro_batches), theirs(schedule, groups, 2, micro_batches)
        for rank in range(groups):
            assert _halved(ours[rank]) == _halved(other[rank])


def _halved(order: Sequence[Any]) -> list[str]:
    return [
        half
        for text in map(str, order)
        for half in ((text.replace("B", "I"), text.replace("B", "W")) if "B" in text else (text,))
    ]
