"""ResNet-26 with bottlenecks, from a Transformers configuration, on random images."""

import torch
from transformers import ResNetConfig, ResNetForImageClassification

SIZE, CLASSES = 96, 100


def model() -> torch.nn.Module:
    return ResNetForImageClassification(ResNetConfig(depths=[2, 2, 2, 2], num_labels=CLASSES))


def dataset() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(64, 3, SIZE, SIZE, generator=generator)
    labels = torch.randint(CLASSES, (64,), generator=generator)
    return [{"pixel_values": image, "labels": label} for image, label in zip(images, labels, strict=True)]
