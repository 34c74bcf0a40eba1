"""The heap that layers are timed on: as it is in the course of a training loop."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["settled"]

# Numbers of glibc's <malloc.h>.
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3
MIB = 2**20
PAD, USUAL_PAD = 64 * MIB, 128 * 1024


@contextmanager
def settled() -> Iterator[None]:
    """Keep glibc's heap in the block as it is in the course of a training loop.

    In such a loop the heap soon has what a step needs; only blocks of 32 MiB and more, which the system maps anew each
    time, make it wait. Steps of layers apart, and of several sizes in turn, would let the heap shrink between them, and
    later layers wait for pages as well: on one core, the last blocks of a small GPT took 27 ms instead of 18. So the
    heap keeps 64 MiB when it shrinks, and its limits are set to those that a loop raises them to. With that, layers'
    forwards meet as many page faults as the plain models' did, for GPT-2, BERT and a ResNet. Where the C library is
    another, nothing is changed.
    """
    library = None
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(None)
            library.mallopt(MMAP_THRESHOLD, 32 * MIB)
            library.mallopt(TRIM_THRESHOLD, 64 * MIB)
            library.mallopt(TOP_PAD, PAD)
    try:
        yield
    finally:
        if library is not None:
            with contextlib.suppress(AttributeError):
                library.mallopt(TOP_PAD, USUAL_PAD)
                library.malloc_trim(0)
