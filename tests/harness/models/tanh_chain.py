"""Five layers with a tanh each, in double precision; tests choose the optimizer, and what else is special."""

import torch
from torch import nn

WIDTH, SAMPLES = 6, 480
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.2),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
}
OPTIMIZER = "sgd"
SHARED = False  # whether the first and the last layer share their weight
DROPS = 0.0  # share of what layers drop
FROZEN = ()  # layers that are not trained
COUNTS = False  # whether the loss is a sum and a count
SPOILED = ()  # samples of which gradients are not finite


def model():
    drops = [nn.Dropout(DROPS)] if DROPS else []
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), *drops) for _ in range(5)]
    for index in FROZEN:
        layers[index].requires_grad_(False)
    if SHARED:
        layers[4][0].weight = layers[0][0].weight
    return nn.Sequential(*layers).double()


def dataset():
    draw = torch.Generator().manual_seed(5)
    inputs, targets = (torch.randn(SAMPLES, WIDTH, generator=draw, dtype=torch.float64) for _ in range(2))
    targets[list(SPOILED)] *= float("inf")
    return torch.utils.data.TensorDataset(inputs, targets)


def loss(output, batch):
    if COUNTS:
        counted = batch[1] > -0.5
        return (((output - batch[1]) * counted) ** 2).sum(), counted.sum()
    return ((output - batch[1]) ** 2).mean()


def optimizer(parameters):
    return OPTIMIZERS[OPTIMIZER](parameters)


def scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
