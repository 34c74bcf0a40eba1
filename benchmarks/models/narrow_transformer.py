"""The transformer of `transformer.py`, half as wide."""

import torch
from torch import nn
from transformer import BLOCKS, LENGTH, SAMPLES, Block, loss, optimizer

__all__ = ["dataset", "loss", "model", "optimizer"]

WIDTH = 256


def model() -> nn.Module:
    return nn.Sequential(*(Block(WIDTH) for _ in range(BLOCKS)))


def dataset() -> torch.utils.data.Dataset[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(*(torch.randn(SAMPLES, LENGTH, WIDTH, generator=generator) for _ in range(2)))
