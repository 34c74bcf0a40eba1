"""Two blocks of width 8, for a rehearsal of `benchmarks/gpu.py`."""

import torch
from torch import nn
from transformer import SAMPLES, loss, optimizer

__all__ = ["dataset", "loss", "model", "optimizer"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).relu()


def model() -> nn.Module:
    return nn.Sequential(Block(), Block())


def dataset() -> torch.utils.data.Dataset[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(*(torch.randn(SAMPLES, 4, 8, generator=generator) for _ in range(2)))
