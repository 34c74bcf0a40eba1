"""Finite: whether gradients are finite numbers, at the cost of a norm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

__all__ = ["all_finite", "first_not_finite"]


def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Tell whether every element is finite; a device is waited for once.

    >>> all_finite([torch.tensor([1.0, 2.0]), torch.tensor([1e30, 3e38])]), all_finite([torch.tensor([math.nan])])
    (True, False)
    """
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor.detach())
    return all(map(_finite, by_device.values()))


def first_not_finite(named: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """Return the name of the first tensor that has an element that is not finite; None where all are."""
    return next((name for name, tensor in named if not bool(torch.isfinite(tensor).all())), None)


def _finite(tensors: list[torch.Tensor]) -> bool:
    norms = torch._foreach_norm(tensors)
    if math.isfinite(float(torch.stack(norms).sum())):
        return True
    # Squares of finite numbers may overflow.
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
