"""A small model whose training shows most faults of a run: skips, dropout, statistics, unequal labels, no gradients."""

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return x + self.drop(torch.tanh(self.norm(self.linear(x))))


class Sensitive(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.aside = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        first = x = self.blocks[0](x)
        for block in self.blocks[1:4]:
            x = block(x)
        x = self.blocks[4](x + first)
        # Its parameters get no gradient, and AdamW would decay them if it were zero.
        x = x + self.aside[0](first).detach()
        return self.head(x + first)


def model():
    return Sensitive()


def dataset():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(96, WIDTH, generator=generator)
    return torch.utils.data.TensorDataset(inputs, torch.randint(0, 3, (96,), generator=generator))


def loss(output, batch):
    return F.cross_entropy(output, batch[-1])


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
