"""GPT-2 of eight layers, from a Transformers configuration, on random tokens."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

LENGTH, WORDS = 128, 50257


def model() -> torch.nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_layer=8, n_embd=256, n_head=4, n_positions=LENGTH, use_cache=False))


def dataset() -> list[dict[str, torch.Tensor]]:
    words = torch.randint(WORDS, (64, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in words]
