"""Training without flushes equals its policy's rule, carried out in one process with every version kept."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.schedules.expand import expand
from edits import edited
from oracles.unflushed import RULES, SAME_BACKWARD
from policy_cases import differs, planned, trained

OPTIMIZERS = ("sgd", "momentum", "adam", "adamw")
DEPTHS = ("3,2,1 by 2", "5,3,1 by 4", "2,1 by 1", "1 by 1", "4,4,2,1 by 3", "2,2,2 by 2")
"""By the number of micro-batches."""
LAGS = {"3,2,1 by 2": 1, "2,1 by 1": 1, "4,3,2,1 by 1": 2, "5,3,1 by 4": 2, "4,3,2,1 by 3": 2}
"""How many micro-batches later the last stage knows the gradient of what it shares."""
CLIPPED = {"clip_norm": 0.02, "clip": "stage"}
HOW: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plainly": ({}, {}),
    "recomputing": ({"recompute": True}, {}),
    "drawing": ({"special": {"DROPS": 0.3}}, {}),
    "drawing again": ({"special": {"DROPS": 0.3}, "recompute": True}, {}),
    "replicated": ({"replicated": True}, {}),
    "counting": ({"special": {"COUNTS": True}}, {}),
    "clipped": ({"replicated": True}, CLIPPED),
    "clipped, counting, recomputing": (
        {"special": {"COUNTS": True}, "replicated": True, "recompute": True}, CLIPPED,
    ),
    "told": ({"told": True, "replicated": True}, {}),
    "first layer frozen": ({"special": {"FROZEN": (0,)}, "replicated": True}, CLIPPED),
    "middle frozen": ({"special": {"FROZEN": (1, 2)}, "replicated": True}, CLIPPED),
    "last layer frozen": ({"special": {"FROZEN": (4,)}, "replicated": True}, CLIPPED),
}  # fmt: skip
"""What is planned, and how gradients are clipped."""


def _shape(text: str) -> tuple[list[int], int]:
    depths, micro_batches = text.split(" by ")
    return [int(depth) for depth in depths.split(",")], int(micro_batches)


def _alternating(depths: Sequence[int]) -> list[int]:
    return [2 if at % 2 else 1 for at in range(len(depths))]


@pytest.mark.some(12)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("policy", RULES)
@pytest.mark.parametrize("shape", DEPTHS)
def test_training_equals_the_rule(tmp_path: Path, policy: str, shape: str, how: str) -> None:
    (depths, micro_batches), (wanted, clipping) = _shape(shape), HOW[how]
    if how == "told" and policy == "2bw" and micro_batches == 1:
        pytest.skip("its updates are not all one behind; capture/model/test_source.py counts them")
    optimizer = OPTIMIZERS[(len(depths) + micro_batches + list(HOW).index(how)) % 4]
    if (policy, optimizer) == ("predict", "sgd"):
        optimizer = "adamw"
    widths = _alternating(depths) if wanted.get("replicated") else [1] * len(depths)
    more = {name: value for name, value in wanted.items() if name != "replicated"}
    plan = planned(tmp_path, optimizer, policy, depths, micro_batches, widths=widths, **more)
    assert not more.get("recompute") or all(len(stage.recompute) == len(stage.layers) for stage in plan.stages)
    assert differs(tmp_path, plan, **clipping) < 1e-12


@pytest.mark.parametrize("policy", SAME_BACKWARD)
def test_some_layers_run_again_where_that_changes_nothing(tmp_path: Path, policy: str) -> None:
    plan = planned(tmp_path, "adam", policy, [3, 2, 1], 2, recompute={"0", "2"})
    assert any(stage.recompute for stage in plan.stages)
    assert differs(tmp_path, plan) < 1e-12


@pytest.mark.some(5)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("policy", RULES)
def test_edited_programs_train_by_the_rule(tmp_path: Path, policy: str, seed: int) -> None:
    turns: dict[str, Any] = {"widths": [2, 1, 2], "turns": [0, 2]} if policy == "stash" and seed % 2 else {}
    depths, micro_batches = ([3, 2, 1], 1) if turns else ([5, 3, 3], 4)
    plan = planned(tmp_path, "adam", policy, depths, micro_batches, **turns)
    program = edited(plan, seed, attempts=120)
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


@pytest.mark.some(4)
@pytest.mark.parametrize(("widths", "turns", "depths"), TURNS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_replicas_that_take_turns_are_updated_by_the_mean_of_their_mini_batches(
    tmp_path: Path, optimizer: str, widths: list[int], turns: list[int], depths: list[int]
) -> None:
    plan = planned(tmp_path, optimizer, "stash", depths, 1, widths=widths, turns=turns)
    assert differs(tmp_path, plan) < 1e-12


@pytest.mark.parametrize(
    ("special", "clipping"),
    [({"COUNTS": True}, {}), ({"DROPS": 0.3}, {}), ({"FROZEN": (0, 4)}, {}), ({"FROZEN": (0, 1)}, {}), ({}, CLIPPED)],
)
def test_replicas_that_take_turns_count_draw_freeze_and_clip_as_one_would(
    tmp_path: Path, special: dict[str, object], clipping: dict[str, Any]
) -> None:
    more = {"recompute": "DROPS" in special, "special": special}
    plan = planned(tmp_path, "momentum", "stash", [2, 1], 1, widths=[3, 1], turns=[0], **more)
    assert differs(tmp_path, plan, **clipping) < 1e-12


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


@pytest.mark.parametrize("recompute", [False, True])
def test_xpipe_predicts_for_what_runs_again_and_pipemare_waits(tmp_path: Path, recompute: bool) -> None:
    plan = planned(tmp_path, "adamw", "pipemare", [5, 3, 1], 2, synchronous_steps=5, recompute=recompute)
    assert differs(tmp_path, plan) < 1e-12
    special = {"DROPS": 0.3, "COUNTS": True}
    plan = planned(tmp_path, "adam", "predict", [5, 3, 1], 4, special=special, recompute=recompute, ahead="xpipe")
    assert differs(tmp_path, plan) < 1e-12


@pytest.mark.some(4)
@pytest.mark.parametrize("shape", [*DEPTHS, "5,4,3,2,1 by 1"])
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_xpipe_predicts_as_far_ahead_as_its_constants_say(tmp_path: Path, optimizer: str, shape: str) -> None:
    depths, micro_batches = _shape(shape)
    widths = _alternating(depths)
    plan = planned(tmp_path, optimizer, "predict", depths, micro_batches, widths=widths, ahead="xpipe")
    assert differs(tmp_path, plan) < 1e-12


@pytest.mark.some(6)
@pytest.mark.parametrize("policy", [*(policy for policy in RULES if policy != "pipemare"), "xpipe"])
@pytest.mark.parametrize("shape", LAGS)
@pytest.mark.parametrize("widths", [1, 2])
def test_stages_that_share_a_parameter_update_it_alike(tmp_path: Path, policy: str, shape: str, widths: int) -> None:
    (depths, micro_batches), lag = _shape(shape), LAGS[shape]
    if policy == "2bw":
        micro_batches = max(micro_batches, depths[0] - 1)
    optimizer = OPTIMIZERS[1 + (len(depths) + micro_batches) % 3]
    more = {"special": {"SHARED": True}, "widths": [widths, *[1] * (len(depths) - 2), widths]}
    policy, ahead = ("predict", "xpipe") if policy == "xpipe" else (policy, "counted")
    plan = planned(tmp_path, optimizer, policy, depths, micro_batches, ahead=ahead, **more)
    assert len(plan.tied) == 1
    lags = () if policy == "2bw" else [*[0] * (len(depths) - 1), lag]
    assert differs(tmp_path, plan, lags=lags) < 1e-12


@pytest.mark.some(3)
@pytest.mark.parametrize("shape", DEPTHS)
@pytest.mark.parametrize("special", [{}, {"SHARED": True}, {"COUNTS": True}, {"SHARED": True, "COUNTS": True}])
def test_two_buffers_clip_by_the_norm_of_all_gradients(tmp_path: Path, shape: str, special: dict[str, object]) -> None:
    depths, micro_batches = _shape(shape)
    widths = _alternating(depths)
    plan = planned(tmp_path, "momentum", "2bw", depths, micro_batches, special=special, widths=widths)
    assert differs(tmp_path, plan, clip_norm=0.02) < 1e-12


@pytest.mark.some(2)
@pytest.mark.parametrize("policy", RULES)
def test_a_bound_that_no_norm_reaches_changes_no_bit(tmp_path: Path, policy: str) -> None:
    plan = planned(tmp_path, "momentum", policy, [3, 2, 1], 2, special={"COUNTS": True}, widths=[1, 2, 1])
    found = [trained(tmp_path, plan, **each) for each in ({}, {"clip_norm": 1e9, "clip": "stage"})]
    assert all(torch.equal(each, found[1][name]) for name, each in found[0].items())


@pytest.mark.parametrize(("depths", "micro_batches"), [([3, 2, 1], 2), ([2, 1], 3)])
@pytest.mark.parametrize("clip_norm", [None, 0.02])
def test_two_buffers_skip_updates_of_scaled_losses_that_overflow(
    tmp_path: Path, depths: list[int], micro_batches: int, clip_norm: float | None
) -> None:
    special = {"SPOILED": (5, 77, 100)}
    plan = planned(tmp_path, "momentum", "2bw", depths, micro_batches, special=special, precision="fp16")
    assert differs(tmp_path, plan, clip_norm=clip_norm, losses=False) < 1e-12
