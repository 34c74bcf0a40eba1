"""A loss that is not that of its micro-batches, put together, is refused with what to write, or what is exact."""
# ruff: noqa: ANN001, ANN003, ANN201, ANN202

import re
import threading
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.capture.layers.export import capture
from autopar.capture.layers.losses import LossCheck, check_loss, separation, with_ignored
from autopar.capture.model.batch import given_model
from autopar.errors import ModelError
from capture_zoo import DEAR, MODELS, By, build, mean_square


# Layers of "flattened" divide by the number of samples.
@pytest.mark.parametrize("name", [name for name in MODELS if name not in {"flattened"} | DEAR])
def test_means_over_samples_are_those_of_their_parts_whatever_the_layers_draw_or_average(name):
    model, batch, loss = build(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    assert separation(model, batch, loss).difference == 0
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(part.training for part in model.modules())


def plainly(model, batch, loss, sizes):
    """Return the relative difference of a batch's mean loss and its parts', weighted by samples."""
    whole = loss(model(batch[0]), batch).item()
    parts = zip(*(tensor.split(sizes) for tensor in batch), strict=True)
    mean = sum(len(x) * loss(model(x), (x, y)).item() for x, y in parts) / sum(sizes)
    return abs(whole - mean) / abs(whole)


@pytest.mark.parametrize(
    "loss",
    [
        lambda output, batch: output.std(),
        lambda output, batch: output.square().mean().sqrt(),
        lambda output, batch: output.sum(),
        lambda output, batch: output[batch[1] > 0].square().mean(),
        lambda output, batch: F.cross_entropy(output @ output.T, torch.arange(len(output))),
        lambda output, batch: F.cross_entropy(output, batch[1].argmax(1), weight=torch.arange(1.0, 9.0).to(output)),
    ],
)
def test_the_difference_is_that_of_a_plain_loop(loss):
    model, batch, _ = build("chain")
    found = separation(model, batch, loss)
    assert found.difference >= plainly(model, batch, loss, (1, 2, 3)) * (1 - 1e-9)
    assert found.difference > 1e-3


def only_float32(_, x):
    if x.dtype is not torch.float32:
        raise TypeError("only float32")
    return x.tanh()


@pytest.mark.parametrize(("loss", "same"), [(mean_square, True), (lambda output, batch: output.std(), False)])
def test_what_float64_does_not_run_is_compared_up_to_rounding(loss, same):
    _, batch, _ = build("chain")
    torch.manual_seed(0)
    found = separation(By(only_float32).train(), [tensor.float() for tensor in batch], loss)
    assert (found.difference == 0) == same


def words():
    return nn.Sequential(nn.Embedding(11, 8), nn.Tanh(), nn.Linear(8, 11))


def texts(padding, rows=24):
    tokens = torch.randint(1, 11, (rows, 10), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone()
    for row in range(12, rows) if padding is not None else ():
        labels[row, 10 - row % 9 :] = padding
    return {"input": tokens, "labels": labels, "mask": (labels == tokens).double()}


def masked_here_and_there(seed):
    """Of every sixth row one label is left out, anywhere; short rows of few tokens look padded without being so."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 3, (36, 6), generator=generator)
    labels = tokens.clone()
    labels[::6].scatter_(1, torch.randint(0, 6, (6, 1), generator=generator), -100)
    return {"input": tokens, "labels": labels}


def usual(output, batch, **options):
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), **options)


def of_zero(output, batch):
    return usual(output, batch, ignore_index=0)


def masked(output, batch):
    each = F.cross_entropy(output.flatten(0, 1), batch["labels"].clamp(min=0).flatten(), reduction="none")
    return (each * batch["mask"].flatten()).sum() / batch["mask"].sum()


def counted(output, batch):
    return usual(output, batch, reduction="sum"), (batch["labels"] != -100).sum()


def contrastive(output, batch):
    rows = output.mean(1)
    return F.cross_entropy(rows @ rows.T, torch.arange(output.shape[0]))


def balanced(output, batch):
    """A router's: the product of two means over tokens."""
    shares = output.softmax(-1).flatten(0, 1).mean(0)
    return usual(output, batch) + (shares * F.one_hot(output.argmax(-1), 11).double().flatten(0, 1).mean(0)).sum()


def prepared(batch, loss):
    torch.manual_seed(0)
    model = words().double().train()
    user = given_model(model, batch, loss=loss)
    return user, model, capture(user, model)


@pytest.mark.parametrize(
    ("padding", "loss"),
    [
        (None, usual),
        (None, masked),
        (None, counted),
        (-100, counted),
        (-100, lambda output, batch: (counted(output, batch)[0], output.shape[0])),
    ],
)
def test_a_loss_that_adds_up_is_taken(padding, loss):
    assert check_loss(*prepared(texts(padding), loss), accept_loss=False) == LossCheck()


COUNTED = r"\(labels != -100\).sum\(\)"


@pytest.mark.parametrize(
    ("padding", "loss", "said"),
    [
        # Its samples are found in the second half.
        (-100, usual, rf'return torch.nn.functional.cross_entropy\(scores, labels, reduction="sum"\), {COUNTED}'),
        (0, of_zero, COUNTED.replace("-100", "0")),
        # All labels count in these samples: they are made uneven.
        (None, of_zero, COUNTED.replace("-100", "0")),
        (-100, masked, COUNTED),
        (
            -100,
            lambda output, batch: (counted(output, batch)[0], 1),
            "the pair that loss.* returns must be a mean over samples, or a sum over labels",
        ),
        (
            -100,
            lambda output, batch: (usual(output, batch), 9),
            "the pair that loss.* returns must be a mean over samples, or a sum over labels",
        ),
        (None, contrastive, "compares samples .* `micro_batches=1` .* one replica"),
        (None, balanced, "compares samples .* `micro_batches=1`"),
        (
            None,
            lambda out, batch: usual(out, batch) * out.shape[0],
            "return a sum and the number that it is divided by",
        ),
    ],
)
def test_a_loss_that_does_not_is_refused_with_what_to_write_or_what_is_exact(padding, loss, said):
    given = prepared(texts(padding), loss)
    with pytest.raises(ModelError, match=said) as refusal:
        check_loss(*given, accept_loss=False)
    assert "`accept_loss=True`" in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert check_loss(*given, accept_loss=True).difference > 1e-3


@pytest.mark.some(3)
@pytest.mark.parametrize("seed", range(8))
def test_samples_without_labels_anywhere_are_found(seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (24,), generator=generator)
    labels[torch.randint(0, 24, (1 + seed % 4,), generator=generator)] = -100
    batch = {"input": torch.randn(24, 4, generator=generator, dtype=torch.float64), "labels": labels}
    user = given_model(
        model := nn.Linear(4, 3).double(), batch, loss=lambda output, batch: F.cross_entropy(output, batch["labels"])
    )
    with pytest.raises(ModelError, match="return a sum and the number that it is divided by"):
        check_loss(user, model, capture(user, model), accept_loss=False)
    with pytest.raises(ModelError, match="return a sum and the number that it is divided by"):
        check_loss(*prepared(masked_here_and_there(seed), usual), accept_loss=False)


@pytest.mark.parametrize(("loss", "same"), [(usual, True), (contrastive, False)])
def test_a_model_that_cannot_be_copied_is_compared_as_it_is(loss, same):
    torch.manual_seed(0)
    model, batch = words().train(), texts(None, rows=6)
    model.lock = threading.Lock()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert (separation(model, batch, loss).difference == 0) == same
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def rows():
    return nn.Sequential(nn.Unflatten(0, (4, -1)), nn.Flatten(1), words(), nn.Unflatten(1, (-1, 10)), nn.Flatten(0, 1))


@pytest.mark.parametrize(
    ("batch", "model", "why"),
    [
        (texts(None, rows=6), rows, r"raise RuntimeError: unflatten"),
        ({**texts(None, rows=6), "labels": torch.full((6, 10), -100)}, words, "it is nan"),
    ],
)
def test_what_cannot_be_compared_is_noted(batch, model, why):
    torch.manual_seed(0)
    model = model().train()
    user = given_model(model, batch, loss=usual)
    graph = capture(given_model(words(), texts(None, rows=6), loss=usual), words())
    found = check_loss(user, model, graph, accept_loss=False)
    assert found.difference is None
    assert re.search(f"not known: .*{why}", found.note)


def test_python_state_of_a_loss_is_put_back() -> None:
    calls = []

    def logged(output, batch):
        calls.append(1)
        return usual(output, batch) * (1 + len(calls))

    user, model, graph = prepared(texts(None), usual)
    user = replace(user, functions={**user.functions, "loss": logged})
    assert check_loss(user, model, graph, accept_loss=False) == LossCheck()


def test_rows_have_fewer_labels_than_others_and_two_at_least():
    labels = {"long": torch.ones(4, 9).long(), "short": torch.ones(4, 3).long()}
    changed = with_ignored(labels, {"batch.long": 7, "batch.short": 7})
    assert [(row == 7).sum().item() for row in changed["long"]] == [6, 3, 0, 6]
    assert [(row == 7).sum().item() for row in changed["short"]] == [1, 1, 0, 1]
