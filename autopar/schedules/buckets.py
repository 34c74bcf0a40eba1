"""Buckets: which layers' gradients are reduced together, so that small ones do not each pay a latency."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["BUCKET_BYTES", "buckets"]

BUCKET_BYTES = 25 * 2**20
"""PyTorch DistributedDataParallel's default bucket; the planner prices what the runtime reduces."""


def buckets(sizes_bytes: Sequence[int]) -> list[list[int]]:
    """Group a stage's layers, given their gradients' bytes, in the order in which a backward finishes them.

    Indices run from the last layer to the first; a bucket closes before it would exceed :data:`BUCKET_BYTES`, and a
    larger layer has one of its own. Layers without gradients are in none.

    >>> buckets([30 * 2**20, 2**20, 0, 2**20])
    [[3, 1], [0]]
    """
    found: list[list[int]] = []
    filled = 0
    for index in range(len(sizes_bytes) - 1, -1, -1):
        size = sizes_bytes[index]
        if size == 0:
            continue
        if not found or filled + size > BUCKET_BYTES:
            found.append([])
            filled = 0
        found[-1].append(index)
        filled += size
    return found
