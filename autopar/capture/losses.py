"""Losses: whether training depends on how a mini-batch is divided, and what to write so that it does not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from autopar.capture.batch import named_tensors
from autopar.capture.configured import PREFIX
from autopar.capture.graph import LayerGraph
from autopar.capture.separable import (
    PARTS,
    USUAL,
    IncomparableError,
    Separation,
    ignored_labels,
    is_large,
    separation,
    uneven_rows,
    with_ignored,
)
from autopar.capture.source import UserModel
from autopar.capture.synthetic import Task, task_of
from autopar.errors import ModelError

SAMPLES = 32
"""Read of a dataset, evenly spread, to find some whose labels count unevenly."""
UNKNOWN = "whether the loss of a mini-batch is that of its micro-batches is not known"
LABELS = "batch.labels"
_OF_LABELS = "(labels != -100).sum()"
_EXACT = (
    "exact is one micro-batch that no replicas divide where samples meet: pass `accept_loss=True`, then "
    "plan with `micro_batches=1` and `stages` of one replica each (of a loss that alone compares samples, the last one)"
)
_ACCEPTING = "or pass `accept_loss=True`, and results depend on micro-batches"


class LossCheck(NamedTuple):
    """What is known of a loss."""

    difference: float | None = None
    """How far a mini-batch's loss is from that of its parts, relative; None where it is none but rounding."""
    note: str | None = None
    """Why it is not known."""


def check_loss(user: UserModel, model: nn.Module, graph: LayerGraph, *, accepted: bool) -> LossCheck:
    """Compare the loss of a few samples with that of their parts.

    Args:
        user: whose loss and data.
        model: in training mode, with values.
        graph: as captured.
        accepted: whether a difference is taken.

    Raises:
        ModelError: they differ, and it is not accepted; says what to write instead, or what is exact.
    """
    # Those of the library are known: labels of tokens and pixels are counted, others are one a sample.
    known = user.loss is None and _of_library(model)
    labels = {} if known or user.spec.startswith(PREFIX) else ignored_labels(graph)
    batch = _uneven(user, model, labels)
    try:
        found = separation(model, batch, user.loss, user.ignored_state)
    except IncomparableError as error:
        return LossCheck(note=f"{UNKNOWN}: {error}")
    if not found.difference:
        return LossCheck()
    if not accepted:
        raise ModelError(f"{user.path}: {_explained(user, graph, batch, labels, found)}")
    return LossCheck(found.difference)


def counted_loss(model: nn.Module) -> Callable[..., Any] | None:
    """Return the loss that counts the labels of a Transformers model's tokens or pixels; none of other models."""
    task = _task(model)
    return None if task is None else task.loss


def _task(model: nn.Module) -> Task | None:
    if not _of_library(model):
        return None
    tasks = (task_of(kind.__name__, model.config) for kind in type(model).__mro__ if issubclass(kind, nn.Module))
    return next((task for task in tasks if task is not None), None)


def _of_library(model: nn.Module) -> bool:
    library = sys.modules.get("transformers")
    return library is not None and isinstance(model, library.PreTrainedModel)


def counts_labels(model: nn.Module, batch: object) -> bool:
    """Tell whether a Transformers model's loss is to be given as sum and count, for its mean is one over labels.

    It is where labels that count unevenly show so; and where the model is too large to be run.
    """
    task = _task(model)
    if task is None or task.loss is None or not isinstance(batch, Mapping) or "labels" not in batch:
        return False
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        return True
    rows = with_ignored(uneven_rows(batch, _count(model)), {LABELS: task.ignored})
    try:
        own, counted = (separation(model, rows, each) for each in (None, task.loss))
    except IncomparableError:
        return False
    return own.difference > 0 and not counted.difference


def _count(model: nn.Module) -> int:
    return 3 if is_large(model) else sum(PARTS)


def _uneven(user: UserModel, model: nn.Module, labels: Mapping[str, int]) -> object:
    """Return samples of the dataset, picked or changed so that their labels count unevenly."""
    dataset = user.dataset()
    samples = user.sample_count(dataset)
    indices = sorted({round(place * (samples - 1) / (SAMPLES - 1)) for place in range(SAMPLES)})
    return with_ignored(uneven_rows(user.load_batch(dataset, indices), _count(model)), labels)


def _explained(
    user: UserModel,
    graph: LayerGraph,
    batch: object,
    labels: Mapping[str, int],
    found: Separation,
) -> str:
    differ = f"the loss and gradients of a mini-batch differ by {found.difference:.2g} from those of its micro-batches"
    if graph.loss == "sum_count":
        remedy = "let the sum be one over labels (or samples), and the count be their number"
        return (
            f"{differ}: (sum, count) do not add up; {remedy}, {_ACCEPTING}"
            if found.weights
            else (f"{differ}: no sum over samples gives it, as of losses that compare samples; {_EXACT}")
        )
    if found.additive:
        return f"{differ}: it is a sum over samples; let loss() return (sum, number of samples), {_ACCEPTING}"
    if found.weights is None:
        return (
            f"{differ}: it is no mean over samples, nor over anything that they have many of (contrastive losses and a "
            f"router's balance are none); {_EXACT}"
        )
    return (
        f"{differ}: it is a mean over something that samples have unevenly many of; let loss(output, batch) return its "
        f"sum and their number, {_formula(user, batch, labels, found.weights)}, {_ACCEPTING}"
    )


def _formula(user: UserModel, batch: object, labels: Mapping[str, int], weights: Sequence[float]) -> str:
    """Return what loss() is to return, with the count that gives the weights where one is found."""
    count = _counted(batch, labels, weights)
    if user.loss is None:
        return f"n = {count or _OF_LABELS}; return output.loss * n, n"
    return f'such as (F.cross_entropy(scores, labels, reduction="sum"), {count or _OF_LABELS})'


def _counted(batch: object, labels: Mapping[str, int], weights: Sequence[float]) -> str | None:
    """Return the expression of a count that is proportional to weights."""
    wanted = torch.tensor(weights, dtype=torch.float64)
    for name, tensor in named_tensors(batch).items():
        flat = tensor.reshape(len(tensor), -1)
        place = "".join(f"[{part}]" if part.isdigit() else f'["{part}"]' for part in name.split(".")[1:])
        for value in dict.fromkeys((USUAL, 0, labels.get(name, USUAL))):
            for start, cut in ((0, ""), (1, "[:, 1:]")):
                counts = (flat[:, start:] != value).sum(1).double()
                if bool((counts != counts[0]).any()) and _proportional(counts, wanted):
                    return f"(batch{place}{cut} != {value}).sum()"
    return None


def _proportional(counts: torch.Tensor, weights: torch.Tensor) -> bool:
    return bool(torch.allclose(counts / counts.sum(), weights / weights.sum(), rtol=1e-4, atol=1e-6))
