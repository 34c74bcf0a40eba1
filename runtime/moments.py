"""Moments: count, means and sums of squared deviations per channel, which can be pooled exactly.

A vector of 2 channels + 1 numbers: the count, the means, the sums of squared deviations from them. Pooling is that of
Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979, which does
not lose digits where means are large, as sums of squares do.
"""

from __future__ import annotations

import torch

from autopar.runtime.transport import Transport

__all__ = ["gathered", "pooled", "track", "unpacked"]


def unpacked(moments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return count, means and sums of squared deviations; of rows of moments, columns of them."""
    channels = moments.shape[-1] // 2
    count, means, squares = torch.split(moments, [1, channels, channels], dim=-1)
    return count, means, squares


def pooled(parts: torch.Tensor) -> torch.Tensor:
    """Return the moments of all samples together, given those of parts as rows; parts may be empty."""
    counts, means, squares = unpacked(parts)
    count = counts.sum(0)
    mean = (counts * means).sum(0) / count.clamp(min=1)
    return torch.cat([count, mean, (squares + counts * (means - mean) ** 2).sum(0)])


def gathered(
    own: torch.Tensor, transport: Transport, ranks: tuple[int, ...], rank: int, *, apart: bool = False
) -> torch.Tensor:
    """Return every rank's vector as a row, in the order of ``ranks``."""
    rows = own.new_zeros(len(ranks), own.numel())
    rows[ranks.index(rank)] = own
    transport.all_reduce(rows, ranks, apart=apart).wait()
    return rows


def track(running_mean: torch.Tensor, running_var: torch.Tensor, moments: torch.Tensor, momentum: float) -> None:
    """Move running statistics towards new ones, as ``torch.nn.BatchNorm`` does; the variance is the unbiased one."""
    count, mean, squares = unpacked(moments)
    variance = squares / (count - 1).clamp(min=1)
    running_mean.mul_(1 - momentum).add_(mean.to(running_mean.dtype), alpha=momentum)
    running_var.mul_(1 - momentum).add_(variance.to(running_var.dtype), alpha=momentum)
