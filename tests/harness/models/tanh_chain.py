"""Five layers with a tanh each, in double precision; tests choose the optimizer and the scheduler."""

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


class Points(torch.utils.data.Dataset):
    def __init__(self):
        draw = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(SAMPLES, WIDTH, generator=draw, dtype=torch.float64)
        self.targets = torch.randn(SAMPLES, WIDTH, generator=draw, dtype=torch.float64)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


def model():
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5)]
    return nn.Sequential(*layers).double()


def dataset():
    return Points()


def loss(output, batch):
    return ((output - batch[1]) ** 2).mean()


def optimizer(parameters):
    return OPTIMIZERS[OPTIMIZER](parameters)


def scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
