"""Copied: a deep copy of a model that may hold tensors which autograd has computed, such as old ``weight_norm``'s."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import nn

from autopar.capture.reached import Path
from autopar.capture.state import tensors_reached

M = TypeVar("M", bound=nn.Module)


def copied(model: M) -> M:
    """Return a deep copy; what autograd has computed is copied without how.

    >>> import warnings
    >>> from torch.nn.utils import weight_norm
    >>> with warnings.catch_warnings(action="ignore"):
    ...     layer = weight_norm(nn.Linear(2, 3))
    >>> copied(layer).weight.shape
    torch.Size([3, 2])
    """
    computed = {id(tensor): tensor for _, tensor in tensors_reached({Path(""): model}) if tensor.grad_fn is not None}
    return copy.deepcopy(model, {key: tensor.detach().clone() for key, tensor in computed.items()})
