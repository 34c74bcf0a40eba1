"""Checkpoints of jobs that scripts step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import autopar
from autopar.capture.export import capture
from autopar.errors import FileError, UsageError
from autopar.formats.plan import Shard
from autopar.ranks.pool import RankPool
from autopar.runtime.checkpoint.folder import CheckpointFolder
from autopar.runtime.start.script import ScriptJob
from dictated import dictate
from in_teams import in_teams
from script_jobs import BATCH, batches, described, loss, make_model


def planned(widths: list[int], shard: Shard = "none", sizes: Sequence[int] = ()) -> autopar.Plan:
    user = described()
    graph = capture(user, user.build())
    plan = dictate(graph, user, widths, 2, BATCH // 2, shard=shard)
    plan = in_teams(graph, plan, sizes) if sizes else plan
    return autopar.Plan.parse(plan.dumps(), Path("plan.json"))


def train(
    pool: RankPool, widths: list[int], folder: Path, until: int, shard: Shard = "none", sizes: Sequence[int] = ()
) -> list[dict[str, Any]]:
    plan = planned(widths, shard, sizes)
    arguments = {"plan": plan.dumps(), "folder": str(folder), "until": until}
    found = pool.run("script_jobs:train_between", arguments, ranks=len(plan.devices), timeout_s=60.0)
    return cast(list[dict[str, Any]], found)


@pytest.mark.reliability(23)
def test_a_script_goes_on_from_what_another_plan_saved(tmp_path: Path, pool: RankPool) -> None:
    whole = train(pool, [1], tmp_path / "whole", 7)[0]["losses"]
    losses: list[float] = []
    chain: list[tuple[int, list[int], Shard, Sequence[int]]] = [
        (1, [1, 2], "none", ()),
        (2, [1, 1], "none", (4, 2)),
        (3, [2, 1], "parameters", ()),
        (4, [2, 1], "parameters", (2, 1)),
        (5, [1, 1, 1], "none", ()),
        (7, [3], "none", ()),
    ]
    for until, widths, shard, sizes in chain:
        results = train(pool, widths, tmp_path / "parts", until, shard, sizes)
        assert {result["begun"] for result in results} == {len(losses)}
        assert all("has trained" in result["said"] for result in results)
        losses += results[0]["losses"]
    assert losses == pytest.approx(whole, rel=1e-12)
    assert CheckpointFolder(tmp_path / "parts").steps() == [6, 7]


def test_generators_go_on_where_there_are_as_many_ranks(tmp_path: Path, pool: RankPool) -> None:
    train(pool, [1, 1], tmp_path, 3)
    torch.manual_seed(2)
    expected = float(torch.rand(()))
    assert [result["drawn"] for result in train(pool, [1, 1], tmp_path, 4)] == [expected, expected]


def test_a_folder_of_another_run_is_left_alone(tmp_path: Path) -> None:
    (batch,) = batches(1)
    with autopar.materialize(make_model(), planned([1]), batch, loss=loss) as job:
        assert job.load(tmp_path) == 0
        job.step(batch)
        job.save(tmp_path, wait=True)
        assert CheckpointFolder(tmp_path).steps() == [1]
    with (
        autopar.materialize(make_model(), planned([1]), batch, loss=loss) as job,
        pytest.raises(UsageError, match=r"holds checkpoints already, the newest of step 1; .*load\(\)"),
    ):
        job.save(tmp_path)
    (tmp_path / "step-1" / "manifest.json").write_text("")
    with (
        autopar.materialize(make_model(), planned([1]), batch, loss=loss) as job,
        pytest.raises(FileError, match="no checkpoint is sound"),
    ):
        job.load(tmp_path)


def test_a_parameter_that_has_got_other_memory_is_saved_as_it_is(tmp_path: Path) -> None:
    (batch,) = batches(1)

    def parameters(job: ScriptJob) -> dict[str, torch.Tensor]:
        assert job._built_job is not None
        return dict(job._built_job.job.parameters)

    with autopar.materialize(make_model(), planned([1]), batch, loss=loss) as job:
        job.step(batch)
        job.save(tmp_path, wait=True)
        for parameter in parameters(job).values():
            parameter.data = torch.full_like(parameter, 3.0)
        job.step(batch)
        expected = {name: parameter.detach().clone() for name, parameter in parameters(job).items()}
        job.save(tmp_path, wait=True)
    with autopar.materialize(make_model(), planned([1]), batch, loss=loss) as job:
        assert job.load(tmp_path) == 2
        assert all(torch.equal(parameter, expected[name]) for name, parameter in parameters(job).items())
