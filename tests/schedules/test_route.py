"""Routes against every row of every micro-batch, and buckets against their limit."""

import random
from itertools import accumulate, chain

from autopar.formats.plan import turns
from autopar.schedules import route as routing
from autopar.schedules.route import buckets, even_shares, routes
from drawn import shares_of
from stage_shares import FixedStageShares

MIB = 2**20


def _stage(rng: random.Random, rows: int, micro_batches: int) -> FixedStageShares:
    if rng.random() < 0.5:
        return FixedStageShares((rows,) * rng.randint(1, micro_batches), "round-robin")
    return FixedStageShares(shares_of(rng, rows, rng.randint(1, rows)))


def _owner(stage: FixedStageShares, row: int, micro_batch: int) -> int:
    """The replica that has a row of a micro-batch."""
    if stage.division == "round-robin":
        return micro_batch % len(stage.shares)
    return next(at for at, edge in enumerate(accumulate(stage.shares)) if row < edge)


def test_every_row_of_every_micro_batch_takes_the_one_route_between_its_owners() -> None:
    turning = 0
    for seed in range(300):
        rng = random.Random(seed)
        rows, micro_batches = rng.randint(1, 8), rng.randint(1, 8)
        sending, receiving = (_stage(rng, rows, micro_batches) for _ in range(2))
        found = routes(sending, receiving)
        counts = [0] * len(found)
        for micro_batch in range(micro_batches):
            carrying = [at for at, route in enumerate(found) if micro_batch % route.period == route.first]
            counts = [count + (at in carrying) for at, count in enumerate(counts)]
            for row in range(rows):
                here = [found[at] for at in carrying if found[at].start <= row < found[at].stop]
                owners = _owner(sending, row, micro_batch), _owner(receiving, row, micro_batch)
                assert [(each.sender, each.receiver) for each in here] == [owners], f"seed {seed}"
        assert [route.count(micro_batches) for route in found] == counts, f"seed {seed}"
        turning += sending.division == receiving.division == "round-robin"
    assert turning > 50


def test_shares_are_whole_and_buckets_hold_every_gradient_once() -> None:
    for rows in range(1, 30):
        for replicas in range(1, rows + 1):
            shares = even_shares(rows, replicas)
            assert (len(shares), sum(shares)) == (replicas, rows)
            assert 1 <= min(shares) <= max(shares) <= min(shares) + 1
            free = routes(
                FixedStageShares((rows / replicas,) * replicas), FixedStageShares((rows / replicas,) * replicas)
            )
            assert [(route.sender, route.receiver) for route in free] == [(at, at) for at in range(replicas)]
            taken = chain.from_iterable(turns("round-robin", replicas, each, rows) for each in range(replicas))
            assert sorted(taken) == list(range(rows))
    sizes = [10 * MIB, 10 * MIB, 10 * MIB, 0, 300 * MIB, 1, 5]
    limit = routing.bucket_limit_bytes(sum(sizes))
    found = buckets(sizes)
    assert limit == 25 * MIB
    assert found == [[6, 5], [4], [2, 1], [0]]
    assert all(sum(sizes[index] for index in bucket) <= limit or len(bucket) == 1 for bucket in found)
    assert buckets([MIB] * 16) == [[index, index - 1] for index in range(15, 0, -2)]
    assert routing.bucket_limit_bytes(100) == MIB
    assert buckets([]) == buckets([0, 0]) == []
