"""Buckets against their limit."""

from autopar.schedules.buckets import bucket_limit_bytes, buckets

MIB = 2**20


def test_buckets_hold_every_gradient_once() -> None:
    sizes = [10 * MIB, 10 * MIB, 10 * MIB, 0, 300 * MIB, 1, 5]
    limit = bucket_limit_bytes(sum(sizes))
    found = buckets(sizes)
    assert limit == 25 * MIB
    assert found == [[6, 5], [4], [2, 1], [0]]
    assert all(sum(sizes[index] for index in bucket) <= limit or len(bucket) == 1 for bucket in found)
    assert buckets([MIB] * 16) == [[index, index - 1] for index in range(15, 0, -2)]
    assert bucket_limit_bytes(100) == MIB
    assert buckets([]) == buckets([0, 0]) == []
