"""Complex numbers on their way between layers, some of them conjugated when they are read, and complex weights."""

import torch
import torch.nn.functional as F
from torch import nn


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
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(60, 6, dtype=torch.float64, generator=generator)
    return torch.utils.data.TensorDataset(inputs, torch.randint(0, 3, (60,), generator=generator))


def loss(output, batch):
    return F.cross_entropy(output, batch[-1])


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
