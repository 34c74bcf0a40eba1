"""Small models, each with one difficulty of capturing, and a batch for each; and such as cannot be captured."""
# ruff: noqa: ANN001, ANN003, ANN201, ANN202, ANN204, ANN205

import functools
import warnings
from collections import OrderedDict

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from autopar.capture import capture_module, named_tensors, slice_rows
from autopar.capture.model.batch import rebuild


def mean_square(output, batch):
    return (output - batch[-1].reshape(output.shape)).square().mean()


def cross_entropy(output, batch):
    return F.cross_entropy(output.flatten(0, -2), batch["targets"].flatten())


def regression(rows=6, sizes=(8,)):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, *sizes, generator=generator, dtype=torch.float64) for _ in range(2)]


def text():
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randint(0, 11, (6, 5), generator=generator) for name in ("tokens", "targets")}


def images():
    return regression(6, (2, 4, 4))


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


def views(_, x):
    """A view is read after its base was written through another view."""
    left, right = x[:, :4], x[:, 4:]
    left.mul_(2)
    return torch.cat((right, x[:, :4]), 1)


def autocast(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(x.float(), model.steps[0].weight.float())
    return torch.tanh(x + y.to(x.dtype))


def settled(model, x):
    """Set a number that the first forward sets, and every later one to the same."""
    model.half = x.shape[1] // 2
    return torch.tanh(x[:, : model.half].repeat(1, 2))


def stochastic_depth(_, x):
    return x * (torch.rand(x.shape[0], 1, dtype=x.dtype) > 0.3) * torch.rand(())


class Made(nn.Module):
    """What it computes is a function of the model, which holds modules, parameters and buffers, and of its input."""

    def __init__(self, function, **held):
        super().__init__()
        self.function = function
        for name, value in held.items():
            if type(value) is torch.Tensor:
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, tokens):
        return self.function(self, tokens)


def linear(inputs=8, outputs=8):
    return nn.Linear(inputs, outputs)


def steps(count=4):
    return nn.ModuleList(linear() for _ in range(count))


def words(**options):
    return {"embed": nn.Embedding(11, 8, **options), "head": linear(8, 11)}


def skips(model, x):
    """A U-Made's shape: what goes down is read again on the way up."""
    one = torch.tanh(model.down1(x))
    two = torch.tanh(model.down2(one))
    x = torch.cat((two, torch.tanh(model.middle(two))), 1)
    return model.up1(torch.cat((one, model.up2(x)), 1)) + x.new_ones(()) * 0.5


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


def read(model, tokens):
    """Make a mask of the tokens, beside one that blocks hold as a buffer."""
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    mask = (tokens != 0)[:, None, :].expand(-1, tokens.shape[1], -1).clone()
    mask[:, :, 0] = True
    x = model.transformer.wpe(positions) + model.transformer.wte(tokens)
    for block in model.transformer.h:
        x = block(x, mask)
    return model.head(x)


def language(dropout=0.0):
    """Tied embeddings, and positions."""
    embeddings = {"wpe": nn.Embedding(8, 16), "wte": nn.Embedding(11, 16)}
    blocks = nn.ModuleList(Block(16, dropout) for _ in range(4))
    made = Made(read, transformer=nn.ModuleDict({**embeddings, "h": blocks}), head=nn.Linear(16, 11, bias=False))
    made.head.weight = made.transformer.wte.weight
    return made


def residual(model, x):
    """In-place ReLU and a residual connection."""
    x = model.stem(x)
    for block in model.blocks:
        y = block(x)
        y += x
        x = F.relu_(y)
    return model.head(x)


def norms():
    stem = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
    blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)) for _ in range(3))
    return Made(residual, stem=stem, blocks=blocks, head=nn.Conv2d(4, 2, 1))


def sequence(model, tokens):
    x = model.embed(tokens).transpose(0, 1)
    mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=x.dtype)
    return model.head(model.body(x, x, tgt_mask=mask, tgt_is_causal=True)).transpose(0, 1)


def transformer():
    """``nn.Transformer``, whose batch is the second dimension inside."""
    with warnings.catch_warnings(action="ignore"):  # of nested tensors, which only inference uses
        return Made(sequence, body=nn.Transformer(8, 2, 2, 2, 16, dropout=0.0), **words())


def masked():
    """A mask that torch's layers compare with a causal one, to choose a kernel."""
    body = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 3)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    return Made(lambda m, tokens: m.head(m.body(m.embed(tokens), m.mask)), body=body, mask=mask, **words())


def no_grad(model, x):
    """A region without gradients writes a buffer, its result scales what follows."""
    x = model.steps[1](torch.tanh(model.steps[0](x)))
    with torch.no_grad():
        model.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        scale = x.abs().amax(1, keepdim=True) + x.new_ones(x.shape[0], 1)
    return model.steps[3](model.steps[2](x / scale) - model.average)


def integers(model, x):
    """What crosses is partly not floating point."""
    x = model.first(x)
    best = x.argmax(1)
    x = torch.tanh(model.second(x))
    return model.third(x) + F.one_hot(best, 8).to(x.dtype)


def shared_bias(model, x):
    """A table of biases without a batch dimension is computed once and read by every layer."""
    bias = model.table(torch.arange(8) % 4).mean(0)
    scale = model.temperature.exp()
    for step in model.steps:
        x = torch.tanh(step(x) + bias) * scale
    return x


