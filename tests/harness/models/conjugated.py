"""Complex numbers on their way between layers, some of them conjugated when they are read, and complex weights."""

import torch
from torch import nn

from labelled import adamw as optimizer  # noqa: F401
from labelled import loss, samples  # noqa: F401


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.complex128) * 0.3)
        self.gain = nn.Parameter(torch.randn((), dtype=torch.complex128))
        self.register_buffer("shift", torch.randn(6, dtype=torch.complex128).conj())

    def forward(self, z):
        z = z @ self.weight + self.gain * self.shift
        return (z / (1 + z.abs())).conj()


class Conjugated(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6, dtype=torch.float64)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(12, 3, dtype=torch.float64)

    def forward(self, x):
        z = torch.fft.fft(self.first(x))
        for block in self.blocks:
            z = block(z)
        return self.head(torch.cat([z.real, z.imag], -1))


def model():
    return Conjugated()


def dataset():
    return samples(60, 6, dtype=torch.float64)
