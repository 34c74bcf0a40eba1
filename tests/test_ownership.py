"""Ownership: what replicas have in common, against every row of every micro-batch."""

import random
from collections import Counter
from itertools import accumulate

import pytest

from autopar.ownership import Division, even_shares, meetings, samples_of
from drawn import shares_of
from drawn_plans import chain, make
from stage_shares import FixedStageShares

TURNS = {"division": "round-robin", "shares": (8, 8)}


def _stage(rng: random.Random, rows: int, micro_batches: int) -> FixedStageShares:
    if rng.random() < 0.5:
        return FixedStageShares((rows,) * rng.randint(1, micro_batches), "round-robin")
    return FixedStageShares(shares_of(rng, rows, rng.randint(1, rows)))


def _owner(stage: FixedStageShares, row: int, micro_batch: int) -> int:
    """The replica that has a row of a micro-batch."""
    if stage.division == "round-robin":
        return micro_batch % len(stage.shares)
    return next(at for at, edge in enumerate(accumulate(stage.shares)) if row < edge)


def test_every_row_of_every_micro_batch_is_what_its_two_owners_alone_have_in_common() -> None:
    turning = 0
    for seed in range(300):
        rng = random.Random(seed)
        rows, micro_batches = rng.randint(1, 8), rng.randint(1, 8)
        sending, receiving = (_stage(rng, rows, micro_batches) for _ in range(2))
        found = meetings(sending, receiving)
        counts = [0] * len(found)
        for micro_batch in range(micro_batches):
            carrying = [at for at, each in enumerate(found) if each.samples.has(micro_batch)]
            counts = [count + (at in carrying) for at, count in enumerate(counts)]
            for row in range(rows):
                here = [found[at] for at in carrying if found[at].samples.start <= row < found[at].samples.stop]
                owners = _owner(sending, row, micro_batch), _owner(receiving, row, micro_batch)
                assert [(each.sender, each.receiver) for each in here] == [owners], f"seed {seed}"
        assert [len(each.samples.of(micro_batches)) for each in found] == counts, f"seed {seed}"
        turning += sending.division == receiving.division == "round-robin"
    assert turning > 50


def test_a_plans_ownership_is_made_once_and_a_changed_copy_has_its_own() -> None:
    plan = make("1f1b", 4, [(4, 4), (3, 5)], [2, 1], chain(2))
    plan = plan.model_copy(update={"stages": (plan.stages[0].model_copy(update=TURNS), plan.stages[1])})
    assert plan.ownership is plan.ownership
    assert [own.micro_batches for own in plan.ownership.ranks] == [range(0, 4, 2), range(1, 4, 2), range(4), range(4)]
    for deep in (False, True):
        without = plan.model_copy(update={"weight_policy": "stash", "micro_batches": 1}, deep=deep)
        assert [(own.turn, own.turns) for own in without.ownership.ranks] == [(0, 2), (1, 2), (0, 1), (0, 1)]
    assert plan.ownership.ranks[1].micro_batches == range(1, 4, 2)


def test_shares_are_whole() -> None:
    for rows in range(1, 30):
        for replicas in range(1, rows + 1):
            shares = even_shares(rows, replicas)
            assert (len(shares), sum(shares)) == (replicas, rows)
            assert 1 <= min(shares) <= max(shares) <= min(shares) + 1
            free = FixedStageShares((rows / replicas,) * replicas)
            assert [each[:2] for each in meetings(free, free)] == [(at, at) for at in range(replicas)]


@pytest.mark.parametrize("division", ["split", "round-robin"])
def test_every_micro_batch_meets_all_replicas_that_split_it_or_one_of_those_that_take_turns(division: Division) -> None:
    for replicas in range(1, 5):
        for micro_batches in range(1, 8):
            met = Counter(number for each in samples_of((1,) * replicas, division) for number in each.of(micro_batches))
            assert met == dict.fromkeys(range(micro_batches), replicas if division == "split" else 1)
