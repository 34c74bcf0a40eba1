"""Tied weights, dropout, buffers, groups of parameters, AdamW and a scheduler, in float64."""

import torch
import torch.nn.functional as F
from torch import nn

WORDS, WIDTH, SAMPLES = 23, 12, 96
STEP_SIZE = 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("scale", torch.full((1,), 0.7))
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, x):
        return x + self.scale * self.dropout(self.outer(torch.tanh(self.inner(x)))) * self.passing.sum() / 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, words):
        x = self.embedding(words).mean(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model():
    return Model().double()


def dataset():
    index = torch.arange(SAMPLES)
    words = torch.stack([index % WORDS, (7 * index + 3) % WORDS], 1)
    return torch.utils.data.TensorDataset(words, 5 * index % WORDS)


def loss(output, batch):
    return F.cross_entropy(output, batch[1])


def optimizer(named_parameters):
    pairs = list(named_parameters)
    biases = [parameter for name, parameter in pairs if name.endswith("bias")]
    others = [parameter for name, parameter in pairs if not name.endswith("bias")]
    groups = [{"params": biases, "weight_decay": 0.0}, {"params": others, "lr": 2e-2}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2, weight_decay=0.1)


def scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=STEP_SIZE, gamma=0.7)
