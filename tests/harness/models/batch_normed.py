"""Batch normalisations of several kinds, in float64: with and without running statistics and weights, called twice."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from labelled import loss, samples  # noqa: F401
from labelled import sgd as optimizer  # noqa: F401


class Block(nn.Module):
    def __init__(self, channels: int, **norm: object) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels, **norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.relu(self.norm(self.conv(x)), inplace=True)


class Twice(nn.Module):
    """One normalisation, called for two values."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.lin = nn.Linear(features, features)
        self.norm = nn.BatchNorm1d(features, momentum=0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return self.norm(torch.tanh(self.lin(x)))


def model() -> nn.Module:
    blocks = [
        Block(2),
        Block(2, affine=False, momentum=0.5),
        nn.Sequential(nn.Flatten(), nn.Linear(18, 6)),
        Twice(6),
        nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, track_running_stats=False, eps=1e-3)),
        nn.Linear(6, 3),
    ]
    return nn.Sequential(*blocks).double()


def dataset() -> torch.utils.data.Dataset:
    return samples(64, 2, 3, 3, mean=3.0)
