"""What a script changes between steps: as its own loop does, refused where no running job can, and free to go back."""

from collections.abc import Callable
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.capture.model.batch import given_model
from autopar.errors import TrainingError, UsageError
from autopar.ranks.pool import RankPool
from autopar.runtime.start.following import FileWatch, Follower
from autopar.runtime.start.script import ScriptJob
from random_scripts import batches, difference, draw, plan_of, train_by_a_job, train_plainly, turning_plan

SGD = partial(torch.optim.SGD, lr=0.1)
KINDS = {
    "closure",
    "scale",
    "namespace",
    "global",
    "method",
    "epoch",
    "module",
    "partial",
    "rate",
    "gain",
    "item",
    "deep",
}
KINDS |= {"terms", "buffer", "tensor", "other tensor", "mode", "whole", "freeze", "thaw", "counter"}
COVERING = (0, 115, 79, 14, 1, 4, 18, 20, 24, 17)


def test_scripts_have_every_kind_of_change_and_writes_by_way_of_data_are_found() -> None:
    assert {name for number in COVERING for _, name, _ in draw(number).changes} == KINDS
    model, given, plan = gated()
    with started(model, plan, given[0]) as job:
        for _ in range(10):
            job.step(given[0])
        model.side.weight.data.clamp_(-0.1, 0.1)
        steps = (job.step(given[0]) for _ in model.parameters())
        with pytest.raises(UsageError, match=r"has written parameter side\.weight"):
            list(steps)


@pytest.mark.some(2)
@pytest.mark.parametrize("number", COVERING)
def test_a_job_follows_what_a_script_changes(number: int) -> None:
    alone: Any = None
    by_job = train_by_a_job(alone, {"number": number, "plan": plan_of(number, [1]).dumps()})
    assert difference(train_plainly(number), by_job) < 1e-10


@pytest.mark.some(1)
@pytest.mark.parametrize("number", [21, 69, 13])
def test_ranks_follow_what_their_scripts_change(pool: RankPool, number: int) -> None:
    plan = plan_of(number)
    results = pool.run(
        "random_scripts:train_by_a_job", {"number": number, "plan": plan.dumps()}, ranks=len(plan.devices)
    )
    assert difference(train_plainly(number), results[0]) < 1e-10
    assert all(each["losses"] == results[0]["losses"] for each in results)


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("count", [4, 1])
def test_replicas_that_take_turns_count_together_also_one_without_a_micro_batch(pool: RankPool, count: int) -> None:
    plan = turning_plan(0, count)
    assert "terms" in {name for _, name, _ in draw(0).changes}
    results = pool.run("random_scripts:train_by_a_job", {"number": 0, "plan": plan.dumps()}, ranks=3)
    assert difference(train_plainly(0), results[0]) < 1e-10


