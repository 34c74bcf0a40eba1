"""Training without flushes equals its policy's rule, carried out in one process with every version kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from autopar.capture.export import capture
from autopar.capture.source import load
from autopar.errors import AutoparError, UsageError
from autopar.formats.plan import Plan
from autopar.runtime.messages.transport import Transport
from autopar.runtime.start.job import Job
from autopar.schedules.continuing import lead
from dictated import dictate
from oracles.unflushed import RULES, SAME_BACKWARD, Asked, Rule, train
from paths import MODELS
from threads import act_in_threads, train_in_threads

ROWS, STEPS = 2, 20


def planned(
    folder: Path,
    optimizer: str,
    policy: str,
    depths: Sequence[int],
    micro_batches: int,
    synchronous_steps: int = 0,
    **more: object,
) -> Plan:
    text = (MODELS / "tanh_chain.py").read_text().replace('OPTIMIZER = "sgd"', f'OPTIMIZER = "{optimizer}"')
    (folder / "tanh_chain.py").write_text(text)
    user = load(str(folder / "tanh_chain.py"))
    graph = capture(user, user.build(0))
    widths = more.pop("widths", [1] * len(depths))
    plan = dictate(graph, user, widths, micro_batches, ROWS, warmup=[1] * len(depths), **more)  # type: ignore[arg-type]
    stages = [stage.model_copy(update={"warmup": depth}) for stage, depth in zip(plan.stages, depths, strict=True)]
    settings = {"anneal_steps": 8, "synchronous_steps": synchronous_steps} if policy == "pipemare" else {}
    content = plan.model_copy(update={"stages": tuple(stages), "weight_policy": policy, **settings})
    return Plan.parse(content.dumps(), Path("plan.json"))


def differs(folder: Path, plan: Plan, *, losses: bool = True) -> float:
    """Return how far parameters are from the rule's, relative to the largest; ``losses`` are to be the rule's, too."""
    user = load(str(folder / "tanh_chain.py"))
    module = user.build(0)
    graph = capture(user, user.build(0))
    state = {name: each.detach().clone() for name, each in user.build(0).named_parameters()}
    found_losses = train_in_threads(plan, graph, user, state, folder, STEPS)
    layers = {layer: index for index, stage in enumerate(plan.stages) for layer in stage.layers}
    stage_of = {name: layers[layer.name] for layer in graph.layers for name in layer.parameters.values()}
    functions = user.functions
    data = functions["dataset"]()
    # As docs/seeds.md has it; no test gets to the end of the first epoch.
    order, batches = torch.randperm(len(data), generator=torch.Generator().manual_seed(plan.seed)), []
    for step in range(STEPS):
        samples = [data[int(row)] for row in order[step * plan.batch : (step + 1) * plan.batch]]
        parts = [samples[at : at + ROWS] for at in range(0, plan.batch, ROWS)]
        batches.append([tuple(torch.stack(each) for each in zip(*part, strict=True)) for part in parts])
    depths = [stage.warmup for stage in plan.stages]
    steps = plan.anneal_steps or 1, plan.synchronous_steps
    recomputes = any(stage.recompute for stage in plan.stages)
    asked = Asked(plan.weight_policy, depths, plan.micro_batches, stage_of, *steps, recomputes)
    own: list[Any] = [functions[name] for name in ("loss", "optimizer", "scheduler")]
    truth = train(module, asked, batches, *own)
    assert not losses or found_losses == pytest.approx(truth.losses, rel=1e-12)
    found = {}
    for rank in range(len(plan.devices)):
        found |= load_file(folder / f"parameters-{rank}")
    largest = max(float(each.abs().max()) for each in truth.parameters.values())
    return max(float((found[name] - each).abs().max()) for name, each in truth.parameters.items()) / largest


OPTIMIZERS = ("sgd", "momentum", "adam", "adamw")
DEPTHS = [([3, 2, 1], 2), ([5, 3, 1], 4), ([2, 1], 1), ([1], 1), ([4, 4, 2, 1], 3), ([7, 5, 3, 1], 6), ([2, 2, 2], 2)]


@pytest.mark.parametrize("policy", RULES)
@pytest.mark.parametrize(("depths", "micro_batches"), DEPTHS)
def test_training_equals_the_rule(tmp_path: Path, policy: str, depths: list[int], micro_batches: int) -> None:
    optimizer = OPTIMIZERS[(len(depths) + micro_batches) % 4]
    if (policy, optimizer) == ("predict", "sgd"):
        optimizer = "adamw"
    assert differs(tmp_path, planned(tmp_path, optimizer, policy, depths, micro_batches)) < 1e-12


@pytest.mark.parametrize("policy", RULES)
def test_layers_that_run_again_see_the_weights_of_their_backward(tmp_path: Path, policy: str) -> None:
    plan = planned(tmp_path, "adam", policy, [3, 2, 1], 2, recompute=True)
    assert all(len(stage.recompute) == len(stage.layers) for stage in plan.stages)
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


@pytest.mark.parametrize("policy", SAME_BACKWARD)
def test_versions_take_what_is_kept_and_no_more(tmp_path: Path, policy: str) -> None:
    plan = planned(tmp_path, "sgd", policy, [5, 3, 1], 4)
    most: dict[int, int] = {}

    def train(job: Job, transport: Transport) -> None:
        for step in range(-lead(plan), 12):
            job.step(step, 12)
            most[job.rank] = max(most.get(job.rank, 0), job.versions.bytes)
        job.finish()
        trained = sum(each.nbytes for each in job.parameters.values())
        assert job.versions.bytes == most[job.rank] == kept[job.rank] * trained

    kept = [1 if policy == "2bw" else -(-(depth - 1) // 4) for depth in (5, 5 if policy == "vertical-sync" else 3, 1)]
    if policy == "vertical-sync":
        kept = [1, 1, 1]
    user = load(str(tmp_path / "tanh_chain.py"))
    state = {name: each.detach().clone() for name, each in user.build(0).named_parameters()}
    act_in_threads(plan, capture(user, user.build(0)), user, state, train)


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
    monkeypatch.setattr("autopar.runtime.start.job.updates_ahead", lambda place: ahead * (place.depth > 1))
    plan = planned(tmp_path, "momentum", "predict", [3, 2, 1], 2)
    assert differs(tmp_path, plan, losses=False) > 1e-4


@pytest.mark.parametrize("optimizer", ["sgd", "nesterov"])
def test_an_optimizer_whose_steps_are_not_known_is_refused(tmp_path: Path, optimizer: str) -> None:
    with pytest.raises(
        UsageError, match=r"predict knows the next steps of .*, and not of this SGD; plan with `policy="
    ):
        differs(tmp_path, planned(tmp_path, optimizer, "predict", [3, 2, 1], 2))


def test_a_parameter_that_is_read_conjugated_is_refused_by_name(tmp_path: Path) -> None:
    text = (MODELS / "conjugated.py").read_text()
    (tmp_path / "conjugated.py").write_text(text.replace("z @ self.weight ", "z @ self.weight.conj() "))
    user = load(str(tmp_path / "conjugated.py"))
    graph = capture(user, user.build(0))
    plan = dictate(graph, user, [1], 2, ROWS).model_copy(update={"weight_policy": "stash"})
    module = user.build(0)
    state = {name: each.detach().clone() for name, each in (*module.named_parameters(), *module.named_buffers())}
    with pytest.raises(AutoparError, match=r"conjugated or negated .*; plan with `policy='sync'`"):
        train_in_threads(plan, graph, user, state, tmp_path, 2)
