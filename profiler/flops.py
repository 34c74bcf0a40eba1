"""Flops: the operations of a layer's forward and backward, counted while whatever device there is runs them.

Counted are products of matrices, convolutions and attention, two operations for each multiplication, as torch counts
them. An attention's backward runs its first product again; that is left out, since a recomputation is none of the
model's own work: its other four products are twice those of its forward.
"""

from __future__ import annotations

from autopar.capture.model.operations import OperationCount
from autopar.profiler.layer_runs import LayerPass


def flops_of(forward: OperationCount, backward: OperationCount) -> int:
    """Return the operations of a forward and a backward that were counted."""
    attention = 2 * forward.attention if backward.attention else 0
    return forward.products + forward.attention + backward.products + attention


def pass_flops(work: LayerPass) -> int:
    """Run a layer forward and backward; return the operations of both."""
    with OperationCount() as forward:
        work.forward()
    work.prepare_backward()
    with OperationCount() as backward:
        work.backward()
    return flops_of(forward, backward)
