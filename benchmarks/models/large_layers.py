"""Three layers of 36 MB each."""

import torch
import torch.nn.functional as F
from torch import nn

LAYERS, WIDTH, SAMPLES = 3, 3072, 256


def model() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)))


def dataset() -> torch.utils.data.Dataset[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(*(torch.randn(SAMPLES, WIDTH, generator=generator) for _ in range(2)))


def loss(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(output, batch[1])


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)
