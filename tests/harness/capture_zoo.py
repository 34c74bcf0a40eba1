"""Small models, each with one difficulty of capturing, and a batch for each."""
# ruff: noqa: ANN001, ANN003, ANN201, ANN204

import functools
import warnings
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from autopar.capture import capture_module, named_tensors, slice_rows
from autopar.capture.batch import rebuild


def mean_square(output, batch):
    return (output - batch[-1].reshape(output.shape)).square().mean()


def cross_entropy(output, batch):
    return F.cross_entropy(output.flatten(0, -2), batch["targets"].flatten())


def regression(rows=6, width=8, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, width, generator=generator, dtype=torch.float64) for _ in range(2)]


def text(rows=6, length=5, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(0, 11, (rows, length), generator=generator) for name in ("tokens", "targets")}


def images(rows=6):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 2, 4, 4, generator=generator, dtype=torch.float64) for _ in range(2)]


class Chain(nn.Module):
    """Linear layers with a method to override between them."""

    def __init__(self, count=4, width=8):
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x):
        for step in self.steps:
            x = self.between(step(x))
        return x

    def between(self, x):
        return torch.tanh(x)


class By(Chain):
    """What is between steps is a function of the model, which may hold more, and of what arrives there."""

    def __init__(self, function, buffers=None, **held):
        super().__init__()
        self.function = function
        for name, value in (buffers or {}).items():
            self.register_buffer(name, value)
        self.__dict__.update(held)

    def between(self, x):
        return self.function(self, x)


class Views(Chain):
    """A view is read after its base was written through another view."""

    def between(self, x):
        left, right = x[:, :4], x[:, 4:]
        left.mul_(2)
        return torch.cat((right, x[:, :4]), 1)


class Skips(nn.Module):
    """A U-Net's shape: what goes down is read again on the way up."""

    def __init__(self):
        super().__init__()
        self.down1, self.down2 = nn.Linear(8, 6), nn.Linear(6, 4)
        self.middle = nn.Linear(4, 4)
        self.up2, self.up1 = nn.Linear(8, 6), nn.Linear(12, 8)

    def forward(self, x):
        one = torch.tanh(self.down1(x))
        two = torch.tanh(self.down2(one))
        x = torch.cat((two, torch.tanh(self.middle(two))), 1)
        return self.up1(torch.cat((one, self.up2(x)), 1)) + x.new_ones(()) * 0.5


class Block(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.norm, self.mix, self.drop = nn.LayerNorm(width), nn.Linear(width, width), nn.Dropout(dropout)
        self.register_buffer("seen", torch.tril(torch.ones(8, 8, dtype=torch.bool)), persistent=False)

    def forward(self, x, mask):
        h = self.norm(x)
        length = x.shape[1]
        scores = (h @ h.mT).masked_fill(~(self.seen[:length, :length] & mask), -1e9)
        return x + self.drop(self.mix(scores.softmax(-1) @ h))


class Language(nn.Module):
    """Tied embeddings, positions, a mask made in forward from the tokens, a mask held as a buffer."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wpe": nn.Embedding(8, 16),
                "wte": nn.Embedding(11, 16),
                "h": nn.ModuleList(Block(16, dropout) for _ in range(4)),
            }
        )
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.transformer.wte.weight

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        mask = (tokens != 0)[:, None, :].expand(-1, tokens.shape[1], -1).clone()
        mask[:, :, 0] = True
        x = self.transformer.wpe(positions) + self.transformer.wte(tokens)
        for block in self.transformer.h:
            x = block(x, mask)
        return self.head(x)


class Norms(nn.Module):
    """Batch normalisation, in-place ReLU and a residual connection."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)) for _ in range(3))
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            y = block(x)
            y += x
            x = F.relu_(y)
        return self.head(x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.recurrent = nn.LSTM(8, 8, 2, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens):
        return self.head(self.recurrent(self.embed(tokens))[0])


class Sequence(nn.Module):
    """``nn.Transformer``, whose batch is the second dimension inside."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of nested tensors, which only inference uses
            self.body = nn.Transformer(8, 2, 2, 2, 16, dropout=0.0)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens):
        x = self.embed(tokens).transpose(0, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=x.dtype)
        return self.head(self.body(x, x, tgt_mask=mask, tgt_is_causal=True)).transpose(0, 1)


class Masked(nn.Module):
    """A mask that torch's layers compare with a causal one, to choose a kernel."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 3)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(5))
        self.head = nn.Linear(8, 11)

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens), self.mask))


class NoGrad(Chain):
    """A region without gradients writes a buffer, its result scales what follows."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x):
        x = self.steps[1](torch.tanh(self.steps[0](x)))
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
            scale = x.abs().amax(1, keepdim=True) + x.new_ones(x.shape[0], 1)
        return self.steps[3](self.steps[2](x / scale) - self.average)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.first(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Integers(nn.Module):
    """What crosses is partly not floating point."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x)
        best = x.argmax(1)
        x = torch.tanh(self.second(x))
        return self.third(x) + F.one_hot(best, 8).to(x.dtype)