class Gated(nn.Module):
    """Has a branch that a flag opens, a frozen layer, and a count that forward reads for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.side, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.first.requires_grad_(False)
        self.rate, self.with_side, self.count, self.calibration = 1.0, False, 0, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x)) * self.rate
        if self.count < 0 or self.with_side:
            x = x + self.side(x)
        return self.last(x) if self.training else self.last(x) * self.calibration


def cross_entropy(output: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return F.cross_entropy(output, batch[1])


def planned(model: nn.Module, batch: object) -> autopar.Plan:
    profile = autopar.profile(model, batch, loss=cross_entropy, optimizer=SGD, budget_s=0.05, tensor=1)
    return autopar.plan(profile, gpus=1, micro_batches=2)


@cache
def gated_plan() -> autopar.Plan:
    return planned(Gated().double(), next(batches(5)))


def gated() -> tuple[Gated, list[Any], autopar.Plan]:
    torch.manual_seed(5)
    return Gated().double(), list(batches(5)), gated_plan()


def started(model: nn.Module, plan: autopar.Plan, batch: object) -> ScriptJob:
    return autopar.materialize(model, plan, batch, loss=cross_entropy, optimizer=SGD)


def test_what_was_there_before_is_not_captured_again_nor_what_nothing_mentions(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = []
    captured = Follower._captured
    monkeypatch.setattr(Follower, "_captured", lambda *given: captures.append(0) or captured(*given))
    model, given, plan = gated()
    with started(model, plan, given[0]) as job:
        for rate, ever in [(1.0, 1), (0.5, 2), (1.0, 2), (0.5, 2), (0.25, 3)]:
            model.rate, model.unmentioned = rate, rate
            job.step(given[0])
            job.evaluate(given[1])
            assert len(captures) == ever
        for model.calibration in (0.5, 2.0):
            state = job.state_dict()
            assert state is not None
            truth = gated()[0].eval()
            truth.load_state_dict(state)
            truth.rate, truth.calibration = model.rate, model.calibration
            expected = cross_entropy(truth(given[1][0]), given[1]).item()
            assert job.evaluate(given[1]) == pytest.approx(expected, rel=1e-12)
        assert len(captures) == 5
        model.count = 7
        job.step(given[0])
        model.eval()
        job.step(given[0])
        assert (len(captures), model.training) == (6, False)


def _unfreeze(model: Gated) -> None:
    model.first.requires_grad_(True)


def _open(model: Gated) -> None:
    model.with_side = True


def _write(model: Gated) -> None:
    with torch.no_grad():
        model.last.weight.clamp_(-0.1, 0.1)


def _write_the_same(model: Gated) -> None:
    with torch.no_grad():
        model.last.weight.clamp_(-9.0, 9.0)


def _write_elsewhere(model: Gated) -> None:
    model.last.bias.data = torch.zeros_like(model.last.bias)


def _load_an_earlier_state(model: Gated) -> None:
    model.load_state_dict(model.earlier)


def _replace(model: Gated) -> None:
    model.last.weight = nn.Parameter(torch.zeros_like(model.last.weight))


def _replace_module(model: Gated) -> None:
    model.last = nn.Linear(6, 3).double()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_unfreeze, r"first\.weight was frozen when the job was built, and nothing steps it; save\(folder\), profile"),
        (
            _open,
            r"the plan does not fit Gated: layer 1 is 'last' in the plan, 'side' in the model; save\(folder\), profile",
        ),
        (
            _write,
            r"has written parameter last\.weight of its model, and the job trains parameters of its own; write it",
        ),
        (_write_the_same, r"has written parameter last\.weight of its model"),
        (_write_elsewhere, r"has written parameter last\.bias of its model"),
        (_load_an_earlier_state, r"has written parameter first\.weight of its model"),
        (_replace_module, r"has put another module in the place of that with last\.weight; save\(folder\), profile"),
        (_replace, r"has put another parameter in the place of last\.weight; save\(folder\), profile and plan again"),
    ],
)
def test_what_no_running_job_follows_is_refused_and_goes_on_with_a_new_plan(
    change: Callable[[Gated], None], message: str, tmp_path: Path
) -> None:
    model, given, plan = gated()
    with started(model, plan, given[0]) as job:
        job.step(given[0])
        model.earlier = job.state_dict()
        model.load_state_dict(model.earlier)
        job.evaluate(given[1])
        job.step(given[1])
        job.save(tmp_path)
        change(model)
        with pytest.raises(UsageError, match=message):
            job.step(given[2])
        with pytest.raises(UsageError, match=message):
            job.step(given[2])
    if change in (_unfreeze, _open):
        plainly = gated()[0]
        optimizer = SGD(plainly.parameters())
        for step, batch in enumerate(given[:3]):
            if step == 2:
                change(plainly)
            optimizer.zero_grad()
            value = cross_entropy(plainly(batch[0]), batch)
            value.backward()
            optimizer.step()
        with started(model, planned(model, given[0]), given[0]) as job:
            assert job.load(tmp_path, accept_changes=True) == 2
            assert job.step(given[2]).loss == pytest.approx(value.item(), rel=1e-12)  # type: ignore[union-attr]


class Halving(nn.Module):
    """Writes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(0.5)
        return self.last(torch.tanh(self.first(x)))


def test_a_forward_that_writes_its_inputs_writes_copies_of_a_scripts_batch() -> None:
    torch.manual_seed(5)
    model, given = Halving().double(), list(batches(5))[:2]
    profile = autopar.profile(model, given[0], loss=cross_entropy, optimizer=SGD, budget_s=0.05, tensor=1)
    # Both forwards come before both backwards.
    plan = autopar.plan(profile, gpus=1, micro_batches=2, schedule="gpipe")
    plainly = deepcopy(model)
    optimizer = SGD(plainly.parameters())
    with started(model, plan, given[0]) as job:
        for batch in given:
            before = batch[0].clone()
            metrics = job.step(batch)
            assert torch.equal(batch[0], before)
            optimizer.zero_grad()
            value = cross_entropy(plainly(before), batch)
            value.backward()
            optimizer.step()
            assert metrics is not None
            assert metrics.loss == pytest.approx(value.item(), rel=1e-12)


@pytest.mark.slow
def test_ranks_are_told_apart_and_raised_rates_draw_as_if_always_so(pool: RankPool) -> None:
    said = pool.run("random_scripts:change_alone", {"plan": plan_of(3, [1, 1]).dumps()}, ranks=2)
    assert said[0] == said[1]
    assert "the scripts of ranks 0 and 1 have changed their models differently" in said[0]
    _, given, _ = gated()
    found = []
    for early in (True, False):
        model = gated()[0]
        model.first = nn.Sequential(model.first, nn.Dropout(0.5 if early else 0.0)).requires_grad_(False)
        with started(model, planned(model, given[0]), given[0]) as job:
            model.first[1].p = 0.5
            found.append([job.step(batch).loss for batch in given[:3]])  # type: ignore[union-attr]
    assert found[0] == found[1]


def test_a_rank_of_a_run_refuses_what_its_file_changes() -> None:
    weight = {"aux": 0.0}

    def loss(output: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return cross_entropy(output, batch) * (1.0 + weight["aux"])

    user = given_model(Gated().double(), next(batches(1)), loss=loss)
    watch = FileWatch(user, frozenset({"weight"}), ())
    ignoring = FileWatch(user, frozenset({"weight"}), ("weight",))
    watch.check(0)
    weight["aux"] = 0.1
    ignoring.check(1)
    with pytest.raises(
        TrainingError, match="closure variable weight of loss has changed before step 1, which forward or loss reads"
    ):
        watch.check(1)
