"""Draw layers of a stream of tokens: what keeps them apart, what mixes them, and regions between."""

import functools
import random

import torch
import torch.nn.functional as F

from autopar.capture.graph import Layer
from drawn_split import Drawing
from single_layers import layer_of

TOKENS, WIDTH = 8, 6


class Stream(Drawing):
    """From ``(rows, 8, 6)`` and another tensor of that size to the same, by some drawn steps."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.register_buffer("table", torch.arange(TOKENS * WIDTH, dtype=torch.float64).view(TOKENS, WIDTH).cos())
        self.begin(*(torch.ones(2, TOKENS, WIDTH, dtype=torch.float64) for _ in range(2)))

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        draw, self._next = random.Random(self.seed), 0
        streams = [x * self.weight(1), other]
        for _ in range(draw.randint(3, 7)):
            at = draw.randrange(2)
            found = draw.choice(STEPS)(self, draw, streams[at])
            streams[at] = streams[draw.randrange(2)] + found if draw.random() < 0.6 else found
        return streams[0], streams[1]


def norm(module: Stream, draw: random.Random, x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (WIDTH,), module.weight(WIDTH), module.weight(WIDTH))


def plain_norm(module: Stream, draw: random.Random, x: torch.Tensor) -> torch.Tensor:
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1)) * (1 + module.weight(WIDTH))


def matrices(module: Stream, draw: random.Random, x: torch.Tensor) -> torch.Tensor:
    found = F.gelu(F.linear(x, module.weight(8, WIDTH), module.weight(8)))
    return F.linear(found, module.weight(WIDTH, 8), module.weight(WIDTH) if draw.random() < 0.5 else None)


def flat_matrices(module: Stream, draw: random.Random, x: torch.Tensor) -> torch.Tensor:
    """Put samples and tokens into one dimension, and drop numbers of what comes there."""
    found = torch.addmm(module.weight(8), x.reshape(-1, WIDTH), module.weight(WIDTH, 8)).relu()
    found = torch.addmm(module.weight(WIDTH), found, module.weight(8, WIDTH))
    if draw.random() < 0.5:
        found = F.dropout(found, 0.3)
    return found.view(-1, TOKENS, WIDTH)


def attend(module: Stream, draw: random.Random, x: torch.Tensor) -> torch.Tensor:
    heads = draw.choice([4, 4, 3])
    query, key, value = (
        F.linear(x, module.weight(2 * heads, WIDTH)).unflatten(-1, (heads, 2)).transpose(1, 2) for _ in range(3)
    )
    mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=0.2, is_causal=True)
    return F.linear(mixed.transpose(1, 2).flatten(2), module.weight(WIDTH, 2 * heads))


def drop(module: Stream, draw: random.Random, x: torch.Tensor) -> torch.Tensor:
    """Drop numbers, of a tensor that memory has in an order that is drawn."""
    order = draw.choice([(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0)])
    back = [order.index(place) for place in range(3)]
    return F.dropout(x.permute(order).contiguous().permute(back), 0.3)


def place(module: Stream, draw: random.Random, x: torch.Tensor) -> torch.Tensor:
    """Add what belongs to a token's place: a parameter, a buffer, or a row that is looked up."""
    kinds = [
        lambda: x + module.weight(TOKENS, WIDTH),
        lambda: x * module.table,
        lambda: x + module.weight(TOKENS + 2, WIDTH)[1 : TOKENS + 1],
        lambda: x + F.embedding(torch.arange(TOKENS), module.weight(TOKENS + 1, WIDTH)),
    ]
    return kinds[draw.randrange(4)]()


def mix(module: Stream, draw: random.Random, x: torch.Tensor) -> torch.Tensor:
    """Make every token of several."""
    kinds = [
        lambda: x.cumsum(1).tanh(),
        lambda: torch.roll(x, 1, 1),
        lambda: torch.cat([x[:, 3:], x[:, :3]], 1),
        lambda: x - x.mean(1, keepdim=True),
        lambda: x + x[:, 0].unsqueeze(1),
        lambda: F.linear(x.transpose(1, 2), module.weight(TOKENS, TOKENS)).transpose(1, 2),
    ]
    return kinds[draw.randrange(6)]()


def fold(module: Stream, draw: random.Random, x: torch.Tensor) -> torch.Tensor:
    """Take the tokens apart into some of some, and do something with either."""
    found = x.unflatten(1, (-1, draw.choice([2, 4])))
    kind = draw.randrange(3)
    if kind == 0:
        found = found.softmax(2)
    elif kind == 1:
        found = found - found.mean(1, keepdim=True)
    else:
        found = found.transpose(1, 2).reshape(found.shape[0], -1, WIDTH).view(found.shape)
    return found.flatten(1, 2)


def gate(module: Stream, draw: random.Random, x: torch.Tensor) -> torch.Tensor:
    """Hide what is small, and leave what is not."""
    return torch.where(x > 0, x, x.detach().sigmoid() * module.weight(1))


def squeeze(module: Stream, draw: random.Random, x: torch.Tensor) -> torch.Tensor:
    """Sum over everything of a sample, or of a token."""
    return x / (1 + x.pow(2).sum(draw.choice([1, 2, (1, 2)]), keepdim=True))


STEPS = [norm, plain_norm, matrices, flat_matrices, attend, drop, place, mix, fold, gate, squeeze]
STEPS += [norm, matrices, flat_matrices, attend, drop]


@functools.cache
def drawn_stream(seed: int) -> tuple[Layer, list[torch.Tensor]]:
    """Draw a layer of a stream, and what it is given: three rows of tokens."""
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(3, TOKENS, 6, generator=generator, dtype=torch.float64) for _ in range(2)]
    return layer_of(Stream(seed), *inputs), inputs
