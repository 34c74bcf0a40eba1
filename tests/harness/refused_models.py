"""Models that cannot be captured."""

# ruff: noqa: ANN001, ANN201, ANN205

import torch
import torch.utils.checkpoint

from capture_zoo import Chain


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 2

    @staticmethod
    def backward(context, gradient):
        return gradient * 3


class OwnFunction(Chain):
    def between(self, x):
        return Doubled.apply(x)


class Checkpointed(Chain):
    def between(self, x):
        return torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=False)


class Reentrant(Chain):
    def between(self, x):
        return torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=True)


class Failing(Doubled):
    @staticmethod
    def backward(context, gradient):
        raise ValueError("no gradient today")


class OwnFailing(Chain):
    def between(self, x):
        return Failing.apply(x)


class Branching(Chain):
    def between(self, x):
        return x * 2 if x.sum() > 0 else x
