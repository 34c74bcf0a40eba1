"""Replicas that several ranks run together train as one process would."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import plain
from autopar.errors import UsageError
from autopar.formats.plan import Plan
from autopar.runtime.messages.transport import Transport
from autopar.runtime.settings import TrainSettings
from autopar.runtime.start.job import Job
from dictated import dictate
from in_teams import in_teams
from paths import EXAMPLES
from threads import act_in_threads, train_in_threads
from training_cases import (
    FILE,
    NARROW,
    OPTIMIZERS,
    STEPS,
    Case,
    cases,
    check,
    dropout,
    make_case,
    own_part,
    shares_of,
)

__all__ = ["cases", "dropout"]


@pytest.mark.parametrize(
    ("widths", "sizes"),
    [((1,), (2,)), ((2,), (2,)), ((1, 1), (2, 2)), ((1, 1), (1, 2)), ((2, 1), (2, 4)), ((1,), (4,))],
)
def test_training_equals_the_plain_loop(
    widths: Sequence[int], sizes: Sequence[int], cases: dict[tuple[str, str], Case], tmp_path: Path
) -> None:
    case = cases["gpt", "adamw"]
    plan = in_teams(case.graph, dictate(case.graph, case.model, widths, 2, 5), sizes)
    state = {name: each.detach().clone() for name, each in case.model.build(0).named_parameters()}
    losses = train_in_threads(plan, case.graph, case.model, state, tmp_path, STEPS)
    truth = plain.train(case.file, 2, 5, lambda name: shares_of(case.graph, plan, name))
    check(plan, truth, tmp_path, losses)


@pytest.mark.parametrize("policy", ["stash", "pipemare"])
@pytest.mark.parametrize("clip_norm", [0.05, 1e9])
def test_a_stage_is_clipped_by_the_norm_of_all_its_parts(policy: str, clip_norm: float, tmp_path: Path) -> None:
    case = _untied(tmp_path)
    alone = dictate(case.graph, case.model, [1, 1], 2, 5, warmup=[1, 1])
    plans = [_unflushed(in_teams(case.graph, alone, sizes), policy) for sizes in ((1, 1), (2, 2))]
    state = {name: each.detach().clone() for name, each in case.model.build(0).named_parameters()}
    folders = [tmp_path / "alone", tmp_path / "teams"]
    settings = TrainSettings(clip_norm=clip_norm, clip="stage")
    losses = []
    for plan, folder in zip(plans, folders, strict=True):
        folder.mkdir()
        losses.append(train_in_threads(plan, case.graph, case.model, state, folder, STEPS, settings))
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    for rank in range(4):
        wanted = load_file(folders[0] / f"parameters-{rank // 2}")
        for name, found in load_file(folders[1] / f"parameters-{rank}").items():
            torch.testing.assert_close(found, own_part(plans[1], rank, name, wanted[name]), rtol=1e-9, atol=1e-9)


def _untied(folder: Path) -> Case:
    """Return a narrow GPT whose head has a weight of its own, which stages do not share, stepped by SGD."""
    text = FILE.format(
        base=str(EXAMPLES / "gpt.py"), narrow={**NARROW["gpt"], "BLOCKS": 3}, optimizer=OPTIMIZERS["sgd"]
    )
    untied = "found = base.model()\n    found.head.weight = torch.nn.Parameter(found.head.weight.detach().clone())\n"
    (folder / "untied.py").write_text(text.replace("return base.model()", f"{untied}    return found"))
    return make_case(folder / "untied.py")


def _unflushed(plan: Plan, policy: str) -> Plan:
    stages = [stage.model_copy(update={"warmup": depth}) for stage, depth in zip(plan.stages, (2, 1), strict=True)]
    more = {"anneal_steps": 3, "synchronous_steps": 1} if policy == "pipemare" else {}
    return plan.model_copy(update={"stages": tuple(stages), "weight_policy": policy, **more})


OF_MATRICES = "torch.optim.Muon([each for each in parameters if each.dim() == 2])"


@pytest.mark.parametrize(("optimizer", "refused"), [(OF_MATRICES, True), (OPTIMIZERS["adamw"], False)])
def test_an_optimizer_that_looks_at_whole_parameters_is_refused_before_training(
    optimizer: str, refused: bool, tmp_path: Path
) -> None:
    text = FILE.format(base=str(EXAMPLES / "gpt.py"), narrow={**NARROW["gpt"], "BLOCKS": 2}, optimizer=optimizer)
    (tmp_path / "model.py").write_text(text)
    case = make_case(tmp_path / "model.py")
    plan = in_teams(case.graph, dictate(case.graph, case.model, (1,), 2, 5), (2,))
    state = {name: each.detach().clone() for name, each in case.model.build(0).named_parameters()}
    said: list[str] = []

    def attempt(job: Job, transport: Transport) -> None:
        try:
            job.try_optimizer()
        except UsageError as error:
            said.append(str(error))

    act_in_threads(plan, case.graph, case.model, state, attempt)
    assert len(said) == (2 if refused else 0)
    assert all(
        "cannot step parts of parameters" in each and "plan with `stages` of one device" in each for each in said
    )
