"""A backward in two halves is the whole one: bit for bit, each gradient made once, each parameter added to once."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import reduce
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import get_gradient_edge

from autopar.capture.layers.split_backward import SplitBackward
from autopar.capture.model.effects import StorageTracker


class Parts(nn.Module):
    """Parameters and modules for the cases below."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.three = (nn.Linear(4, 4) for _ in range(3))
        self.norm, self.batch = nn.LayerNorm(4), nn.BatchNorm1d(4)
        self.conv = nn.Conv1d(1, 2, 3, padding=1)
        self.words = nn.Embedding(5, 4)
        self.cell = nn.LSTM(4, 4, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.scale, self.frozen = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2))
        self.to(dtype)


Run = Callable[[Parts, Sequence[torch.Tensor]], Sequence[torch.Tensor]]


def several(m: Parts, x: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    shared = m.one(x[0])
    return [shared.exp(), m.two(shared) * x[1], m.three(x[1]), shared]


def many_kinds(m: Parts, x: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    y = m.conv(m.batch(x[0])[:, None]).sum(1)
    z, _ = m.cell(y[None])
    w, _ = m.attention(z, z + m.words(torch.tensor([[0, 3, 3]])), z, need_weights=False)
    return [F.dropout(w[0], 0.5, training=True) @ m.three.weight + m.three.bias, y.unbind(0)[1]]


def hooked(m: Parts, x: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    y = m.one(x[0])
    y.register_hook(lambda gradient: gradient * 3)
    return [m.two(y)]


class Doubled(torch.autograd.Function):
    """An operator of the user's own, which always makes all its gradients."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight.to(x))
        return 2 * (x @ weight.to(x)).to(weight)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        return 2 * gradients[0].to(weight) @ weight.t(), 2 * x.t() @ gradients[0].to(x)


double: Callable[..., torch.Tensor] = Doubled.apply
RUNS: dict[str, Run] = {
    "a chain": lambda m, x: [m.two(F.gelu(m.one(m.norm(x[0])))) + x[0]],
    "a tied matrix": lambda m, x: [m.one(torch.tanh(m.one(torch.tanh(m.one(x[0])))))],
    "a tied embedding": lambda m, x: [F.linear(torch.tanh(m.two(x[0] + m.words.weight[2])), m.words.weight)],
    "scaled again and again": lambda m, x: [((x[0] * m.scale).sin() * m.scale).cos() * m.scale * m.scale],
    "a weight of weights": lambda m, x: [x[0] @ (w := m.one.weight @ m.two.weight), (x[0] * m.scale) @ w.t() @ w],
    "several outputs": several,
    "parameters alone": lambda m, x: [m.one(x[0]), m.scale.square() * m.frozen, m.one.bias * 2, m.one.bias],
    "twice the same": lambda m, x: [y := m.one(x[0]), y, z := m.scale.exp(), z],
    "inputs that go through": lambda m, x: [x[0], x[0].view(-1), m.one(x[1])],
    "nothing of the leaf": lambda m, x: [m.one(x[0].detach()) + m.words(torch.tensor([1, 2, 1]))],
    "no parameters": lambda m, x: [torch.softmax(x[0], -1) * x[1]],
    "frozen ones": lambda m, x: [x[0] * m.frozen, m.two((x[1] * m.frozen).relu())],
    "many kinds": many_kinds,
    "a hook": hooked,
    "an operator of one's own": lambda m, x: [double(torch.tanh(double(x[0], m.one.weight)), m.two.weight)],
}


def inputs(dtype: torch.dtype, micro_batch: int, leaves: int) -> list[torch.Tensor]:
    torch.manual_seed(micro_batch)
    return [torch.randn(3, 4, dtype=dtype).requires_grad_(at < leaves) for at in range(2)]


def forward(run: Run, model: Parts, x: Sequence[torch.Tensor], cast: bool) -> list[torch.Tensor]:
    torch.manual_seed(7)
    with torch.autocast("cpu", torch.bfloat16) if cast else nullcontext():
        return [output for output in run(model, x) if output.requires_grad]


def starts(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(8)
    return [torch.randn_like(output) for output in outputs]


@pytest.mark.pairs
@pytest.mark.parametrize("leaves", [0, 1, 2])
@pytest.mark.parametrize("kind", ["double", "float", "cast"])
@pytest.mark.parametrize("name", RUNS)
def test_gradients_are_those_of_a_whole_backward_to_the_bit(name: str, kind: str, leaves: int) -> None:
    run = RUNS[name]
    dtype = torch.float64 if kind == "double" else torch.float32
    whole, split = Parts(dtype), Parts(dtype)
    calls: list[str] = []
    for key, parameter in split.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, key=key: calls.append(key))  # type: ignore
    expected, pending = [], []
    for micro_batch in range(3):
        x = inputs(dtype, micro_batch, leaves)
        outputs = forward(run, whole, x, kind == "cast")
        if outputs:
            torch.autograd.backward(outputs, starts(outputs))
        expected.append([each.grad for each in x[:leaves]])
    for micro_batch in range(3):
        x, halves = inputs(dtype, micro_batch, leaves), SplitBackward()
        with halves.recording():
            outputs = forward(run, split, x, kind == "cast")
        gradients = starts(outputs)
        found = halves.input([get_gradient_edge(output) for output in outputs], gradients, x[:leaves])
        for one, other in zip(found, expected[micro_batch], strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other)
        pending.append(halves)
    assert not calls
    for halves in pending:
        calls.clear()
        halves.weight()
        assert not list(halves.pending())
        assert len(calls) == len(set(calls))
    assert [p.grad is None for p in whole.parameters()] == [p.grad is None for p in split.parameters()]
    for name, parameter in whole.named_parameters():
        assert parameter.grad is None or torch.equal(parameter.grad, split.get_parameter(name).grad), name


def test_between_the_halves_nothing_is_alive_but_what_the_second_needs() -> None:
    model, x = Parts(torch.float64), torch.randn(64, 4, dtype=torch.float64, requires_grad=True)
    halves = SplitBackward()
    with StorageTracker() as tracker:
        with halves.recording():
            y = model.two(F.gelu(torch.tanh(model.one(x))))
        row_bytes = x.nbytes
        # Of tanh its result, of gelu its argument, which is the same, and its result; and what the last layer makes.
        assert tracker.alive_bytes == 3 * row_bytes
        edge, gradient = get_gradient_edge(y), torch.ones_like(y)
        del y
        (found,) = halves.input([edge], [gradient], [x])
        # What the layers multiply by (the first one's is older), and what arrived at them; and the gradient.
        held = {id(tensor.untyped_storage()): tensor for tensor in halves.pending() if tensor.shape == x.shape}
        assert len(held) == 4
        assert tracker.alive_bytes == 4 * row_bytes
        del gradient, edge, held
        halves.weight()
        made = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        assert tracker.alive_bytes == row_bytes + made
        assert found is not None


class ReadTwice(torch.autograd.Function):
    """Asks for what it saved as often as it needs it."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        context.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        (x,) = context.saved_tensors
        return gradient * x + context.saved_tensors[0] * gradient


def test_the_first_half_lets_go_of_what_it_alone_reads_and_the_second_adds_shared_gradients() -> None:
    x, layers = torch.randn(4, 3, requires_grad=True), [nn.Linear(3, 3) for _ in range(3)]
    halves, alive = SplitBackward(), list[int]()
    squared = []
    with halves.recording():
        y = x
        for layer in layers:
            squared.append(layer(y))
            squared[-1].register_hook(lambda _: alive.append(sum(1 for _ in halves._saved_tensors.remaining_tensors())))
            y = ReadTwice.apply(squared[-1])
    before = sum(1 for _ in halves._saved_tensors.remaining_tensors())
    (found,) = halves.input([get_gradient_edge(y)], [torch.ones_like(y)], [x])
    # Each hook runs when the squares of one more layer were read, and those before were let go.
    assert [before - count for count in alive] == [0, 1, 2]
    halves.weight()
    assert found is not None
    for leaf, gradient in ((x, found), *((layer.weight, layer.weight.grad) for layer in layers)):
        squares = reduce(lambda y, layer: ReadTwice.apply(layer(y)), layers, x)
        (expected,) = torch.autograd.grad(squares.sum(), leaf)
        assert torch.equal(gradient, expected)
    model, x = Parts(torch.float64), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    halves = SplitBackward()
    with halves.recording():
        y = model.one(model.two(model.one(x)))
    halves.input([get_gradient_edge(y)], [torch.ones_like(y)], [x])
    shapes = sorted(tuple(tensor.shape) for tensor in halves.pending())
    # The gradients of the first layer's weight and bias; argument, transposed weight and gradient of the second's.
    assert shapes == sorted([(4, 4), (4,), (3, 4), (4, 4), (3, 4)])
