"""Few and small layers, one of them a batch normalisation, which compile quickly; in float64."""

from __future__ import annotations

import torch
from torch import nn

from labelled import loss, samples  # noqa: F401
from labelled import sgd as optimizer  # noqa: F401

DTYPE = torch.float64


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).to(DTYPE)


def dataset() -> torch.utils.data.Dataset:
    return samples(64, 4, mean=3.0, dtype=DTYPE)
