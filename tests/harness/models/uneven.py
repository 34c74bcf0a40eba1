"""Parameters of every shape, and some that no loss reaches: scalars, without elements, with a row, complex."""

import torch
from torch import nn

from labelled import adamw as optimizer  # noqa: F401
from labelled import loss, samples  # noqa: F401


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.row = nn.Parameter(torch.randn(1, 8))
        self.nothing = nn.Parameter(torch.zeros(0, 8))
        self.rows = nn.Parameter(torch.randn(3, 8))
        self.unreached = nn.Parameter(torch.ones(4, 8))
        self.unreached_gain = nn.Parameter(torch.tensor(1.0))
        self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.linear = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x):
        y = self.gain * torch.tanh(self.linear(x) + self.row + self.rows.sum(0)) + self.frozen(x)
        turned = torch.fft.ifft(self.turn * torch.fft.fft(y))
        kept = (self.unreached.sum() * self.unreached_gain).detach() + self.nothing.sum()
        return x + turned.real + turned.imag + 0.01 * kept


def model():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(5, 8), *(Block() for _ in range(3)), nn.Linear(8, 3)).double()
    for block in net[1:4]:
        block.turn = nn.Parameter(block.turn.detach().to(torch.complex128))
    return net


def dataset():
    return samples(100, 5)
