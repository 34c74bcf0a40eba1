"""Layers that compute otherwise in evaluation: batch normalisation and dropout; outputs made in several places."""

import torch
import torch.nn.functional as F
from torch import nn

from labelled import samples
from labelled import sgd as optimizer  # noqa: F401


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return x + self.drop(torch.tanh(self.norm(self.linear(x))))


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.first(x)
        hidden = []
        for block in self.blocks:
            x = block(x)
            hidden.append(x)
        return {"logits": self.head(x), "hidden": hidden[:2], "scale": x.mean()}


def model():
    return Normed().double()


def dataset():
    return samples(100, 5)


def loss(output, batch):
    return F.cross_entropy(output["logits"], batch[-1])
