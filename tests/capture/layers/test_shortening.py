"""Shortening: graphs for short samples compute what the model computes of them, and whole samples tell the rest."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.capture.graph import LayerGraph
from autopar.capture.layers import export, shortening
from autopar.capture.layers.check import check_gradients
from autopar.capture.layers.export import capture_module
from autopar.capture.layers.losses import check_loss
from autopar.capture.layers.shortening import SHORTEST, DifferentError
from autopar.capture.model.batch import given_model
from autopar.errors import CaptureError, ModelError

LENGTH, WIDTH = 64, 8
Batch = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _all_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "WORTH", -1.0)


def _batch(rows: int = 6, length: int = LENGTH) -> Batch:
    tokens = torch.randint(5, 50, (rows, length), generator=torch.Generator().manual_seed(rows))
    mask = torch.ones(rows, length, dtype=torch.int64)
    for row in range(1, rows):
        mask[row, length - 3 * row :] = 0
    return {"tokens": tokens, "mask": mask, "labels": tokens.where(mask.bool(), -100)}


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.lin = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)


class _Sliced(_Block):
    """Attention whose mask is a buffer for the longest samples."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("allowed", torch.ones(LENGTH, LENGTH).tril().bool())

    def forward(self, h: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        length = h.shape[1]
        scores = (h @ self.lin(h).mT).masked_fill(~self.allowed[:length, :length], float("-inf"))
        return h + scores.softmax(-1) @ h


class _Padded(_Block):
    """Attention to what is no padding."""

    def forward(self, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q = self.lin(self.norm(h)).view(*h.shape[:2], 2, WIDTH // 2).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, q, q, mask[:, None, None, :].bool())
        return h + out.transpose(1, 2).reshape(h.shape)


class _Turned(_Block):
    """Positions by angles, made without a gradient."""

    def forward(self, h: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            angles = torch.arange(h.shape[1], device=h.device)[:, None] * torch.arange(1, WIDTH + 1)
        return h + self.lin(h) * angles.to(h.dtype).cos()


class _Convolved(_Block):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, h: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return h + torch.tanh(self.conv(h.mT).mT)


class _Pooled(_Block):
    """Means over the mask, and over halves."""

    def forward(self, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        mean = (h * mask[..., None]).sum(1, keepdim=True) / mask.sum(1)[:, None, None].clamp(min=1)
        return h + self.lin(mean).expand(-1, h.shape[1], -1) + h.view(h.shape[0], 2, -1, WIDTH).mean(1).repeat(1, 2, 1)


class _Added(_Block):
    def forward(self, h: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return h + self.lin(h).cumsum(1) / torch.arange(1, h.shape[1] + 1)[:, None]


KINDS: list[type[_Block]] = [_Sliced, _Padded, _Turned, _Convolved, _Pooled, _Added]


class _Net(nn.Module):
    def __init__(self, kinds: list[type[_Block]]) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(kind() for kind in kinds)
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            h = block(h, mask)
        return self.head(h)  # type: ignore[no-any-return]


def _counted(output: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    loss = F.cross_entropy(output[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")
    return loss, (batch["labels"][:, 1:] != -100).sum()


def _net(seed: int) -> _Net:
    torch.manual_seed(seed)
    return _Net(random.Random(seed).sample(KINDS, 3)).double()


def _captured(model: nn.Module, loss: Callable[..., object] = _counted, batch: Batch | None = None) -> LayerGraph:
    return capture_module(model, batch or _batch(2), loss)


@pytest.mark.some(2)
@pytest.mark.parametrize("seed", range(20))
def test_layers_for_short_samples_have_the_plain_models_gradients_of_them(seed: int) -> None:
    model = _net(seed)
    graph = _captured(model)
    assert set(graph.short.short.values()) == {16}
    short = graph.short.batch(_batch())
    assert short["labels"].shape == (6, 16)
    check_gradients(model, graph.short.graph, short, _counted)
    # The layers for whole samples are those that are captured without short ones.
    check_gradients(model, graph.short.graph.__class__(**{**vars(graph), "short": None}), _batch(), _counted)
    assert [layer.name for layer in graph.layers] == [layer.name for layer in graph.short.graph.layers]


@pytest.mark.some(1)
@pytest.mark.parametrize("seed", [0, 3])
def test_a_layer_that_is_wrong_for_short_samples_is_found_and_whole_ones_decide(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _net(seed)
    graph = _captured(model)
    ran: list[int] = []
    check = check_gradients.__globals__["_check_gradients"]

    def counting(model: nn.Module, graph: LayerGraph, batch: Batch, *rest: object) -> None:
        ran.append(batch["labels"].shape[1])
        check(model, graph, batch, *rest)

    monkeypatch.setitem(check_gradients.__globals__, "_check_gradients", counting)
    check_gradients(model, graph, _batch(), _counted)
    assert ran == [16]
    wrong = graph.short.graph.layers[1].module
    node = next(node for node in wrong.graph.nodes if node.op == "call_function" and node.name.startswith("add"))
    node.args = (node.args[0], node.args[0])
    wrong.recompile()
    check_gradients(model, graph, _batch(), _counted)
    assert ran == [16, 16, LENGTH]


class _Crossing(_Net):
    """Attends to a second text, of another length."""

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        known, h = self.words(source), self.words(tokens)
        return super().forward(tokens, mask) + self.head((h @ known.mT).softmax(-1) @ known)


@pytest.mark.some(1)
@pytest.mark.parametrize("length", [48, 200])
def test_two_texts_of_different_lengths_are_both_shortened(length: int) -> None:
    model = _Crossing([_Added]).double()

    def batch(rows: int) -> Batch:
        return {**_batch(rows), "source": _batch(rows, length)["tokens"]}

    graph = _captured(model, batch=batch(2))
    short = graph.short.batch(batch(6))
    assert short["source"].shape[1] < length
    assert short["tokens"].shape[1] < LENGTH
    check_gradients(model, graph.short.graph, short, _counted)


class _Fixed(_Net):
    def __init__(self) -> None:
        super().__init__([_Added])
        self.mix = nn.Linear(LENGTH, LENGTH)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens, mask) + self.mix(mask.double())[..., None]


class _Branching(_Net):
    """Does something else with samples below 20."""

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        output = super().forward(tokens, mask)
        return output.sin() if tokens.shape[1] > 20 else output.cos()


class _Remembering(_Net):
    """Keeps a table of the first forward's length."""

    table: torch.Tensor | None = None

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(tokens.shape[1]).double()
        return super().forward(tokens, mask) * self.table[:, None]


@functools.lru_cache
def _table(width: int) -> torch.Tensor:
    return torch.arange(width).double().cos()


class _Cached(_Net):
    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens, mask) * _table(50)


def test_rows_and_lengths_are_shortened_within_what_the_model_does_with_whole_ones() -> None:
    assert _captured(_Fixed().double()).short is None
    assert set(_captured(_Branching([_Added]).double()).short.short.values()) == {32}
    model = _Deciding(by_length=False).double()
    assert _captured(model).short is not None
    assert model.kind == ""
    assert _captured(_Deciding(by_length=True).double()).short is None
    model = _Remembering([_Added]).double()
    graph = _captured(model)
    assert graph.short is None
    check_gradients(model, graph, _batch(), _counted)
    model = _Cached([_Added]).double()
    check_gradients(model, _captured(model), _batch(), _counted)
    assert type(_table(50)) is torch.Tensor
    mask = torch.ones(4, 1000, dtype=torch.int64)
    mask[2, -1] = 0
    places = shortening._places([mask], 16)
    assert places is not None
    assert len(places) == 16
    assert mask[:, places].sum(1).tolist() == [16, 16, 15, 16]
    assert shortening._places([], 16) is None
    # So many tensors that differ, each at a place of its own, that no 16 places show it.
    tensors = [torch.ones(2, 1000, dtype=torch.int64) for _ in range(20)]
    for at, tensor in enumerate(tensors):
        tensor[1, 7 * at + 500 : 7 * at + 502] = 0
    with pytest.raises(DifferentError):
        shortening._places(tensors, 16)


class _Deciding(_Net):
    """Decides in the first forward, once, what it says of itself: by its samples' length, or whatever that is."""

    def __init__(self, *, by_length: bool) -> None:
        super().__init__([_Added])
        self.by_length, self.kind = by_length, ""

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self.kind = self.kind or (f"of {tokens.shape[1]:d}" if self.by_length else "of tokens")
        return super().forward(tokens, mask)


class _Hooked(_Net):
    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        output = super().forward(tokens, mask)
        output.register_hook(lambda gradient: 2 * gradient)
        return output


class _Stepping(_Net):
    count = 0.0

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().forward(tokens, mask) * self.count


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("kind", "said"),
    [(_Hooked, "a hook on a gradient cannot be captured"), (_Stepping, "count changes from 1.0 to 2.0")],
)
def test_what_cannot_be_captured_is_refused_on_short_samples_too(kind: type[_Net], said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        _captured(kind([_Added]).double())


def _mean(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


@pytest.mark.some(1)
@pytest.mark.parametrize("length", [LENGTH, 40])
def test_losses_that_differ_by_few_labels_are_refused_on_short_samples(length: int) -> None:
    batch = _batch(24, length)
    batch["labels"] = batch["tokens"].clone()
    batch["labels"][3, 17], batch["labels"][8, [2, 30]] = -100, -100
    user = given_model(model := _net(2), batch, loss=_mean)
    graph = _captured(model, _mean, {name: tensor[:2] for name, tensor in batch.items()})
    with pytest.raises(ModelError, match="return a sum and the number that it is divided by"):
        check_loss(user, model, graph, accept_loss=False)


def test_lengths_that_can_be_halved_are_free_but_in_images() -> None:
    sizes = {"long": (4, 2 * SHORTEST), "short": (4, 2 * SHORTEST - 1), "image": (4, 3, 64, 64)}
    assert shortening.free_dims({name: torch.zeros(size) for name, size in sizes.items()}) == {"long": [1], "short": []}
