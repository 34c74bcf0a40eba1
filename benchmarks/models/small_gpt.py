"""A byte-level GPT of four blocks, small enough to be trained five hundred steps many times over; nothing is shared."""

import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

BLOCKS, WIDTH, HEADS, CONTEXT, BYTES = 4, 64, 4, 64, 256
TEXT_BYTES = 4_000_000


class SmallBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        samples, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(samples, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(BYTES, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(SmallBlock() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, BYTES, bias=False)
        for each in self.modules():
            if isinstance(each, (nn.Linear, nn.Embedding)):
                nn.init.normal_(each.weight, std=0.02)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class StandardLibrary(torch.utils.data.Dataset):
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
    return torch.optim.AdamW(parameters, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
