"""A model file: autopar asks it for the model, its data and its loss. It is ordinary PyTorch.

Replace what is in the functions by your own. What is commented out has the default that its line says.
"""

import torch
import torch.nn.functional as F
from torch import nn


def model():
    """Return the model, on the CPU."""
    return nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2)
    )


def dataset():
    """Return samples: anything with `__len__` and `__getitem__`. Of a tuple, the last part is the target."""
    inputs = torch.randn(1024, 64)
    return torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long())


def loss(output, batch):
    """Return the mean over the batch; without this function, the model's output is the loss, or carries it."""
    return F.cross_entropy(output, batch[1])


# def optimizer(parameters):  # AdamW with a rate of 0.001
#     return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


# def scheduler(optimizer):  # none; one that you return is stepped once a step
#     return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)


# def collate(samples):  # torch.utils.data.default_collate; pad samples of several lengths here
#     return torch.utils.data.default_collate(samples)
