"""Losses of several terms: what is refused, and that counts are known before anything runs forward."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.capture.cache.store import load_graph, save_graph
from autopar.capture.layers.build import counting_module, counts_of
from autopar.capture.layers.export import capture, capture_module
from autopar.capture.layers.losses import check_loss
from autopar.capture.model.batch import given_model, named_tensors
from autopar.capture.model.terms import Term, starts_of, terms_of, total_of
from autopar.errors import AutoparError, CaptureError, ModelError

Batch = tuple[torch.Tensor, ...]
BATCH = (torch.randn(12, 4, dtype=torch.float64), torch.arange(12) % 3)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def _entropy(output: torch.Tensor, batch: Batch, label: int) -> tuple[torch.Tensor, torch.Tensor]:
    mask = batch[1] == label
    return (F.cross_entropy(output, batch[1], reduction="none") * mask).sum(), mask.sum()


def _two(output: torch.Tensor, batch: Batch) -> dict[str, Any]:
    right = (output.argmax(1) == batch[1]).double().mean()
    return {"one": _entropy(output, batch, 1), "size": output.square().mean(), "log": {"right": right}}


def _total_beside(output: torch.Tensor, batch: Batch) -> dict[str, Any]:
    one, size = F.cross_entropy(output, batch[1]), output.square().mean()
    return {"loss": one + 0.5 * size, "one": one, "size": size}


def _detached(output: torch.Tensor, batch: Batch) -> dict[str, Any]:
    return {"loss": F.cross_entropy(output, batch[1]), "right": (output.argmax(1) == batch[1]).double().mean()}


def _counts_outputs(output: torch.Tensor, batch: Batch) -> dict[str, Any]:
    taken = output.argmax(1) == 1
    return {"taken": ((output.square().sum(1) * taken).sum(), taken.sum()), "all": F.cross_entropy(output, batch[1])}


def _unequal(output: torch.Tensor, batch: Batch) -> dict[str, Any]:
    mask = batch[1] == 1
    return {
        "one": (F.cross_entropy(output, batch[1], reduction="none") * mask).sum() / mask.sum().clamp(min=1),
        "size": output.square().mean(),
    }


@pytest.mark.parametrize(
    ("loss", "kind", "said"),
    [
        (
            _total_beside,
            ModelError,
            "'loss' is made of the others, as a total beside its parts; return the parts alone",
        ),
        (_detached, ModelError, "a term 'right' without a gradient; a figure that is only logged belongs under 'log'"),
        (
            _counts_outputs,
            CaptureError,
            "the count of 'taken' in what loss.* is computed of the model's output, and has",
        ),
        (
            _unequal,
            ModelError,
            "'one' and 'size' that loss.* returns must be a mean over samples, or a sum over labels",
        ),
        (lambda output, batch: {"log": {"a": output.mean()}}, ModelError, "a mapping without a term"),
        (lambda output, batch: {"a:b": output.mean()}, ModelError, "a term 'a:b'; names must be texts without a colon"),
        (lambda output, batch: {"a": output}, ModelError, r"a term 'a' that has shape \(2, 3\); it must be a scalar"),
    ],
)
def test_what_terms_must_not_be_is_refused(loss: Callable[..., Any], kind: type[AutoparError], said: str) -> None:
    model = _model()
    user = given_model(model, BATCH, loss=loss)
    with pytest.raises(kind, match=said):
        check_loss(user, model, capture(user, model), accept_loss=False)


def test_counts_are_known_before_anything_runs_and_refused_of_listed_layers(tmp_path: Path) -> None:
    model = _model()
    user = given_model(model, BATCH, loss=_two)
    graph = capture(user, model)
    assert not check_loss(user, model, graph, accept_loss=False).difference
    assert graph.outputs == ("sum:one", "count:one", "mean:size", "log:right")
    assert starts_of(graph.outputs) == ("sum:one", "mean:size")
    save_graph(graph, tmp_path)
    for each in (graph, load_graph(tmp_path)):
        module = counting_module(each.layers[-1], each.inputs)
        assert module is not None
        assert counts_of(module, 12, each.layers[-1], named_tensors(BATCH)).tolist() == [4.0]
    assert counting_module(graph.layers[0], graph.inputs) is None
    terms = terms_of(("sum:a", "count:a", "mean:b", "logsum:c", "logcount:c"))
    assert terms[2] == Term("c", "logsum:c", "logcount:c", logged=True)
    assert total_of(terms, [(5.0, 0.0), (6.0, 4.0), (7.0, 1.0)]) == 1.5
    with pytest.raises(CaptureError, match="'one' by a count of its own, which a model whose layers are listed"):
        capture_module(_model(), BATCH, _two, list)
