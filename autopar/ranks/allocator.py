"""Allocator: what the C library does with memory that is freed.

glibc gives large pieces back to the system at once, and takes them again page by page in the next step, each page
zeroed by the kernel: a step that frees what it has held pays for it anew every time. Ranks, and who measures layers for
them, keep it instead.

Why: docs/design/decisions.md, "Ranks: Ranks keep the pages that they free".
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Parameters of mallopt(3): how much may be free at the heap's end, and how many pieces have pages of their own."""
_MOST, _USUAL_TRIM, _USUAL_MMAP = 2**31 - 1, 128 * 1024, 65536


_lasting = False
"""Whether this process keeps pages until it ends."""


def keep_pages() -> None:
    """Have glibc keep what this process frees, unless its user has said how it allocates (``MALLOC_...``)."""
    global _lasting
    _lasting = True
    _set_options(_MOST, 0)


@contextmanager
def kept_pages() -> Iterator[None]:
    """Return the context in which glibc keeps what is freed; behind it, it does by default, or :func:`keep_pages`."""
    _set_options(_MOST, 0)
    try:
        yield
    finally:
        if not _lasting:
            _set_options(_USUAL_TRIM, _USUAL_MMAP)


def _set_options(trim_bytes: int, mapped_pieces: int) -> None:
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    # Another C library, or an allocator in its place, has none, or takes no notice.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, trim_bytes)
        mallopt(_MMAP_MAX, mapped_pieces)
