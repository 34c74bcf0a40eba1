"""The same normalisations in a model whose layers are listed, since a cumulative average cannot be captured."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def model() -> nn.Module:
    blocks = [
        nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2, momentum=None), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Linear(18, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)),
        nn.Sequential(nn.BatchNorm1d(6, affine=False, momentum=None), nn.Linear(6, 3)),
    ]
    return nn.Sequential(*blocks).double()


def layers(module: nn.Module) -> list[nn.Module]:
    return list(module)


def dataset() -> torch.utils.data.Dataset:
    generator = torch.Generator().manual_seed(1)
    x = 3 + torch.randn(64, 2, 3, 3, dtype=torch.float64, generator=generator)
    return torch.utils.data.TensorDataset(x, torch.randint(0, 3, (64,), generator=generator))


def loss(output: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return F.cross_entropy(output, batch[1])


def optimizer(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
