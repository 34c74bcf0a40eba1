"""Listed modules that decide by their samples which parameters they use."""

import torch
from torch import nn

from labelled import adamw as optimizer  # noqa: F401
from labelled import loss, samples  # noqa: F401

KIND = "extra"


class Deciding(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.extra, self.other = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        chosen = bool((x[:, 0] > 0).all())
        y = x + self.always(x)
        if KIND == "layer" and not chosen:
            # Nothing before this module is reached then.
            x = x.detach()
            y = y.detach() + self.extra(x)
        elif chosen:
            y = y + self.extra(x)
        elif KIND == "other":
            y = y + self.other(x)
        return torch.cat([x[:, :1], y[:, 1:]], 1)


def model():
    return nn.Sequential(Deciding(), Deciding(), Deciding(), nn.Linear(6, 3)).double()


def layers(module):
    return list(module)


ORDER = torch.randperm(60, generator=torch.Generator().manual_seed(0)).tolist()
SIGNS = (1, 1)
"""Of the first and the second sample of a micro-batch of two; every second pair of micro-batches has the opposites."""


def dataset():
    made = samples(60, 6)
    for place, index in enumerate(ORDER):
        sign = SIGNS[place % 2] * (-1 if place // 4 % 2 else 1)
        made.tensors[0][index, 0] = sign * made.tensors[0][index, 0].abs()
    return made
