"""Recompute: a layer that keeps its inputs only, and runs forward again before its backward.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; the second run is torch's own checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.utils.checkpoint import checkpoint

__all__ = ["recomputed"]

Outputs = Sequence[torch.Tensor]


def recomputed(run: Callable[..., Outputs], inputs: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> Outputs:
    """Run a layer now, and once more when its backward needs what it would have kept.

    Args:
        run: the layer's forward; seeds its own random numbers, so that both runs draw the same.
        inputs: its tensors.
        buffers: what it may update in place; the second run leaves them as it finds them.
    """
    runs = 0

    def forward(*tensors: torch.Tensor) -> Outputs:
        nonlocal runs
        runs += 1
        if runs == 1:
            return run(*tensors)
        before = [buffer.clone() for buffer in buffers]
        try:
            return run(*tensors)
        finally:
            with torch.no_grad():
                for buffer, value in zip(buffers, before, strict=True):
                    buffer.copy_(value)

    result: Outputs = checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False)
    return result
