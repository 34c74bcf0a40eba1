"""Draw layers of the operators that have rules, in every order that fits."""

import functools
import random

import torch
import torch.nn.functional as F
from torch import nn

from autopar.capture.graph import Layer
from single_layers import layer_of

LENGTH, WIDTH = 3, 8


class Drawing(nn.Module):
    """Does the same drawn steps in every call, with parameters that are made in the first."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.weights = nn.ParameterList()
        self._drawn, self._next = False, 0

    def begin(self, *inputs: torch.Tensor) -> None:
        """Make the first call."""
        self(*inputs)
        self._drawn = True

    def weight(self, *sizes: int) -> torch.Tensor:
        """Return the next parameter."""
        if not self._drawn:
            generator = torch.Generator().manual_seed(self.seed + len(self.weights))
            self.weights.append(nn.Parameter(torch.randn(sizes, generator=generator, dtype=torch.float64) / 2))
        self._next += 1
        return self.weights[self._next - 1]


class Drawn(Drawing):
    """From ``(rows, 3, 8)`` to the same: some drawn steps, and a projection back."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.begin(torch.zeros(2, LENGTH, WIDTH, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        draw, self._next = random.Random(self.seed), 0
        found = up(self, draw, x)
        for _ in range(draw.randint(2, 6)):
            found = draw.choice(STEPS)(self, draw, found)
        if draw.random() < 0.3:
            found = found.sum(-1, keepdim=True)
        found = F.linear(found, self.weight(WIDTH, found.shape[-1]), self.weight(WIDTH))
        return x + found if draw.random() < 0.7 else found


def up(module: Drawn, draw: random.Random, x: torch.Tensor) -> torch.Tensor:
    width = draw.choice([4, 8, 12, 16, 24, 10])
    bias = module.weight(width) if draw.random() < 0.5 else None
    if draw.random() < 0.3:
        rows = x.reshape(-1, x.shape[-1])
        weight = module.weight(x.shape[-1], width)
        found = rows @ weight if bias is None else torch.addmm(bias, rows, weight)
        return found.view(-1, LENGTH, width)
    return F.linear(x, module.weight(width, x.shape[-1]), bias)


def gate(module: Drawn, draw: random.Random, x: torch.Tensor) -> torch.Tensor:
    if x.shape[-1] % 2:
        return x.tanh()
    left, right = x.chunk(2, -1) if draw.random() < 0.5 else (x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :])
    return F.silu(left) * right


def rotate(module: Drawn, draw: random.Random, x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x + turned if 2 * half == x.shape[-1] else turned


def scale(module: Drawn, draw: random.Random, x: torch.Tensor) -> torch.Tensor:
    found = x * module.weight(x.shape[-1])
    return found + module.weight(1) if draw.random() < 0.5 else F.gelu(found)


def norm(module: Drawn, draw: random.Random, x: torch.Tensor) -> torch.Tensor:
    if draw.random() < 0.5:
        return F.layer_norm(x, (x.shape[-1],), module.weight(x.shape[-1]), module.weight(x.shape[-1]))
    return x.softmax(-1)


def heads(module: Drawn, draw: random.Random, x: torch.Tensor) -> torch.Tensor:
    """Attend, in heads of a width that is drawn; keys are of fewer heads, and repeated."""
    width = draw.choice([each for each in (1, 2, 3, 4) if x.shape[-1] % each == 0])
    count, group = x.shape[-1] // width, draw.choice([1, 2, 2, 4])
    kept = count // group if count % group == 0 else count
    query = x.view(-1, LENGTH, count, width).transpose(1, 2)
    both = F.linear(x, module.weight(2 * kept * width, x.shape[-1]))
    keys, values = (each.view(-1, LENGTH, kept, width).transpose(1, 2) for each in both.split(kept * width, -1))
    if kept != count:
        keys, values = (_repeat(draw, each, count // kept) for each in (keys, values))
    if draw.random() < 0.5:
        rate = draw.choice([0.0, 0.2])
        found = F.scaled_dot_product_attention(query, keys, values, dropout_p=rate, is_causal=True)
    else:
        found = F.dropout((query @ keys.transpose(-1, -2)).softmax(-1), draw.choice([0.0, 0.2])) @ values
    return found.transpose(1, 2).reshape(-1, LENGTH, x.shape[-1])


def _repeat(draw: random.Random, x: torch.Tensor, times: int) -> torch.Tensor:
    if draw.random() < 0.5:
        return x.repeat_interleave(times, 1)
    return x.unsqueeze(2).expand(-1, -1, times, -1, -1).flatten(1, 2)


def per_head(module: Drawn, draw: random.Random, x: torch.Tensor) -> torch.Tensor:
    """Scale by numbers of each head, or normalise within it."""
    if x.shape[-1] % 2:
        return x
    found = x.unflatten(-1, (x.shape[-1] // 2, 2))
    if draw.random() < 0.5:
        return (found * module.weight(x.shape[-1] // 2, 1)).flatten(-2)
    return (found / (1 + found.pow(2).mean(-1, True))).flatten(-2)


def fused(module: Drawn, draw: random.Random, x: torch.Tensor) -> torch.Tensor:
    """Project to three at once, whose order is drawn, and take them apart again."""
    third = draw.choice([4, 8])
    found = F.linear(x, module.weight(3 * third, x.shape[-1]))
    if draw.random() < 0.5:
        first, second, last = found.view(-1, LENGTH, 3, third).unbind(2)
    else:
        first, second, last = found.view(-1, LENGTH, third, 3).permute(3, 0, 1, 2).unbind(0)
    return first * second + last


def fused_heads(module: Drawn, draw: random.Random, x: torch.Tensor) -> torch.Tensor:
    """Attend with queries, keys and values of one projection, keys of fewer heads, or of one."""
    keys, group, width = (*draw.choice([(1, 4), (2, 2), (2, 4), (1, 2)]), 2)
    sizes = [keys * group * width, keys * width, keys * width]
    found = F.linear(x, module.weight(sum(sizes), x.shape[-1]), module.weight(sum(sizes)))
    query, key, value = (
        each.view(-1, LENGTH, each.shape[-1] // width, width).transpose(1, 2) for each in found.split(sizes, -1)
    )
    if draw.random() < 0.5:
        query, key = (torch.cat([-each[..., 1:], each[..., :1]], -1) + each for each in (query, key))
    key, value = (_repeat(draw, each, group) for each in (key, value))
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return mixed.transpose(1, 2).reshape(-1, LENGTH, sizes[0])


def drop(module: Drawn, draw: random.Random, x: torch.Tensor) -> torch.Tensor:
    """Drop numbers, of a tensor that memory has in an order that is drawn."""
    if draw.random() < 0.5:
        return F.dropout(x, 0.3)
    return F.dropout(x.transpose(1, 2).contiguous().transpose(1, 2), 0.3)


STEPS = [up, gate, rotate, scale, norm, heads, per_head, fused, fused_heads, drop]


@functools.cache
def drawn_layer(seed: int) -> Layer:
    """Export a drawn module as one layer, whose parameters nobody changes."""
    return layer_of(Drawn(seed), torch.zeros(2, LENGTH, WIDTH, dtype=torch.float64))
