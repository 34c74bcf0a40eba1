"""Memory that is freed is kept where asked for."""

import sys

import pytest

from suite import warm

SCRIPT = """
import resource, sys
from autopar.ranks.allocator import keep_pages, kept_pages
import torch

def step():
    held = [torch.empty(16 * 2**20).fill_(1.0) for _ in range(3)]

def taken():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def faults():
    # The heap grows for a few steps, until all pieces fit into what was freed.
    return min([taken() for _ in range(6)][3:])

found = [faults()]
with kept_pages():
    found.append(faults())
found.append(faults())
keep_pages()
with kept_pages():
    pass
found.append(faults())
print(*found)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_pages_of_what_is_freed_are_kept_where_asked_for_and_nobody_has_said_how_to_allocate() -> None:
    (usual, kept, _, lasting), (left, left_kept, _, left_lasting) = (
        map(int, warm.run([sys.executable, "-c", SCRIPT], env=each, capture_output=True, check=True).stdout.split())
        for each in ({}, {"MALLOC_ARENA_MAX": "4"})
    )
    # What is kept for good is kept behind a context, too.
    # 192 MB in pieces of 64: 4 KiB a page, or 2 MiB where the kernel has huge ones.
    assert usual > 90
    assert kept < usual / 10
    assert lasting < usual / 10
    assert min(left_kept, left_lasting) > left / 2
