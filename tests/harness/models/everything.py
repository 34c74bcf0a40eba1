"""A small model with what makes pipelines hard: skips over stages, tied weights, a mask, integers, no parameters."""

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, LENGTH, WORDS = 6, 4, 11


class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        return x + torch.tanh(mask @ self.linear(self.norm(x)))


class Sign(nn.Module):
    """No parameters, and an integer result."""

    def forward(self, x):
        return x, (x.sum(-1) > 0).long()


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.down = nn.ModuleList(Mix() for _ in range(3))
        self.sign = Sign()
        self.up = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(3))
        self.signs = nn.Embedding(2, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, tokens):
        mask = torch.tril(torch.ones(tokens.shape[1], tokens.shape[1], dtype=self.head.weight.dtype))
        x, skips = self.words(tokens), []
        for block in self.down:
            x = block(x, mask)
            skips.append(x)
        x, signs = self.sign(x)
        for block in self.up:
            x = F.relu(block(torch.cat([x, skips.pop()], -1)))
        return self.head(x + self.signs(signs))


class Words(torch.utils.data.Dataset):
    def __len__(self):
        return 200

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, WORDS, (LENGTH + 1,), generator=generator)
        # Samples differ in how many of their targets count.
        targets = tokens[1:].masked_fill(torch.arange(LENGTH) < index % LENGTH, -100)
        return {"tokens": tokens[:-1], "targets": targets}


def model():
    return Everything().double()


def dataset():
    return Words()


def loss(output, batch):
    targets = batch["targets"].flatten()
    total = F.cross_entropy(output.flatten(0, 1), targets, reduction="sum", ignore_index=-100)
    return total, (targets != -100).sum()


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)