def flattened(model, x):
    """Sizes that are expressions of the batch size."""
    rows = x.shape[0]
    x = model.steps[0](x).reshape(rows * 2, 4)
    x = model.steps[1](x.reshape(rows, 8)) / rows
    return model.steps[3](model.steps[2](x) + torch.zeros(rows, 8, dtype=x.dtype))


def filled(model, x):
    """A tensor is made empty and written piece by piece."""
    both = torch.zeros(x.shape[0], 2, 8, dtype=x.dtype)
    both[:, 0] = model.steps[0](x)
    both[:, 1] = model.steps[1](x)
    return model.steps[3](model.steps[2](both.sum(1)))


def mask_in_place(model, x):
    """A mask is written in place, then read by every layer."""
    mask = torch.ones(8, 8, dtype=x.dtype)
    mask[2:, 3] = 0
    mask.tril_()
    for step in model.steps:
        x = torch.tanh(step(x)) @ mask
    return x


def parametrized():
    return nn.Sequential(OrderedDict(first=weight_norm(linear()), second=spectral_norm(linear()), third=linear()))


def queries(model, tokens):
    """Learned tokens are expanded over the batch and read by every layer."""
    queries = model.queries.expand(tokens.shape[0], -1, -1)
    x = torch.cat((queries, model.embed(tokens)), 1)
    for step in model.steps:
        x = torch.tanh(step(x)) + F.pad(queries, (0, 0, 0, tokens.shape[1]))
    return model.head(x[:, 3:])


def norm_twice():
    """A module with buffers is called twice: what updates them stays together."""
    held = {"norm": nn.BatchNorm2d(4), "first": nn.Conv2d(2, 4, 1), "second": nn.Conv2d(4, 4, 1)}
    return Made(lambda m, x: m.third(m.norm(m.second(m.norm(m.first(x))))), **held, third=nn.Conv2d(4, 2, 1))


def wrapped():
    return nn.Sequential(OrderedDict(net=nn.Sequential(nn.Sequential(linear(), nn.Tanh(), nn.Flatten(), linear()))))


def twice(model, x):
    return model.first(torch.tanh(model.second(torch.tanh(model.first(x)))))


OF_NUMBERS = {
    "settled": lambda: By(settled, half=0),
    "stochastic depth": lambda: By(stochastic_depth),
    "filled": lambda: Made(filled, steps=steps()),
    "mask in place": lambda: Made(mask_in_place, steps=steps()),
    "parametrized": parametrized,
    "autocast": lambda: By(autocast),
    "chain": Chain,
    "in place": lambda: By(lambda _, x: F.relu(x, inplace=True)),
    "views": lambda: By(views),
    "dropout": lambda: By(lambda model, x: F.dropout(torch.tanh(x), 0.3, model.training)),
    "skips": lambda: Made(
        skips, down1=linear(8, 6), down2=linear(6, 4), middle=linear(4, 4), up2=linear(8, 6), up1=linear(12, 8)
    ),
    "no grad": lambda: Made(no_grad, steps=steps(), average=torch.zeros(8)),
    "twice": lambda: Made(twice, first=linear(), second=linear()),
    "integers": lambda: Made(integers, first=linear(), second=linear(), third=linear()),
    "shared bias": lambda: Made(
        shared_bias, steps=steps(), table=nn.Embedding(4, 8), temperature=nn.Parameter(torch.tensor(0.5))
    ),
    "flattened": lambda: Made(flattened, steps=steps()),
    "wrapped": wrapped,
    "one layer": lambda: Chain(1),
}
OF_TEXT = {
    "queries": lambda: Made(queries, queries=nn.Parameter(torch.randn(3, 8)), steps=steps(3), **words(max_norm=1.0)),
    "language": language,
    "language with dropout": lambda: language(0.2),
    "recurrent": lambda: Made(
        lambda m, x: m.head(m.body(m.embed(x))[0]), body=nn.LSTM(8, 8, 2, batch_first=True), **words()
    ),
    "transformer": transformer,
    "masked": masked,
}
MODELS = {name: (make, regression, mean_square) for name, make in OF_NUMBERS.items()}
MODELS |= {name: (make, text, cross_entropy) for name, make in OF_TEXT.items()}
MODELS |= {"norms": (norms, images, mean_square), "norm twice": (norm_twice, images, mean_square)}
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


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 2

    @staticmethod
    def backward(context, gradient):
        return gradient * 3


class OwnFunction(Chain):
    def between(self, x):
        return Doubled.apply(x)


class Checkpointed(Chain):
    reentrant = False

    def between(self, x):
        return torch.utils.checkpoint.checkpoint(torch.tanh, x, use_reentrant=self.reentrant)


class Branching(Chain):
    def between(self, x):
        return x * 2 if x.sum() > 0 else x


class Late(Chain):
    """Another model after forty forwards."""

    def __init__(self):
        super().__init__()
        self.state = {"n": 0}

    def between(self, x):
        self.state["n"] += 1
        return torch.tanh(x) * (2 if self.state["n"] > 40 else 1)


def counting_loss():
    n = 0

    def loss(output, batch):
        nonlocal n
        n += 1
        return mean_square(output, batch) * min(n, 40)

    return loss


class Between(nn.Module):
    def __init__(self, model, step):
        super().__init__()
        self.model, self.step = [model], step

    def forward(self, x):
        return self.model[0].between(self.step(x))


def listed(model):
    """List the layers of a chain, what stands between them included."""
    return [Between(model, step) for step in model.steps]
