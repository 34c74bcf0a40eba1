"""The average of weights is torch's own, whatever the schedule, the division and the ranks, and disturbs nothing."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autopar
from autopar.errors import FileError, UsageError
from autopar.formats.plan import Plan
from autopar.formats.stage import chunks_of, layout_of
from autopar.options.plan import PlanOptions
from autopar.ownership import Shard, shards_of
from autopar.ranks.monitor import Watch
from autopar.ranks.pool import RankPool
from autopar.runtime.checkpoint import weights
from autopar.runtime.job import Job
from autopar.runtime.messages.transport import Transport
from autopar.runtime.rehearsal.memory import rehearse
from autopar.runtime.stage.parameters import whole
from autopar.schedules import SCHEDULES
from drawn_models import model_case
from in_teams import in_teams
from labelled import loss, sgd
from paths import MODELS, ROOT
from script_jobs import batches, make_model, script_plan
from threads import act_in_threads, own
from training_cases import Case, make_case

DECAY, STEPS = 0.75, 4


def averaging(plan: Plan, used: str = "average") -> Plan:
    return plan.model_copy(update={"ema_decay": DECAY, "used_weights": used})


def averages_as_torch(case: Case, plan: Plan) -> None:
    """Hold every step's averages, on all ranks, against torch's average of the ranks' weights."""
    found: dict[int, list[dict[str, tuple[torch.Tensor, torch.Tensor]]]] = {}

    def act(job: Job, transport: Transport) -> None:
        found[job.rank] = []
        for step in range(STEPS):
            job.step(step)
            assert job.average is not None
            own = {
                name: (job.whole(name), job.team.whole(name, whole(each))) for name, each in job.average.tensors.items()
            }
            found[job.rank].append({name: (one.detach().clone(), other.clone()) for name, (one, other) in own.items()})
        job.finish()

    act_in_threads(averaging(plan), case.graph, case.model, case.state, act)
    for steps in found.values():
        newest = nn.ParameterList(nn.Parameter(value) for value, _ in steps[0].values())
        torchs = AveragedModel(newest, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        for step in steps:
            with torch.no_grad():
                for parameter, (value, _) in zip(newest, step.values(), strict=True):
                    parameter.copy_(value)
            torchs.update_parameters(newest)
            for name, expected in zip(step, torchs.module, strict=True):
                torch.testing.assert_close(step[name][1], expected.detach(), rtol=1e-12, atol=1e-12)
    trained = {name for name, each in case.model.build(0).named_parameters() if each.requires_grad}
    held = {name for steps in found.values() for name in steps[0]}
    read = {name for layer in case.graph.layers for name in layer.parameters.values()}
    assert held == trained & read


@pytest.mark.some(4)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_averages_as_torch(schedule: str) -> None:
    chunks = chunks_of(layout_of(schedule)) or 2
    averages_as_torch(model_case("everything"), model_case("everything").plan((1, 3, 2), 2, 3, schedule, chunks=chunks))


@pytest.mark.some(2)
@pytest.mark.parametrize(("widths", "sizes"), [((1, 1), (2, 2)), ((1, 2), (1, 2)), ((2, 1), (2, 1))])
def test_teams_average_as_torch(widths: tuple[int, ...], sizes: tuple[int, ...], tmp_path: Path) -> None:
    text = (MODELS / "everything.py").read_text().replace("nn.Dropout(", "nn.Threshold(-1e9, ")
    case = make_case(tmp_path / "everything.py", text)
    averages_as_torch(case, in_teams(case.graph, case.plan(widths, 2, 6), sizes))


def trained_plainly(until: int) -> tuple[list[float], nn.Module, nn.Module]:
    """Return the losses of a plain loop, its model, and torch's average of it."""
    model = make_model().train()
    optimizer, average = sgd(list(model.parameters())), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    losses = []
    for inputs, targets in batches(until):
        optimizer.zero_grad()
        value = loss(model(inputs), (inputs, targets))
        value.backward()
        optimizer.step()
        average.update_parameters(model)
        losses.append(value.item())
    return losses, model, average.module


def same(found: dict[str, torch.Tensor], model: nn.Module) -> None:
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("widths", "shard", "sizes"),
    [([2, 1], "parameters", ()), ([1, 2], "optimizer", ()), ([2], "gradients", ()), ([1, 1], "none", (2, 1))],
)
@pytest.mark.some(1)
def test_a_checkpoint_goes_on_with_its_average_under_another_plan(
    pool: RankPool, widths: list[int], shard: Shard, sizes: Sequence[int], tmp_path: Path
) -> None:
    plans = [script_plan([1, 1]), script_plan(widths, shard, sizes=sizes), script_plan([1])]
    asked = [averaging(plans[0]), averaging(plans[1]), averaging(plans[2], "trained")]
    losses = list[float]()
    for until, plan in zip((2, 5, 7), asked, strict=True):
        arguments = {"plan": plan.dumps(), "folder": str(tmp_path), "until": until}
        results = pool.run("script_jobs:train_averaged", arguments, ranks=len(plan.devices), watch=Watch(60))
        assert all(result == results[0] for result in results)
        losses += results[0]["losses"]
        expected, model, average = trained_plainly(until)
        assert losses == pytest.approx(expected, rel=1e-12)
        used = average if plan.used_weights == "average" else model
        ((inputs, targets),) = batches(1)
        assert results[0]["evaluated"] == [pytest.approx(loss(used(inputs), (inputs, targets)).item(), rel=1e-12)] * 2
        same(load_file(tmp_path / "state.safetensors"), used)
        same(weights.read(tmp_path / "weights", used.state_dict()), used)
        assert autopar.export_checkpoint(tmp_path / "saved", tmp_path / "exported.safetensors") == until
        same(load_file(tmp_path / "exported.safetensors"), used)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.some(1)
