"""Transformer blocks whose queries, keys and values are projected apart, as `parallelize_module` wants them."""

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, BLOCKS, LENGTH, SAMPLES = 512, 8, 4, 64, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.norm1(x)
        # As many heads as there are: a rank that has some of them has fewer.
        q, k, v = (each(given).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def model() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def dataset() -> torch.utils.data.Dataset[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(*(torch.randn(SAMPLES, LENGTH, WIDTH, generator=generator) for _ in range(2)))


def loss(output: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return F.mse_loss(output, batch[1])


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)
