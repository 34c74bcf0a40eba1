"""Layers that compute otherwise in evaluation, listed because of a cumulative average that cannot be captured."""

import otherwise
import torch.nn.functional as F
from torch import nn

from labelled import samples
from labelled import sgd as optimizer  # noqa: F401


class Block(otherwise.Block):
    def __init__(self, momentum, linear=None):
        super().__init__()
        self.linear, self.norm.momentum = linear or self.linear, momentum


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 3)

    def forward(self, x):
        logits = self.linear(x)
        return logits, x.mean()


def model():
    shared = nn.Linear(8, 8)
    blocks = [Block(None, shared), Block(0.1), Block(None, shared), Block(0.1)]
    return nn.Sequential(nn.Linear(5, 8), *blocks, Head()).double()


def layers(module):
    return list(module)


def dataset():
    return samples(100, 5)


def loss(output, batch):
    return F.cross_entropy(output[0], batch[-1])
