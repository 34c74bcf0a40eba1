"""Batch normalisation, deferred or synchronised, gives what torch gives of whole mini-batches, or micro-batches."""

from pathlib import Path
from typing import Any

import pytest

from autopar.errors import UsageError
from autopar.options.train import TrainSettings
from drawn_models import model_case
from training_cases import check

STEPS = 3
SETTINGS = {
    "deferred": TrainSettings(deferred_batch_norm=True),
    "synced": TrainSettings(sync_batch_norm=True),
    "own": TrainSettings(),
}
PLANS: dict[str, dict[str, Any]] = {
    "one rank": {"widths": (1,), "micro_batches": 3, "rows": 4},
    "uneven shares": {"widths": (2, 3), "micro_batches": 3, "rows": 7, "schedule": "1f1b"},
    "single rows": {"widths": (1, 2), "micro_batches": 2, "rows": 3, "cuts": [1], "shares": [[3], [2, 1]]},
    "recomputed": {"widths": (2, 1), "micro_batches": 3, "rows": 5, "schedule": "gpipe", "recompute": True},
    "chunks": {"widths": (2, 1), "micro_batches": 4, "rows": 5, "schedule": "interleaved", "chunks": 2},
    "in turn": {"widths": (2, 1, 2), "micro_batches": 3, "rows": 4, "turns": [0, 2]},
    "one waits": {"widths": (2, 2), "micro_batches": 1, "rows": 4, "turns": [0]},
}


@pytest.mark.some(8)
@pytest.mark.parametrize(
    ("model", "how", "plan"),
    [
        *(("batch_normed", "deferred", plan) for plan in PLANS if plan != "single rows"),
        *(("batch_normed", "synced", plan) for plan in PLANS if plan not in ("in turn", "one waits")),
        # Cumulative averages of listed layers.
        *(("normed_layers", how, plan) for how in ("deferred", "synced") for plan in ("recomputed", "uneven shares")),
    ],
)
@pytest.mark.reliability(41)
def test_statistics_are_those_of_whole_mini_batches_or_micro_batches(
    model: str, how: str, plan: str, tmp_path: Path
) -> None:
    case = model_case(model)
    made = case.plan(**PLANS[plan])
    losses = case.train(made, tmp_path, STEPS, SETTINGS[how])
    truth = case.truth(made, STEPS, deferred=how == "deferred", synced=how == "synced")
    check(made, truth, tmp_path, losses, every=True)


@pytest.mark.parametrize("how", ["deferred", "own"])
def test_a_single_value_per_channel_is_refused_as_torch_refuses_it(how: str, tmp_path: Path) -> None:
    case = model_case("batch_normed")
    assert {layer.least_rows for layer in case.graph.layers} == {1, 2}
    with pytest.raises(UsageError, match=r"1 sample of a micro-batch at once to layer \S+, which takes at least 2"):
        case.train(case.plan(**PLANS["single rows"]), tmp_path, 1, SETTINGS[how])


def test_a_model_without_batch_normalisation_is_refused(tmp_path: Path) -> None:
    case = model_case("everything")
    with pytest.raises(UsageError, match="`sync_batch_norm`: the model has no batch normalisation"):
        case.train(case.plan((1,), 1, 2), tmp_path, 1, SETTINGS["synced"])
