"""ResNet-152 (He et al. 2016), from a Transformers configuration, on random images of 224 x 224, with SGD."""

import torch
from transformers import ResNetConfig, ResNetForImageClassification


def model() -> torch.nn.Module:
    return ResNetForImageClassification(ResNetConfig(depths=[3, 8, 36, 3], num_labels=1000))


def dataset() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(64, 3, 224, 224, generator=generator)
    return [{"pixel_values": image, "labels": torch.tensor(at % 1000)} for at, image in enumerate(images)]


def optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
