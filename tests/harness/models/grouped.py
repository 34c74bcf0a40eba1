"""A perceptron whose optimizer has groups; a tied weight, and a part that is not trained."""

import torch
from torch import nn

from labelled import loss, samples  # noqa: F401


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x):
        x = self.frozen(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.last(x)


MODEL = None


def model():
    global MODEL
    MODEL = Grouped().double()
    return MODEL


def dataset():
    return samples(60, 6, labels=6)


def grouped(biases, others):
    return torch.optim.AdamW(
        [{"params": others, "weight_decay": 0.5}, {"params": biases, "weight_decay": 0.0}], lr=1e-2
    )


def optimizer(named_parameters):
    pairs = list(named_parameters)
    return grouped(
        [each for name, each in pairs if name.endswith("bias")],
        [each for name, each in pairs if not name.endswith("bias")],
    )
