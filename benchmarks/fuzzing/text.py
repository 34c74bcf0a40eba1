"""Text: what all model files of the grammar have in common; names in angle brackets are filled in."""

FRAME = '''"""<RECIPE>"""
import functools
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

TALLY = {"forwards": 0}
LOSS_STATE = {"n": 0}
BUILT = []


def make_counter():
    count = 0

    def tick():
        nonlocal count
        count += 1
        return count

    return tick


@functools.lru_cache
def ramp_scale(size):
    return 1 + 1 / size


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 2

    @staticmethod
    def backward(context, gradient):
        return gradient * 2


class GlobalNorm(torch.optim.SGD):
    """Divides by the norm of all gradients together."""

    @torch.no_grad()
    def step(self, closure=None):
        given = [(p, group["lr"]) for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p, _ in given]).norm()
        for p, rate in given:
            p.sub_(p.grad, alpha=rate / float(norm))


<CLASSES>

class Net(nn.Module):
    def __init__(self, d=<WIDTH>):
        super().__init__()
        self.inp = <STEM>
        self.blocks = nn.ModuleList([<BLOCKS>])
        self.head = nn.Linear(d, 3)
<INIT>

    def forward(self, x):
<FORWARD>


def model():
    torch.set_default_dtype(torch.float64)
    try:
        BUILT.append(Net())
    finally:
        torch.set_default_dtype(torch.float32)
    return BUILT[-1]


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 90

    def __getitem__(self, index):
        chance = torch.Generator().manual_seed(1000 * <SEED> + index)
        x = <SAMPLE_X>
        y = torch.randint(0, 3, <LABELS>, generator=chance)
        if index % 3 == 0:
            y = torch.where(torch.rand(<LABELS>, generator=chance) < 0.6, -100, y)<NOISE>
        return <ITEM>


def dataset():
    return Samples()


def loss(output, batch):
    logits = output["logits"] if isinstance(output, dict) else output
    logits, target = logits.flatten(0, -2), (<TARGET>).flatten()
<LOSS>


def optimizer(<ARGUMENT>):
<OPTIMIZER>


<OPTIONAL>
'''
