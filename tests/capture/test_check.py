"""Layers give the plain model's loss, gradients and buffers, run one after another; what they would lose is refused.

What a refusal names as the remedy is typed: the model is captured then, and its gradients are the plain model's.
"""
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.capture import capture_module, load, named_tensors, slice_rows
from autopar.capture.batch import rebuild
from autopar.capture.check import check_gradients
from autopar.capture.store import load_graph, save_graph
from autopar.errors import CaptureError, ModelError
from capture_zoo import MODELS, build
from paths import EXAMPLES
from stage_runs import assert_equal_to_plain

WIDTH, CLASSES = 6, 3
Batch = dict[str, torch.Tensor]


def rows(count: int = 8) -> Batch:
    torch.manual_seed(1)
    return {
        "x": torch.randn(count, WIDTH),
        "labels": torch.randint(0, CLASSES, (count,)),
        "targets": torch.randint(1, CLASSES, (count, 2)),
        "lengths": torch.randint(1, 3, (count,)),
    }


def classes(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(output, batch["labels"])


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x).tanh()))

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return x


class CarriedHidden(Base):
    """A recurrent state that is kept from batch to batch, as in training by truncated backpropagation."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.hidden: torch.Tensor | None = None

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        output, hidden = self.cell(x.unsqueeze(1).expand(-1, 4, -1), self.hidden)
        self.hidden = hidden.detach()
        return output[:, -1]


class FreshHidden(CarriedHidden):
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = None
        return super().middle(x)


class CarriedMean(Base):
    def __init__(self) -> None:
        super().__init__()
        self.mean: torch.Tensor | None = None

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        mean, self.mean = self.mean, x.detach().mean(0)
        return x if mean is None else x - mean


class BufferedMean(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        y = x - self.mean
        self.mean.copy_(x.detach().mean(0))
        return y


class Sequences(Base):
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(1) * torch.arange(1, 6).view(1, 5, 1)


def ctc(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    scores = output.log_softmax(-1).transpose(0, 1)
    lengths = torch.full((len(output),), 5)
    return F.ctc_loss(scores, batch["targets"], lengths, batch["lengths"], reduction="none").mean()


class Middle(nn.Module):
    def __init__(self, model: Base) -> None:
        super().__init__()
        self.first, self.middle = model.first, model.middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.middle(self.first(x).tanh())


def listed(model: Base) -> list[nn.Module]:
    return [Middle(model), model.last]


class Case(NamedTuple):
    model: Callable[[], nn.Module]
    said: str
    remedied: Callable[[], nn.Module]
    loss: Callable[..., Any] = classes
    layers: Callable[..., Any] | None = None


CASES = {
    "hidden state": Case(CarriedHidden, r"CarriedHidden\.hidden carries .* begin every forward", FreshHidden),
    "mean": Case(CarriedMean, r"CarriedMean\.mean is replaced .* register it as a buffer and write into", BufferedMean),
    "ctc": Case(Sequences, r"ctc_loss makes a tensor .*; give layers\(model\)", Sequences, ctc, listed),
}


@pytest.mark.parametrize("name", CASES)
def test_a_refusal_names_what_is_wrong_and_its_remedy_works(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    with pytest.raises(CaptureError, match=case.said):
        capture_module(case.model(), rows(), case.loss)
    torch.manual_seed(0)
    model = case.remedied()
    graph = capture_module(model, rows(), case.loss, case.layers)
    assert len(graph.layers) >= 2
    check_gradients(model, graph, rows(), case.loss)


def test_old_weight_norm_is_profiled_from_python() -> None:
    with warnings.catch_warnings(action="ignore"):
        model = nn.Sequential(nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.ReLU(), nn.Linear(WIDTH, CLASSES))
    batch = (rows()["x"], rows()["labels"])

    def loss(output: torch.Tensor, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(output, batch[-1])

    loss(model(batch[0]), batch).backward()
    found = autopar.profile(model, batch, loss=loss, budget_s=0.1)
    assert [layer.name for layer in found.layers] == ["0", "1", "2"]


class Routed(nn.Module):
    """Tokens are weighed by a router, whose balance over all of them is part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shares = self.router(x).softmax(-1)
        return sum(shares[:, at : at + 1] * each(x) for at, each in enumerate(self.experts)), shares.mean(0)