class SharedBias(Chain):
    """A table of biases without a batch dimension is computed once and read by every layer."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 8)
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        bias = self.table(torch.arange(8) % 4).mean(0)
        scale = self.temperature.exp()
        for step in self.steps:
            x = torch.tanh(step(x) + bias) * scale
        return x


class Flattened(Chain):
    """Sizes that are expressions of the batch size."""

    def forward(self, x):
        rows = x.shape[0]
        x = self.steps[0](x).reshape(rows * 2, 4)
        x = self.steps[1](x.reshape(rows, 8)) / rows
        return self.steps[3](self.steps[2](x) + torch.zeros(rows, 8, dtype=x.dtype))


class PipelineTimes(Chain):
    """A tensor is made empty and written piece by piece."""

    def forward(self, x):
        both = torch.zeros(x.shape[0], 2, 8, dtype=x.dtype)
        both[:, 0] = self.steps[0](x)
        both[:, 1] = self.steps[1](x)
        return self.steps[3](self.steps[2](both.sum(1)))


class MaskInPlace(Chain):
    """A mask is written in place, then read by every layer."""

    def forward(self, x):
        mask = torch.ones(8, 8, dtype=x.dtype)
        mask[2:, 3] = 0
        mask.tril_()
        for step in self.steps:
            x = torch.tanh(step(x)) @ mask
        return x


def parametrized():
    first, second = weight_norm(nn.Linear(8, 8)), spectral_norm(nn.Linear(8, 8))
    return nn.Sequential(OrderedDict(first=first, second=second, third=nn.Linear(8, 8)))


class Queries(nn.Module):
    """Learned tokens are expanded over the batch and read by every layer."""

    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(3, 8))
        self.embed, self.head = nn.Embedding(11, 8, max_norm=1.0), nn.Linear(8, 11)
        self.steps = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, tokens):
        queries = self.queries.expand(tokens.shape[0], -1, -1)
        x = torch.cat((queries, self.embed(tokens)), 1)
        for step in self.steps:
            x = torch.tanh(step(x)) + F.pad(queries, (0, 0, 0, tokens.shape[1]))
        return self.head(x[:, 3:])


class NormTwice(nn.Module):
    """A module with buffers is called twice: what updates them stays together."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(4)
        self.first, self.second, self.third = nn.Conv2d(2, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        return self.third(self.norm(self.second(self.norm(self.first(x)))))


class Autocast(Chain):
    def between(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = F.linear(x.float(), self.steps[0].weight.float())
        return torch.tanh(x + y.to(x.dtype))


def settled(model, x):
    """Set a number that the first forward sets, and every later one to the same."""
    model.half = x.shape[1] // 2
    return torch.tanh(x[:, : model.half].repeat(1, 2))


def stochastic_depth(_, x):
    return x * (torch.rand(x.shape[0], 1, dtype=x.dtype) > 0.3) * torch.rand(())


def wrapped():
    inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Flatten(), nn.Linear(8, 8))
    return nn.Sequential(OrderedDict(net=nn.Sequential(inner)))


MODELS = {
    "settled": (lambda: By(settled, half=0), regression, mean_square),
    "stochastic depth": (lambda: By(stochastic_depth), regression, mean_square),
    "filled": (PipelineTimes, regression, mean_square),
    "mask in place": (MaskInPlace, regression, mean_square),
    "parametrized": (parametrized, regression, mean_square),
    "queries": (Queries, text, cross_entropy),
    "norm twice": (NormTwice, images, mean_square),
    "autocast": (Autocast, regression, mean_square),
    "chain": (Chain, regression, mean_square),
    "in place": (lambda: By(lambda _, x: F.relu(x, inplace=True)), regression, mean_square),
    "views": (Views, regression, mean_square),
    "dropout": (lambda: By(lambda model, x: F.dropout(torch.tanh(x), 0.3, model.training)), regression, mean_square),
    "skips": (Skips, regression, mean_square),
    "language": (Language, text, cross_entropy),
    "language with dropout": (lambda: Language(0.2), text, cross_entropy),
    "norms": (Norms, images, mean_square),
    "recurrent": (Recurrent, text, cross_entropy),
    "transformer": (Sequence, text, cross_entropy),
    "masked": (Masked, text, cross_entropy),
    "no grad": (NoGrad, regression, mean_square),
    "twice": (Twice, regression, mean_square),
    "integers": (Integers, regression, mean_square),
    "shared bias": (SharedBias, regression, mean_square),
    "flattened": (Flattened, regression, mean_square),
    "wrapped": (wrapped, regression, mean_square),
    "one layer": (lambda: Chain(1), regression, mean_square),
}


DEAR = {"language with dropout", "masked", "transformer"}
"""Those that take seconds to capture."""


def build(name):
    """Return a float64 model, a batch of six samples and the loss."""
    make, batch, loss = MODELS[name]
    torch.manual_seed(0)
    return make().double().train(), batch(), loss


@functools.cache
def captured(name):
    """Return what :func:`build` does, and the graph, which two of the six samples are enough for.

    They are made once: whoever changes the model takes a copy, and who runs the graph gives it parameters first.
    """
    model, batch, loss = build(name)
    return model, batch, loss, capture_module(model, rebuild(batch, slice_rows(named_tensors(batch), 0, 2)), loss)
