"""A byte-level GPT of twelve blocks, trained on the text of the Python standard library."""

import math
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

BLOCKS, WIDTH, HEADS, CONTEXT, BYTES = 12, 192, 4, 128, 256
TEXT_BYTES = 4_000_000


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        samples, length, width = x.shape
        q, k, v = self.qkv(x).view(samples, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(samples, length, width))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(BYTES, WIDTH)
        self.wpe = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, BYTES, bias=False)
        self.apply(self._initialise)
        self.head.weight = self.wte.weight

    def _initialise(self, module):
        """Draw weights as GPT-2 does; those that add to the residual stream are scaled down by its length."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Block):
            for last in (module.attention.out, module.down):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * BLOCKS))

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class StandardLibrary(torch.utils.data.Dataset):
    """Non-overlapping windows of the standard library's source, in the order of its files' names."""

    def __init__(self):
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        text = b"\n".join(file.read_bytes() for file in files)[:TEXT_BYTES]
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self):
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, index):
        window = self.text[index * CONTEXT : (index + 1) * CONTEXT + 1].long()
        return {"tokens": window[:-1], "targets": window[1:]}


def model():
    return GPT()


def dataset():
    return StandardLibrary()


def loss(output, batch):
    return F.cross_entropy(output.flatten(0, 1), batch["targets"].flatten())


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
