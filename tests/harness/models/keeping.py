"""Layers that keep their weight for the backward themselves, or run forward again in it, and are listed."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from labelled import loss, samples  # noqa: F401
from labelled import sgd as optimizer  # noqa: F401

WIDTH = 6
PART = False  # whether what is kept is a view


class Product(torch.autograd.Function):
    @staticmethod
    def forward(context, inputs, weight):
        context.weight = weight.view(WIDTH, WIDTH) if PART else weight
        context.save_for_backward(inputs)
        return inputs @ weight.t()

    @staticmethod
    def backward(context, gradient):
        (inputs,) = context.saved_tensors
        return gradient @ context.weight, gradient.t() @ inputs


class Keeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / WIDTH**0.5)

    def forward(self, inputs):
        return torch.tanh(Product.apply(inputs, self.weight))


class Again(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, inputs):
        return checkpoint(
            lambda each: torch.tanh(self.inner(torch.tanh(self.inner(each)))), inputs, use_reentrant=False
        )


def model():
    return nn.Sequential(Keeping(), Again(), Keeping(), Again(), Keeping())


def layers(model):
    return list(model)


def dataset():
    return samples(480, WIDTH, labels=WIDTH)


def scheduler(stepped):
    return torch.optim.lr_scheduler.StepLR(stepped, 3, 0.9)
