"""BERT of eight layers, from a Transformers configuration, on random tokens."""

import torch
from transformers import BertConfig, BertForMaskedLM

LENGTH, WORDS = 128, 30522


def model() -> torch.nn.Module:
    config = BertConfig(num_hidden_layers=8, hidden_size=256, num_attention_heads=4, intermediate_size=1024)
    return BertForMaskedLM(config)


def dataset() -> list[dict[str, torch.Tensor]]:
    words = torch.randint(WORDS, (64, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in words]
