"""The GPT of the examples, narrow, with dropout in its blocks."""

import importlib.util
from pathlib import Path

import torch
from torch import nn

from autopar import examples

DTYPE = torch.float64

spec = importlib.util.spec_from_file_location("base_gpt", Path(examples.__file__).parent / "gpt.py")
base = importlib.util.module_from_spec(spec)
spec.loader.exec_module(base)
base.BLOCKS, base.WIDTH, base.HEADS, base.CONTEXT, base.BYTES = 9, 8, 2, 6, 13


class Block(base.Block):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.down(torch.relu(self.up(self.norm2(x)))))


base.Block = Block
loss = base.loss


class Text(torch.utils.data.Dataset):
    def __init__(self):
        self.text = torch.randint(0, base.BYTES, (200, base.CONTEXT + 1), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.text)

    def __getitem__(self, index):
        return {"tokens": self.text[index, :-1], "targets": self.text[index, 1:]}


def dataset():
    return Text()


def model():
    return base.model().to(DTYPE)


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)
