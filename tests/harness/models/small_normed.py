"""Few and small layers, one of them a batch normalisation, which compile quickly; in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

DTYPE = torch.float64


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).to(DTYPE)


def dataset() -> torch.utils.data.Dataset:
    generator = torch.Generator().manual_seed(1)
    x = 3 + torch.randn(64, 4, dtype=DTYPE, generator=generator)
    return torch.utils.data.TensorDataset(x, torch.randint(0, 3, (64,), generator=generator))


def loss(output: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return F.cross_entropy(output, batch[1])


def optimizer(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
