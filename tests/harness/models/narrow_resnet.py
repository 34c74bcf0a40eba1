"""The ResNet of the examples, narrow, with dropout in its blocks."""

import importlib.util
from pathlib import Path

import torch
from torch import nn

from autopar import examples

DTYPE = torch.float64

spec = importlib.util.spec_from_file_location("base_resnet", Path(examples.__file__).parent / "resnet.py")
base = importlib.util.module_from_spec(spec)
spec.loader.exec_module(base)
base.WIDTHS, base.BLOCKS_PER_WIDTH = (2, 3, 4), 3


class Block(base.Block):
    def __init__(self, before, width, stride):
        super().__init__(before, width, stride)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return self.drop(super().forward(x))


base.Block = Block
loss = base.loss


def model():
    return base.model().to(DTYPE)


def dataset():
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(200, 1, 8, 8, generator=generator).to(DTYPE)
    return torch.utils.data.TensorDataset(images, torch.randint(0, base.CLASSES, (200,), generator=generator))


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4)
