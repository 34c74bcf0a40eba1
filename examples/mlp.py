"""A perceptron with layers of unequal widths, trained on scikit-learn's handwritten digits."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

WIDTHS = (64, 512, 1024, 256, 768, 128)
CLASSES = 10


def model():
    layers = []
    for before, width in pairwise(WIDTHS):
        layers += [nn.Linear(before, width), nn.ReLU()]
        nn.init.kaiming_normal_(layers[-2].weight, nonlinearity="relu")
    return nn.Sequential(*layers, nn.Linear(WIDTHS[-1], CLASSES))


def dataset():
    digits = load_digits()
    pixels = torch.tensor(digits.data, dtype=torch.float32) / 16
    return torch.utils.data.TensorDataset(pixels, torch.tensor(digits.target))


def loss(output, batch):
    _, labels = batch
    return F.cross_entropy(output, labels)


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)
