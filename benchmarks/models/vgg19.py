"""VGG-19 (Simonyan and Zisserman 2015, configuration E) on random images of 224 x 224, with SGD and momentum."""

import torch
from torch import nn

CHANNELS = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))
"""Of every block's convolutions, and how many there are."""


def model() -> nn.Module:
    layers, ahead = list[nn.Module](), 3
    for channels, count in CHANNELS:
        for _ in range(count):
            layers += [nn.Conv2d(ahead, channels, 3, padding=1), nn.ReLU()]
            ahead = channels
        layers.append(nn.MaxPool2d(2))
    dense = (nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000))
    return nn.Sequential(*layers, nn.Flatten(), *dense)


def dataset() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(3, 224, 224, generator=generator), torch.tensor(each % 1000)) for each in range(64)]


def loss(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(output, batch[1])


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
