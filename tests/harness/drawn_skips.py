"""Drawn skips: models of few parameters and many activations, whose tensors pass stages by."""

import random
from pathlib import Path

_TEXT = '''"""Layers of these widths, and which add what an earlier one has made."""

import torch
from torch import nn

WIDTHS, SKIPS = {widths}, {skips}


def part(width):
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(map(part, WIDTHS))

    def forward(self, x):
        made = []
        for at, part in enumerate(self.parts):
            for early, late in SKIPS:
                if late == at:
                    x = x + made[early]
            x = torch.tanh(part(x))
            made.append(x)
        return x


def model():
    return Net()


def dataset():
    return torch.utils.data.TensorDataset(torch.zeros(64, 128, 8), torch.zeros(64, 128, 8))


def loss(output, batch):
    return nn.functional.mse_loss(output, batch[1])


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
'''


def write_skips(seed: int, path: Path) -> int:
    """Write a model file; return how many layers its model has, each of which may be a stage."""
    draw = random.Random(seed)
    count = draw.randint(6, 9)
    widths = [draw.choice([1, 4, 16]) for _ in range(count)]
    early = [draw.randrange(count - 2) for _ in range(draw.randint(1, 3))]
    skips = sorted({(first, draw.randrange(first + 2, count)) for first in early})
    path.write_text(_TEXT.format(widths=widths, skips=skips))
    return count
