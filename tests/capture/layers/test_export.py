"""Modules of a file that are in evaluation mode are trained all the same, and a note says so; a script's stay so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.capture.layers.export import capture
from autopar.capture.model.batch import given_model

BATCH = (torch.randn(4, 4), torch.randn(4, 4))


class Stays(nn.Dropout):
    """Keeps its mode, as frozen parts of some models do."""

    def train(self, mode: bool = True) -> Stays:
        return super().train(False)


def _model() -> nn.Sequential:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    return nn.Sequential(inner, nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), Stays(0.5)))


def _loss(output: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return (output - batch[-1]).square().mean()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: None, None),
        (lambda model: model[3].eval(), "3 was in evaluation mode"),
        (lambda model: (model[0].eval(), model[1].eval()), "0, 1 were in evaluation mode"),
        (lambda model: model[0][1].eval(), "0.1 was in evaluation mode"),
        (lambda model: model.eval(), "the model was in evaluation mode"),
    ],
)
def test_what_is_put_back_into_training_is_named(change: Callable[[nn.Sequential], object], said: str | None) -> None:
    model = _model()
    model[3][1].eval()
    change(model)
    script = given_model(model, BATCH, loss=_loss)
    if model.training:
        before = [module.training for module in model.modules()]
        assert (capture(script, model).notes, [module.training for module in model.modules()]) == ((), before)
    notes = capture(replace(script, keeps_modes=False), model).notes
    assert [note.partition(" (eval")[0] for note in notes] == ([] if said is None else [said])
    assert model[0].training
    assert model[1].training


def test_of_many_the_first_are_named() -> None:
    model = nn.Sequential(*[nn.Linear(4, 4).eval() for _ in range(8)])
    (note,) = capture(replace(given_model(model, BATCH, loss=_loss), keeps_modes=False), model).notes
    assert note.startswith("0, 1, 2, 3, 4, 3 more were in evaluation mode")