def balanced(output: tuple[torch.Tensor, torch.Tensor], batch: Sequence[torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(output[0], batch[-1]) + (output[1] ** 2).sum()


def test_a_routers_balance_is_refused_with_what_is_exact() -> None:
    batch = (rows()["x"], rows()["labels"])
    with pytest.raises(ModelError, match=r"`accept_loss=True`.* `micro_batches=1` and `stages` of one replica each"):
        autopar.profile(Routed(), batch, loss=balanced, budget_s=0.1)
    found = autopar.profile(Routed(), batch, loss=balanced, budget_s=0.1, accept_loss=True)
    assert found.loss_difference


def some_cuts(count):
    """Every boundary at once, and a few random choices of 2 to 8 stages."""
    yield tuple(range(1, count))
    draw = random.Random(count)
    for stages in range(2, min(8, count) + 1):
        yield tuple(sorted(draw.sample(range(1, count), stages - 1)))


@pytest.mark.parametrize("name", MODELS)
def test_stages_at_any_boundaries_equal_the_plain_model(name):
    model, batch, loss = build(name)
    graph = capture_module(model, batch, loss)
    for cuts in some_cuts(len(graph.layers)):
        assert_equal_to_plain(model, graph, batch, loss, cuts)


@pytest.mark.parametrize("name", MODELS)
def test_a_graph_captured_at_two_samples_runs_at_one_and_at_six(name):
    model, batch, loss = build(name)
    tensors = named_tensors(batch)
    graph = capture_module(model, rebuild(batch, slice_rows(tensors, 0, 2)), loss)
    for rows in (1, 6):
        part = rebuild(batch, slice_rows(tensors, 0, rows))
        assert_equal_to_plain(model, graph, part, loss, range(1, len(graph.layers)))


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_graph_is_the_same_and_small(name, tmp_path):
    model, batch, loss = build(name)
    graph = capture_module(model, batch, loss)
    save_graph(graph, tmp_path)
    loaded = load_graph(tmp_path)
    assert not any(buffer.requires_grad for layer in loaded.layers for buffer in layer.module.buffers())
    attributes = ("name", "modules", "inputs", "outputs", "parameters", "buffers", "random", "fingerprint")
    for one, other in zip(graph.layers, loaded.layers, strict=True):
        assert [getattr(one, a) for a in attributes] == [getattr(other, a) for a in attributes]
        assert all(p.device.type == "meta" for p in other.module.parameters())
    assert (loaded.tensors, loaded.inputs, loaded.outputs) == (graph.tensors, graph.inputs, graph.outputs)
    assert loaded.loss == graph.loss
    assert_equal_to_plain(model, loaded, batch, loss, range(1, len(graph.layers)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "resnet", "mlp"])
def test_the_examples_equal_the_plain_model(name):
    user = load(str(EXAMPLES / f"{name}.py"))
    model = user.build(0).double()
    batch = named_tensors(user.load_batch(user.dataset(), range(4)))
    batch = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
    batch = rebuild(user.load_batch(user.dataset(), range(4)), batch)
    graph = capture_module(model.train(), batch, user.loss)
    assert len(graph.layers) >= 8
    assert_equal_to_plain(model, graph, batch, user.loss, range(1, len(graph.layers)))


def test_capturing_leaves_the_model_as_it_was():
    model, batch, loss = build("norms")
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    state = torch.get_rng_state()
    graph = capture_module(model, batch, loss)
    check_gradients(model, graph, batch, loss)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert all(parameter.grad is None for parameter in model.parameters())
    own = {id(parameter) for parameter in model.parameters()}
    assert all(id(parameter) in own for layer in graph.layers for parameter in layer.module.parameters())
