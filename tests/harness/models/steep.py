"""A loss so steep that a scaled float16 gradient overflows at first; a schedule that watches it; a shared weight."""

import torch
import torch.nn.functional as F
from torch import nn

STEEPNESS = 30.0


class Steep(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.again = nn.Linear(6, 6)
        self.again.weight = self.first.weight
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(self.again(x))


def model():
    return Steep()


def dataset():
    generator = torch.Generator().manual_seed(5)
    points = torch.randn(64, 6, generator=generator)
    return torch.utils.data.TensorDataset(points, torch.randint(0, 3, (64,), generator=generator))


def loss(output, batch):
    return STEEPNESS * F.cross_entropy(output, batch[1])


def optimizer(parameters):
    return torch.optim.Adam(parameters, lr=1e-3)


def scheduler(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.2)
