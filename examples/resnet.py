"""A small residual network with batch normalisation, trained on scikit-learn's handwritten digits."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

WIDTHS = (16, 32, 64)
BLOCKS_PER_WIDTH = 2
CLASSES = 10


class Block(nn.Module):
    def __init__(self, before, width, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Identity()
        if stride != 1 or before != width:
            self.shortcut = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x):
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += self.shortcut(x)
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, WIDTHS[0], 3, padding=1, bias=False), nn.BatchNorm2d(WIDTHS[0]), nn.ReLU(inplace=True)
        )
        blocks, before = [], WIDTHS[0]
        for width in WIDTHS:
            for index in range(BLOCKS_PER_WIDTH):
                stride = 2 if index == 0 and width != WIDTHS[0] else 1
                blocks.append(Block(before, width, stride))
                before = width
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(before, CLASSES)

    def forward(self, image):
        x = self.stem(image)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def model():
    return ResNet()


def dataset():
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return torch.utils.data.TensorDataset(images, torch.tensor(digits.target))


def loss(output, batch):
    _, labels = batch
    return F.cross_entropy(output, labels)


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4)
