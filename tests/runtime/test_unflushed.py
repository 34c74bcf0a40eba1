"""Training without flushes equals its policy's rule, carried out in one process with every version kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.capture.source import StageTraits, stage_traits
from autopar.formats.plan import Plan
from autopar.policies import StageDepths, UpdatesAhead, updates_ahead
from autopar.runtime.gradients import Reducer
from autopar.schedules.expand import expand
from edits import edited
from oracles.turns import train_in_turns
from oracles.unflushed import RULES, SAME_BACKWARD, Rule, Trained
from policy_cases import differs, planned, trained

OPTIMIZERS = ("sgd", "momentum", "adam", "adamw")
DEPTHS = [([3, 2, 1], 2), ([5, 3, 1], 4), ([2, 1], 1), ([1], 1), ([4, 4, 2, 1], 3), ([7, 5, 3, 1], 6), ([2, 2, 2], 2)]
LAGS = [([3, 2, 1], 2, 1), ([2, 1], 1, 1), ([4, 3, 2, 1], 1, 2), ([5, 3, 1], 4, 2), ([4, 3, 2, 1], 3, 2)]
"""Depths, micro-batches, and how many of them later the last stage knows the gradient of what it shares."""


@pytest.mark.parametrize("policy", RULES)
@pytest.mark.parametrize(("depths", "micro_batches"), DEPTHS)
def test_training_equals_the_rule(tmp_path: Path, policy: str, depths: list[int], micro_batches: int) -> None:
    optimizer = OPTIMIZERS[(len(depths) + micro_batches) % 4]
    if (policy, optimizer) == ("predict", "sgd"):
        optimizer = "adamw"
    assert differs(tmp_path, planned(tmp_path, optimizer, policy, depths, micro_batches)) < 1e-12


@pytest.mark.parametrize("policy", RULES)
@pytest.mark.parametrize("depths", [[3, 2, 1], [3, 3, 2]])
def test_layers_that_run_again_see_the_weights_of_their_backward(
    tmp_path: Path, policy: str, depths: list[int]
) -> None:
    plan = planned(tmp_path, "adam", policy, depths, 2, recompute=True)
    assert all(len(stage.recompute) == len(stage.layers) for stage in plan.stages)
    assert differs(tmp_path, plan) < 1e-12


@pytest.mark.parametrize("policy", RULES)
@pytest.mark.parametrize("recompute", [False, True])
def test_layers_draw_by_the_mini_batch_of_their_micro_batch(tmp_path: Path, policy: str, recompute: bool) -> None:
    plan = planned(tmp_path, "adam", policy, [5, 3, 1], 4, special={"DROPS": 0.3}, recompute=recompute)
    assert differs(tmp_path, plan) < 1e-12


@pytest.mark.parametrize("policy", SAME_BACKWARD)
def test_some_layers_run_again_where_that_changes_nothing(tmp_path: Path, policy: str) -> None:
    plan = planned(tmp_path, "adam", policy, [3, 2, 1], 2, recompute={"0", "2"})
    assert any(stage.recompute for stage in plan.stages)
    assert differs(tmp_path, plan) < 1e-12


@pytest.mark.parametrize("policy", RULES)
def test_replicas_that_split_micro_batches_are_as_one(tmp_path: Path, policy: str) -> None:
    plan = planned(tmp_path, "momentum", policy, [3, 2, 1], 2, widths=[2, 1, 2])
    assert differs(tmp_path, plan) < 1e-12


@pytest.mark.parametrize("policy", RULES)
@pytest.mark.parametrize("seed", range(4))
def test_edited_programs_train_by_the_rule(tmp_path: Path, policy: str, seed: int) -> None:
    turns: dict[str, Any] = {"widths": [2, 1, 2], "turns": [0, 2]} if policy == "stash" and seed % 2 else {}
    depths, micro_batches = ([3, 2, 1], 1) if turns else ([5, 3, 3], 4)
    plan = planned(tmp_path, "adam", policy, depths, micro_batches, **turns)
    program = edited(plan, seed, attempts=300)
    assert program != expand(plan)
    assert differs(tmp_path, plan, program=program) < 1e-12


TURNS: list[tuple[list[int], list[int], list[int]]] = [
    ([3, 1], [0], [2, 1]),
    ([2, 1, 1], [0], [2, 2, 1]),
    ([2, 3], [0, 1], [3, 1]),
    ([2, 2, 2], [1, 2], [4, 2, 1]),
    ([1, 2], [1], [3, 1]),
    ([3], [0], [2]),
]
"""Replicas, stages whose take turns, and micro-batches in flight on each."""


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("widths", "turns", "depths"), TURNS)
def test_replicas_that_take_turns_are_updated_by_the_mean_of_their_mini_batches(
    tmp_path: Path, optimizer: str, widths: list[int], turns: list[int], depths: list[int]
) -> None:
    plan = planned(tmp_path, optimizer, "stash", depths, 1, widths=widths, turns=turns)
    assert differs(tmp_path, plan) < 1e-12


@pytest.mark.parametrize("special", [{"COUNTS": True}, {"DROPS": 0.3}, {"FROZEN": (0, 4)}, {"FROZEN": (0, 1)}])
def test_replicas_that_take_turns_count_draw_and_freeze_as_one_would(
    tmp_path: Path, special: dict[str, object]
) -> None:
    more = {"recompute": True} if "DROPS" in special else {}
    plan = planned(tmp_path, "momentum", "stash", [2, 1], 1, special=special, widths=[3, 1], turns=[0], **more)
    assert differs(tmp_path, plan) < 1e-12


def test_replicas_that_take_turns_clip_the_mean(tmp_path: Path) -> None:
    plan = planned(tmp_path, "momentum", "stash", [2, 1], 1, widths=[3, 1], turns=[0])
    assert differs(tmp_path, plan, clip_norm=0.02, clip="stage") < 1e-12


@pytest.mark.parametrize("part", ["depth", "replicas"])
def test_other_turns_are_found(tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(tmp_path, "momentum", "stash", [2, 1], 1, widths=[3, 1], turns=[0])

    def other(module: torch.nn.Module, depths: list[int], replicas: list[int], *more: Any) -> Trained:  # noqa: ANN401
        if part == "depth":
            return train_in_turns(module, [depths[0] + 1, *depths[1:]], replicas, *more)
        return train_in_turns(module, depths, [replicas[0] - 1, *replicas[1:]], *more)

    monkeypatch.setattr("policy_cases.train_in_turns", other)
    assert differs(tmp_path, plan, losses=False) > 1e-4


@pytest.mark.parametrize(
    ("policy", "micro_batches", "said"),
    [
        ("vertical-sync", 1, "of which only stash has a rule; plan with `policy='stash'`"),
        ("stash", 2, "which have whole mini-batches; plan with `micro_batches=1`"),
    ],
)
def test_turns_that_no_rule_knows_are_refused(tmp_path: Path, policy: str, micro_batches: int, said: str) -> None:
    plan = planned(tmp_path, "sgd", policy, [2, 1], micro_batches, widths=[2, 1], turns=[0])
    assert plan.refusal == f"weight policy {policy}: replicas of stage 0 take turns, {said}"


@pytest.mark.parametrize("policy", RULES)
@pytest.mark.parametrize("stage", [0, 1])
def test_a_delay_off_by_one_on_one_stage_is_found(
    tmp_path: Path, policy: str, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(tmp_path, "momentum", policy, [3, 2, 1], 2)
    rule = RULES[policy]

    def late(depths: Sequence[int], micro_batches: int) -> Rule:
        right = rule(depths, micro_batches)
        return lambda asked: max(0, right(asked) - (asked.stage == stage))

    monkeypatch.setitem(RULES, policy, late)
    assert differs(tmp_path, plan, losses=False) > 1e-4


@pytest.mark.parametrize("recompute", [False, True])
def test_pipemare_begins_with_synchronous_steps(tmp_path: Path, recompute: bool) -> None:
    plan = planned(tmp_path, "adamw", "pipemare", [5, 3, 1], 2, synchronous_steps=5, recompute=recompute)
    assert differs(tmp_path, plan) < 1e-12


@pytest.mark.parametrize("part", ["rate_factor", "DECAY"])
def test_a_part_of_pipemare_that_is_left_out_is_found(
    tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {"rate_factor": lambda *_: 1.0, "DECAY": 0.2}[part]
    monkeypatch.setattr(f"autopar.runtime.stage.versions.{part}", other)
    plan = planned(tmp_path, "momentum", "pipemare", [5, 3, 1], 2)
    assert differs(tmp_path, plan, losses=False) > 1e-4


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_prediction_by_another_number_of_updates_is_found(
    tmp_path: Path, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    off = UpdatesAhead(ahead, 0)
    monkeypatch.setattr("autopar.runtime.start.job.updates_ahead", lambda at: off if at.depth > 1 else at.ahead or off)
    plan = planned(tmp_path, "momentum", "predict", [3, 2, 1], 2)
    assert differs(tmp_path, plan, losses=False) > 1e-4


@pytest.mark.parametrize(("depths", "micro_batches"), [*DEPTHS, ([5, 4, 3, 2, 1], 1)])
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_xpipe_predicts_as_far_ahead_as_its_constants_say(
    tmp_path: Path, optimizer: str, depths: list[int], micro_batches: int
) -> None:
    widths = [2 if at % 2 else 1 for at in range(len(depths))]
    plan = planned(tmp_path, optimizer, "predict", depths, micro_batches, widths=widths, ahead="xpipe")
    assert differs(tmp_path, plan) < 1e-12


@pytest.mark.parametrize("recompute", [False, True])
def test_xpipes_backwards_see_predictions_when_layers_run_again_and_draw(tmp_path: Path, recompute: bool) -> None:
    special = {"DROPS": 0.3, "COUNTS": True}
    plan = planned(tmp_path, "adam", "predict", [5, 3, 1], 4, special=special, recompute=recompute, ahead="xpipe")
    assert differs(tmp_path, plan) < 1e-12


@pytest.mark.parametrize(("depths", "micro_batches", "lag"), LAGS)
def test_xpipe_predicts_what_stages_share(tmp_path: Path, depths: list[int], micro_batches: int, lag: int) -> None:
    plan = planned(tmp_path, "adam", "predict", depths, micro_batches, special={"SHARED": True}, ahead="xpipe")
    assert differs(tmp_path, plan, lags=[*[0] * (len(depths) - 1), lag]) < 1e-12


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_an_xpipe_constant_off_by_one_is_found(tmp_path: Path, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def off(place: StageDepths) -> UpdatesAhead:
        right = updates_ahead(place)
        return right._replace(**{which: getattr(right, which) + (place.depth == 2)})

    monkeypatch.setattr("autopar.runtime.start.job.updates_ahead", off)
    plan = planned(tmp_path, "momentum", "predict", [3, 2, 1], 2, ahead="xpipe")
    assert differs(tmp_path, plan, losses=False) > 1e-4


@pytest.mark.parametrize("policy", [policy for policy in RULES if policy != "pipemare"])
@pytest.mark.parametrize(("depths", "micro_batches", "lag"), LAGS)
@pytest.mark.parametrize("widths", [1, 2])
def test_stages_that_share_a_parameter_update_it_alike(
    tmp_path: Path, policy: str, depths: list[int], micro_batches: int, lag: int, widths: int
) -> None:
    if policy == "2bw":
        micro_batches = max(micro_batches, depths[0] - 1)
    optimizer = OPTIMIZERS[1 + (len(depths) + micro_batches) % 3]
    every = [widths, *[1] * (len(depths) - 2), widths]
    plan = planned(tmp_path, optimizer, policy, depths, micro_batches, special={"SHARED": True}, widths=every)
    assert len(plan.tied) == 1
    lags = () if policy == "2bw" else [*[0] * (len(depths) - 1), lag]
    assert differs(tmp_path, plan, lags=lags) < 1e-12


@pytest.mark.parametrize("policy", RULES)
@pytest.mark.parametrize(("depths", "micro_batches"), DEPTHS)
def test_what_a_loss_counts_is_known_when_it_is_needed(
    tmp_path: Path, policy: str, depths: list[int], micro_batches: int
) -> None:
    special = {"COUNTS": True}
    plan = planned(tmp_path, "adamw", policy, depths, micro_batches, special=special, widths=[1] * len(depths))
    assert differs(tmp_path, plan) < 1e-12


@pytest.mark.parametrize(("depths", "micro_batches"), DEPTHS)
@pytest.mark.parametrize("special", [{}, {"SHARED": True}, {"COUNTS": True}, {"SHARED": True, "COUNTS": True}])
def test_two_buffers_clip_by_the_norm_of_all_gradients(
    tmp_path: Path, depths: list[int], micro_batches: int, special: dict[str, object]
) -> None:
    widths = [2 if at % 2 else 1 for at in range(len(depths))]
    plan = planned(tmp_path, "momentum", "2bw", depths, micro_batches, special=special, widths=widths)
    assert differs(tmp_path, plan, clip_norm=0.02) < 1e-12


@pytest.mark.parametrize("policy", RULES)
@pytest.mark.parametrize(("depths", "micro_batches"), DEPTHS)
@pytest.mark.parametrize("counts", [False, True])
def test_stages_clip_by_norms_of_their_own(
    tmp_path: Path, policy: str, depths: list[int], micro_batches: int, counts: bool
) -> None:
    widths = [2 if at % 2 else 1 for at in range(len(depths))]
    plan = planned(
        tmp_path, "momentum", policy, depths, micro_batches, special={"COUNTS": counts}, widths=widths, recompute=counts
    )
    assert differs(tmp_path, plan, clip_norm=0.02, clip="stage") < 1e-12


@pytest.mark.parametrize("policy", RULES)
def test_a_bound_that_no_norm_reaches_changes_no_bit(tmp_path: Path, policy: str) -> None:
    plan = planned(tmp_path, "momentum", policy, [3, 2, 1], 2, special={"COUNTS": True}, widths=[1, 2, 1])
    found = [trained(tmp_path, plan, **each) for each in ({}, {"clip_norm": 1e9, "clip": "stage"})]
    assert all(torch.equal(each, found[1][name]) for name, each in found[0].items())


@pytest.mark.parametrize("policy", ["sync", "2bw"])
def test_the_norm_of_the_one_stage_is_the_models(tmp_path: Path, policy: str) -> None:
    plan = planned(tmp_path, "momentum", policy, [1], 2, widths=[2])
    found = [trained(tmp_path, plan, clip_norm=0.02, clip=each) for each in ("model", "stage")]
    assert all(torch.equal(each, found[1][name]) for name, each in found[0].items())


def test_a_norm_that_lacks_a_gradient_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = Reducer.gradients_of_stage
    monkeypatch.setattr(Reducer, "gradients_of_stage", lambda reducer, index: every(reducer, index)[1:])
    plan = planned(tmp_path, "momentum", "stash", [3, 2, 1], 2, widths=[2, 1, 1])
    assert differs(tmp_path, plan, clip_norm=0.02, clip="stage", losses=False) > 1e-4


@pytest.mark.parametrize(("depths", "micro_batches"), [([3, 2, 1], 2), ([2, 1], 3)])
@pytest.mark.parametrize("clip_norm", [None, 0.02])
def test_two_buffers_skip_updates_of_scaled_losses_that_overflow(
    tmp_path: Path, depths: list[int], micro_batches: int, clip_norm: float | None
) -> None:
    special = {"SPOILED": (5, 77, 100)}
    plan = planned(tmp_path, "momentum", "2bw", depths, micro_batches, special=special, precision="fp16")
    assert differs(tmp_path, plan, clip_norm=clip_norm, losses=False) < 1e-12


def test_an_update_of_a_shared_parameter_at_another_time_is_found(tmp_path: Path) -> None:
    plan = planned(tmp_path, "momentum", "stash", [3, 2, 1], 2, special={"SHARED": True})
    assert differs(tmp_path, plan, lags=[0, 0, 0], losses=False) > 1e-4


def test_a_norm_that_counts_replicas_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reducer, "owned_gradients", Reducer.complete)
    plan = planned(tmp_path, "momentum", "2bw", [3, 2, 1], 2, widths=[2, 1, 1])
    assert differs(tmp_path, plan, clip_norm=0.02, losses=False) > 1e-4


TELLING = [(policy, *each) for policy in RULES for each in DEPTHS if each[1] > 1 or policy != "2bw"]
"""Of 2BW, those whose updates are all one behind; capture/test_source.py counts others."""


@pytest.mark.parametrize(("policy", "depths", "micro_batches"), TELLING)
def test_an_optimizer_is_told_the_delay_and_the_replicas_of_its_stage(
    tmp_path: Path, policy: str, depths: list[int], micro_batches: int
) -> None:
    widths = [2 if at % 2 else 1 for at in range(len(depths))]
    plan = planned(tmp_path, "momentum", policy, depths, micro_batches, widths=widths, told=True)
    assert differs(tmp_path, plan) < 1e-12


@pytest.mark.parametrize("off", [{"delay": 0.25}, {"replicas": 2}])
def test_another_delay_or_number_of_replicas_is_found(
    tmp_path: Path, off: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = stage_traits

    def wrong(plan: Plan, options: tuple[str, ...]) -> list[StageTraits]:
        first, *others = right(plan, options)
        return [first._replace(**off), *others]  # type: ignore[arg-type]

    monkeypatch.setattr("autopar.runtime.update.stage_traits", wrong)
    plan = planned(tmp_path, "momentum", "stash", [3, 2, 1], 2, told=True)
    assert differs(tmp_path, plan, losses=False) > 1e-4


@pytest.mark.parametrize("policy", RULES)
@pytest.mark.parametrize("frozen", [(0,), (1, 2), (4,)])
def test_stages_may_have_nothing_to_train(tmp_path: Path, policy: str, frozen: tuple[int, ...]) -> None:
    plan = planned(tmp_path, "momentum", policy, [3, 2, 1], 2, special={"FROZEN": frozen}, widths=[1, 2, 1])
    learning = [layer for stage in plan.stages for layer in stage.layers if int(layer) not in frozen]
    assert len(learning) == 5 - len(frozen)
    assert differs(tmp_path, plan, clip_norm=0.02, clip="model" if policy == "2bw" else "stage") < 1e-12