def test_replicas_that_take_turns_and_divide_state_average_as_torch_and_so_does_what_goes_on_from_them(
    pool: RankPool, seed: int, tmp_path: Path
) -> None:
    rng, losses = random.Random(seed), list[float]()
    for until, first in ((2, rng.random() < 0.5), (4, True), (5, False)):
        widths = [rng.choice((1, 2)), rng.choice((1, 2))] if rng.random() < 0.7 else [rng.choice((2, 3))]
        widths = widths if max(widths) > 1 else [2, 1]
        wide = [at for at, width in enumerate(widths) if width > 1]
        # One of those that take turns divides its state.
        turns = rng.sample(wide, rng.randint(1, len(wide))) if first else []
        shard = [rng.choice(shards_of("round-robin" if at in turns else "split")) for at in range(len(widths))]
        shard = ["optimizer" if at in turns[:1] else each for at, each in enumerate(shard)]
        # All that take turns have equally many, and every share has a row.
        count = rng.choice(((3, 6) if widths == [3] else (2, 4)) if turns else (1, 2, 3))
        plan = averaging(script_plan(widths, shard, turns=turns, count=count))
        arguments = {"plan": plan.dumps(), "folder": str(tmp_path), "until": until}
        results = pool.run("script_jobs:train_averaged", arguments, ranks=len(plan.devices), watch=Watch(60))
        losses += results[0]["losses"]
        expected, _, average = trained_plainly(until)
        assert losses == pytest.approx(expected, rel=1e-12)
        same(load_file(tmp_path / "state.safetensors"), average)


def test_a_checkpoint_without_an_average_begins_one_with_its_weights(pool: RankPool, tmp_path: Path) -> None:
    first, then = script_plan([1]), averaging(script_plan([1, 1]))
    for until, plan in ((2, first), (3, then)):
        arguments = {"plan": plan.dumps(), "folder": str(tmp_path), "until": until}
        (found, *_) = pool.run("script_jobs:train_averaged", arguments, ranks=len(plan.devices), watch=Watch(60))
    assert "goes on with an average's `ema_decay` 0.75; the checkpoint was saved with None" in found["notes"]
    # The first step that is averaged begins the average.
    same(load_file(tmp_path / "state.safetensors"), trained_plainly(3)[1])


def test_what_cannot_be_averaged_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="`used_weights='average'` is of an average that nothing keeps; pass `ema_de"):
        PlanOptions(used_weights="average")
    with pytest.raises(UsageError, match=r"`ema_decay` must be at most 1, found 1\.5"):
        PlanOptions(ema_decay=1.5)
    plan = averaging(script_plan([1]))
    text = plan.dumps().replace(f'"ema_decay": {DECAY},', "")
    with pytest.raises(FileError, match="used_weights: there is no average without ema_decay"):
        Plan.parse(text, Path("plan.json"))
    unflushed = plan.model_copy(update={"weight_policy": "stash"})
    with pytest.raises(UsageError, match="`ema_decay` averages weights of whole steps, which weight policy stash"):
        autopar.materialize(make_model(), unflushed, loss=loss, optimizer=sgd)


@pytest.mark.parametrize("shard", ["none", "optimizer", "parameters"])
def test_every_ranks_planned_memory_counts_the_average(shard: Shard) -> None:
    profile = autopar.Profile.load(ROOT / "tests" / "data" / "gpt-4.json")
    last = len(profile.layers) - 1
    asked: dict[str, Any] = {"gpus": 4, "stages": f"0-3:2,4-{last}:2", "shard": shard, "micro_batches": 2}
    without, found = (autopar.plan(profile, **asked, **more) for more in ({}, {"ema_decay": 0.999}))
    assert (found.ema_decay, found.used_weights, without.used_weights) == (0.999, "average", "trained")
    # What stages share, no replicas divide.
    (shared,) = [tied.bytes for tied in found.tied]
    for stage, before, now in zip(found.stages, without.predicted.peak_bytes, found.predicted.peak_bytes, strict=True):
        trained = sum(layer.trainable_bytes for layer in profile.layers if layer.name in stage.layers)
        assert trained > 0
        assert now - before == pytest.approx(trained if shard == "none" else (trained + shared) / 2, abs=8)


def test_a_rehearsed_rank_holds_it() -> None:
    case = model_case("everything")
    plan = case.plan((1, 2), 2, 4)
    before, now = (rehearse(each, own(case.graph), case.model) for each in (plan, averaging(plan)))
    for stage, held, more in zip(plan.stages, before, now, strict=True):
        layers = [case.graph.layer(name) for name in stage.layers]
        trained = {
            name: each.nbytes for layer in layers for name, each in layer.named_parameters() if each.requires_grad
        }
        assert more - held == sum(trained.values())
