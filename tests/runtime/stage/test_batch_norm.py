"""Batch normalisation, deferred or synchronised, gives what torch gives of whole mini-batches, or micro-batches."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.capture.plain.loop import train_plainly
from autopar.errors import UsageError
from autopar.formats.plan import Plan
from autopar.options.train import TrainSettings
from drawn_models import model_case
from training_cases import Case, check

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


@pytest.mark.some(6)
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
    if how == "synced":
        # Of replicas that share statistics, each normalises as one that has all rows.
        truth = case.truth(case.plan((1,), made.micro_batches, made.micro_batch_size), STEPS)
    else:
        truth = replace(case.truth(made, STEPS), buffers=_deferred(case, made))
    check(made, truth, tmp_path, losses, every=True)


def _deferred(case: Case, plan: Plan) -> dict[str, torch.Tensor]:
    """Return the buffers of torch's own layers that look at whole mini-batches; replicas normalise their shares."""
    seen, modules = dict[str, list[torch.Tensor]](), dict[str, nn.Module]()

    def dividing(name: str, norm: nn.modules.batchnorm._BatchNorm) -> Callable[[torch.Tensor], torch.Tensor]:
        (stage,) = (
            stage
            for stage in plan.stages
            if any(
                f"{name}.".startswith(f"{own}.") for layer in stage.layers for own in case.graph.layer(layer).modules
            )
        )
        shares = stage.rows if stage.division == "split" else stage.rows[:1]

        def forward(x: torch.Tensor) -> torch.Tensor:
            seen[name].append(x.detach().clone())
            how = None, None, norm.weight, norm.bias, True, 0.0, norm.eps
            return torch.cat([F.batch_norm(part, *how) for part in x.split(shares)])

        return forward

    def model() -> nn.Module:
        made: nn.Module = case.model.factory()  # type: ignore[assignment]
        modules.update(made.named_modules())
        for name, norm in modules.items():
            if isinstance(norm, nn.modules.batchnorm._BatchNorm):
                seen[name], norm.forward = [], dividing(name, norm)  # type: ignore[method-assign]
        return made

    alone = case.plan((1,), plan.micro_batches, plan.micro_batch_size)
    train_plainly(replace(case.model, factory=model), alone, STEPS)
    for name, every in seen.items():
        norm, calls = modules[name], len(every) // (STEPS * plan.micro_batches)
        for index in range(0, len(every), calls * plan.micro_batches):
            step = every[index : index + calls * plan.micro_batches]
            for call in range(calls):
                type(norm).forward(norm, torch.cat(step[call::calls]))
    names = {f"{name}.{own}" for name in seen for own, _ in modules[name].named_buffers()}
    return {name: each for name, each in modules[""].named_buffers() if name in names}


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
