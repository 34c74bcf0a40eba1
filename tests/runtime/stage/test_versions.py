"""Versions of weights take the memory that is planned for them; what would see another version is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.capture.export import capture
from autopar.capture.source import load
from autopar.errors import AutoparError, UsageError
from autopar.policies import POLICIES
from autopar.runtime.messages.transport import Transport
from autopar.runtime.start.job import Job
from autopar.schedules.continuing import depths_of, lead
from dictated import dictate
from oracles.unflushed import SAME_BACKWARD
from paths import MODELS
from policy_cases import ROWS, differs, planned
from threads import act_in_threads, train_in_threads


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

    # The last stage updates when all that see the version before are done.
    kept = {"stash": [1, 1, 0], "vertical-sync": [1, 1, 1], "2bw": [1, 1, 0]}[policy]
    user = load(str(tmp_path / "model.py"))
    state = {name: each.detach().clone() for name, each in user.build(0).named_parameters()}
    act_in_threads(plan, capture(user, user.build(0)), user, state, train)


def test_predictions_take_the_memory_that_is_planned_for(tmp_path: Path) -> None:
    plan = planned(tmp_path, "momentum", "predict", [3, 2, 1], 1, ahead="xpipe")
    taken: dict[int, list[float]] = {}

    def train(job: Job, transport: Transport) -> None:
        for step in range(-lead(plan), 9):
            job.step(step, 9)
        job.finish()
        buffers = POLICIES["predict"].buffers(depths_of(plan, job.rank))
        taken[job.rank] = [job.versions.bytes / sum(each.nbytes for each in job.parameters.values()), buffers]

    user = load(str(tmp_path / "model.py"))
    state = {name: each.detach().clone() for name, each in user.build(0).named_parameters()}
    act_in_threads(plan, capture(user, user.build(0)), user, state, train)
    # The first stages' backwards see the newest.
    assert taken == {0: [1, 1], 1: [1, 1], 2: [2, 2]}


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


@pytest.mark.parametrize("policy", SAME_BACKWARD)
@pytest.mark.parametrize(("depths", "micro_batches"), [([3, 2, 1], 2), ([5, 3, 1], 4)])
def test_listed_modules_may_keep_weights_themselves_or_run_again(
    tmp_path: Path, policy: str, depths: list[int], micro_batches: int
) -> None:
    plan = planned(tmp_path, "momentum", policy, depths, micro_batches, model="keeping")
    assert differs(tmp_path, plan) < 1e-12


def test_a_function_that_keeps_a_part_of_a_weight_itself_is_refused_by_name(tmp_path: Path) -> None:
    plan = planned(tmp_path, "momentum", "stash", [3, 2, 1], 2, model="keeping", special={"PART": True})
    with pytest.raises(AutoparError, match=r"function Product keeps a part of a parameter .*save_for_backward\(\)"):
        differs(tmp_path, plan)
