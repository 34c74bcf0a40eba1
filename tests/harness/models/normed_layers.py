"""The same normalisations in a model whose layers are listed, since a cumulative average cannot be captured."""

from __future__ import annotations

import torch
from torch import nn

from labelled import loss, samples  # noqa: F401
from labelled import sgd as optimizer  # noqa: F401


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
    return samples(64, 2, 3, 3, mean=3.0)
