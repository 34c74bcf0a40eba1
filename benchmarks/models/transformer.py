"""Twelve transformer blocks on random vectors, of width 512 and 128 long."""

import torch
import torch.nn.functional as F
from torch import nn

BLOCKS, WIDTH, HEADS, LENGTH, SAMPLES = 12, 512, 8, 128, 32


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(samples, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def model() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def dataset() -> torch.utils.data.Dataset[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(*(torch.randn(SAMPLES, LENGTH, WIDTH, generator=generator) for _ in range(2)))


def loss(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(output, batch[1])


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)
