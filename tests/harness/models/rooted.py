"""A perceptron with a root in its first layers: where a sample begins with zero, its gradient is not a number."""

import torch
import torch.nn.functional as F
from torch import nn

BAD = ()
"""Samples that begin with zero."""


class Rooted(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) + torch.sqrt((x[:, :1] * self.linear(x)) ** 2)


def model():
    return nn.Sequential(Rooted(), *(nn.Linear(4, 4) for _ in range(3))).double()


def dataset():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 4, dtype=torch.float64, generator=generator)
    inputs[list(BAD), 0] = 0.0
    return torch.utils.data.TensorDataset(inputs, torch.randint(0, 4, (40,), generator=generator))


def loss(output, batch):
    return F.cross_entropy(output, batch[-1])


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)
