"""Models with Python state, and a loss."""

# ruff: noqa: ANN001, ANN201, ANN202, ANN204

import torch
from torch import nn

from capture_zoo import Chain, mean_square


class Late(Chain):
    """Another model after forty forwards."""

    def __init__(self, where="attribute"):
        super().__init__()
        self.where, self.state = where, {"n": 0}

    def between(self, x):
        self.state["n"] += 1
        return torch.tanh(x) * (2 if self.state["n"] > 40 else 1)


def counting_loss():
    n = 0

    def loss(output, batch):
        nonlocal n
        n += 1
        return mean_square(output, batch) * min(n, 40)

    return loss


class Between(nn.Module):
    def __init__(self, model, step):
        super().__init__()
        self.model, self.step = [model], step

    def forward(self, x):
        return self.model[0].between(self.step(x))


def listed(model):
    """List the layers of a chain, what stands between them included."""
    return [Between(model, step) for step in model.steps]
