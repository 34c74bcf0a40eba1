"""A rehearsal on fake tensors counts the bytes that training processes hold."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from autopar.capture.export import capture
from autopar.capture.graph import LayerGraph
from autopar.capture.source import UserModel, load
from autopar.cli.simulate import rehearse as rehearse_command
from autopar.errors import TrainingError
from autopar.formats.plan import Shard
from autopar.formats.references import allow_any_path
from autopar.ranks.pool import RankPool
from autopar.runtime.rehearsal.memory import rehearse, rehearse_model
from autopar.runtime.start.workspace import Workspace
from autopar.schedules.expand import rank_of
from dictated import dictate
from in_teams import in_teams
from paths import EXAMPLES, HARNESS, MODELS

MODELS = {
    "gpt": EXAMPLES / "gpt.py",
    "resnet": EXAMPLES / "resnet.py",
    "everything": MODELS / "everything.py",
}


class Subject(NamedTuple):
    user: UserModel
    graph: LayerGraph
    workspace: Path


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    @cache
    def prepared(model: str) -> Subject:
        user, folder = load(str(MODELS[model])), tmp_path_factory.mktemp(model)
        graph = capture(user, user.build(0))
        Workspace(folder).prepare(user, dictate(graph, user, (1,), 1, 2), None)
        return Subject(user, graph, folder)

    return prepared


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "widths", "schedule", "shard"),
    [
        ("gpt", (1, 1, 1, 1), "1f1b", "none"),
        ("gpt", (1, 2), "gpipe", "none"),
        ("resnet", (1, 1), "gpipe", "none"),
        ("resnet", (2, 1), "1f1b", "none"),
        ("everything", (1, 1, 2), "1f1b", "none"),
        ("resnet", (1, 2), "1f1b", "optimizer"),
        ("everything", (2, 1), "zb-h1", "gradients"),
        ("resnet", (3,), "1f1b", "parameters"),
    ],
)
def test_a_rehearsal_counts_what_training_holds(
    pool: RankPool, subject: Callable[[str], Subject], model: str, widths: Sequence[int], schedule: str, shard: Shard
) -> None:
    user, graph, workspace = subject(model)
    plan = dictate(graph, user, widths, micro_batches=4, rows=4, schedule=schedule, shard=shard)
    arguments = {"plan": plan.dumps(), "model": str(MODELS[model]), "workspace": str(workspace)}
    held = pool.run("rank_jobs:train_and_weigh", arguments, ranks=len(plan.devices))
    rehearsed = rehearse(plan, graph, user)
    real = [max(held[rank_of(plan, s, i)] for i in range(width)) for s, width in enumerate(widths)]
    assert rehearsed == pytest.approx(real, rel=0.005, abs=200)


@pytest.fixture(scope="module")
def eight_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HARNESS), prepend=os.pathsep)
        with RankPool(8, imports=["autopar.runtime.start.worker"]) as pool:
            yield pool


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "widths", "sizes", "shard"),
    [
        ("gpt", (1,), (1,), "none"),
        ("gpt", (1,), (2,), "none"),
        ("gpt", (1, 1), (4, 2), "none"),
        ("gpt", (1,), (8,), "none"),
        ("gpt", (2,), (2,), "parameters"),
        ("everything", (1,), (4,), "none"),
    ],
)
def test_a_rehearsal_counts_what_a_part_holds(
    eight_ranks: RankPool,
    subject: Callable[[str], Subject],
    model: str,
    widths: Sequence[int],
    sizes: Sequence[int],
    shard: Shard,
) -> None:
    user, graph, workspace = subject(model)
    plan = in_teams(graph, dictate(graph, user, widths, micro_batches=4, rows=4, schedule="1f1b", shard=shard), sizes)
    arguments = {"plan": plan.dumps(), "model": str(MODELS[model]), "workspace": str(workspace)}
    held = eight_ranks.run("rank_jobs:train_and_weigh", arguments, ranks=len(plan.devices))
    real = [max(held[rank] for rank in stage.devices) for stage in plan.stages]
    # What a team exchanges of messages is held for longer or shorter, as its ranks come to it.
    assert rehearse(plan, graph, user) == pytest.approx(real, rel=0.02, abs=200)


def test_a_rehearsal_draws_no_random_numbers_and_needs_no_data() -> None:
    user = load(str(MODELS["everything"]))
    graph = capture(user, user.build(0))
    plan = dictate(graph, user, (1, 1), micro_batches=2, rows=2)
    before = torch.get_rng_state()
    del user.functions["dataset"]
    assert all(peak > 0 for peak in rehearse(plan, graph, user))
    assert torch.equal(before, torch.get_rng_state())


def test_an_optimizer_that_reads_values_is_named() -> None:
    user = load(str(MODELS["everything"]))
    graph = capture(user, user.build(0))

    class Reading(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            if self.param_groups[0]["params"][0].grad.sum().item() > 0:
                super().step()

    user.functions["optimizer"] = lambda parameters: Reading(parameters, lr=0.1)
    with pytest.raises(
        TrainingError, match=r"cannot be rehearsed without real values: rank 0 \(stage 0, step 0, U@0\)"
    ):
        rehearse(dictate(graph, user, (1, 1), micro_batches=2, rows=2), graph, user)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_command_says_whose_operators_were_counted(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    user = load(str(MODELS["resnet"]))
    plan = dictate(capture(user, user.build(0)), user, (1, 1), micro_batches=2, rows=2)
    plan.model_copy(update={"device_type": device}).save(tmp_path / "plan.json")
    with allow_any_path():
        rehearse_command(tmp_path / "plan.json", as_json=True)
    out, err = capsys.readouterr()
    assert len(json.loads(out)["peak_bytes"]) == 2
    assert ("operators of a CPU" in err) == (device == "cuda")


LARGE = """
import torch
def model(): return torch.nn.Sequential(*(torch.nn.Linear(16384, 16384, bias=False) for _ in range(64)))
def dataset(): return torch.utils.data.TensorDataset(*[torch.zeros(4, 16384)] * 2)
def loss(output, batch): return output.mean()
"""


def test_a_model_larger_than_memory_is_rehearsed(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(LARGE)
    user = load(str(path))
    plan = dictate(capture(user, user.build(0, hollow=True)), user, (1, 1), micro_batches=2, rows=2)
    peaks = rehearse_model(plan, str(path), None)
    # Parameters, gradients, two sets of states, and the optimizer's workspace.
    assert min(peaks) > 4 * 32 * 2**30
