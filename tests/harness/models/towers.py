"""Two or three towers that are joined in forward, in ways that SEED draws."""

import random
from functools import reduce

import torch
import torch.nn.functional as F
from torch import nn

SEED, WIDTH = 0, 4

JOINS = {
    "cat": lambda one, other: torch.cat((one, other), 1).unflatten(1, (2, WIDTH)).mean(1),
    "sum": lambda one, other: one + other,
    "product": lambda one, other: one * other,
    "stack": lambda one, other: torch.stack((one, other)).logsumexp(0),
    "where": lambda one, other: torch.where(one > other, one, other * 2),
    "outer": lambda one, other: (one[:, :, None] @ other[:, None]).mean(2),
    "late": lambda one, other: torch.tanh(one) - other.sigmoid(),
}
STAYING = {
    "in place": lambda one, other: one.clone().add_(other),
    "dropout": lambda one, other: F.dropout(one - other, 0.2),
}
"""Those that stay in the layer of the tower before."""


class Tower(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.steps = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))

    def forward(self, x):
        for step in self.steps:
            x = torch.tanh(step(x))
        return x


class Towers(nn.Module):
    """Its towers are joined one after the other, as soon as there are two or all at the end."""

    def __init__(self, draw):
        super().__init__()
        self.kinds = draw.sample(sorted(JOINS), 2)
        if draw.random() < 0.3:
            self.kinds[draw.randrange(2)] = draw.choice(sorted(STAYING))
        self.at_once, self.skips = draw.random() < 0.5, draw.random() < 0.5
        self.towers = nn.ModuleDict({name: Tower(draw.randint(1, 3)) for name in "xyz"[: draw.randint(2, 3)]})
        self.norm = nn.LayerNorm(WIDTH) if draw.random() < 0.5 else nn.Identity()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, **inputs):
        kinds, made = iter(self.kinds), (tower(inputs[name]) for name, tower in self.towers.items())
        joined = reduce(lambda *two: (JOINS | STAYING)[next(kinds)](*two), made if self.at_once else list(made))
        joined = self.norm(joined)
        out = self.body(joined)
        return self.head(out + joined if self.skips else out)


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        x, y, z = torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)
        return {"x": x, "y": y, "z": z, "target": torch.tensor(index % 2)}


def model():
    return Towers(random.Random(SEED)).double()


def dataset():
    return Samples()


def loss(output, batch):
    return F.cross_entropy(output, batch["target"])


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
