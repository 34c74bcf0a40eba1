"""Labelled samples, and the loss of what says how likely the labels are: what most of the small model files have."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


def samples(
    count: int, *sizes: int, labels: int = 3, mean: float = 0.0, dtype: torch.dtype = torch.float64
) -> TensorDataset:
    """Return normally distributed samples of these sizes."""
    generator = torch.Generator().manual_seed(0)
    inputs = mean + torch.randn(count, *sizes, dtype=dtype, generator=generator)
    return TensorDataset(inputs, torch.randint(0, labels, (count,), generator=generator))


def loss(output: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return F.cross_entropy(output, batch[-1])


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
