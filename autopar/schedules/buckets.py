"""Buckets: which layers' gradients are reduced together, so that small ones do not each pay a latency."""

from __future__ import annotations

from collections.abc import Sequence

LARGEST_BYTES = 25 * 2**20
"""PyTorch DistributedDataParallel's default bucket."""
_SMALLEST_BYTES = 2**20
"""Its first bucket: below this, latency outweighs what an earlier start gains."""
_SHARES = 8
"""Into how many buckets a small stage is divided: only the last one's reduction cannot overlap the backward."""


def bucket_limit_bytes(total_bytes: int) -> int:
    """Return the most bytes that a bucket of a stage with so many bytes of gradients holds."""
    return min(LARGEST_BYTES, max(_SMALLEST_BYTES, total_bytes // _SHARES))


def buckets(sizes_bytes: Sequence[int]) -> list[list[int]]:
    """Group a stage's layers, given their gradients' bytes, in the order in which a backward finishes them.

    Indices run from the last layer to the first; a bucket closes before it would exceed the limit, and a larger layer
    has one of its own. Layers without gradients are in none. The planner prices what the runtime reduces.

    >>> buckets([30 * 2**20, 2**20, 0, 2**20])
    [[3, 1], [0]]
    """
    limit_bytes = bucket_limit_bytes(sum(sizes_bytes))
    found: list[list[int]] = []
    filled = 0
    for index in range(len(sizes_bytes) - 1, -1, -1):
        size = sizes_bytes[index]
        if size == 0:
            continue
        if not found or filled + size > limit_bytes:
            found.append([])
            filled = 0
        found[-1].append(index)
        filled += size
    return found
