"""A job that a script steps: against a plain loop, in one process, on several ranks and under torchrun."""

import copy
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset, default_collate

import autopar
from autopar.capture.layers.export import capture
from autopar.capture.model.source import load
from autopar.capture.plain.loop import train_plainly
from autopar.errors import CaptureError, FileError, TrainingError, UsageError
from autopar.formats.timeline import CAUSES
from autopar.ownership import Shard
from autopar.ranks.monitor import Watch
from autopar.ranks.pool import RankPool
from autopar.runtime.checkpoint import weights
from autopar.runtime.start.script import ScriptJob
from labelled import loss, sgd
from launched import ended, launch, torchrun
from paths import EXAMPLES, HARNESS
from script_jobs import LEARNING_RATE, batches, described, draw_and_shuffle, make_model, make_random_model, script_plan
from suite import warm

STEPS = 3


def trained_plainly() -> tuple[list[float], torch.nn.Module]:
    """Train mini-batches of two micro-batches, without division: there is no batch normalisation in the model."""
    model = make_model().train()
    optimizer = sgd(model.parameters())
    losses = []
    for inputs, targets in batches(STEPS):
        optimizer.zero_grad()
        value = loss(model(inputs), (inputs, targets))
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, model


def test_one_process_trains_as_a_plain_loop_and_leaves_the_scripts_model_alone(tmp_path: Path) -> None:
    expected, truth = trained_plainly()
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with autopar.materialize(model, script_plan([1]), loss=loss, optimizer=sgd) as job:
        assert [job.step(batch).loss for batch in batches(STEPS)] == pytest.approx(expected, rel=1e-12)
        state = job.state_dict()
        job.save_weights(tmp_path)
        ((inputs, targets),) = batches(1)
        truth.eval()
        evaluated = job.evaluate((inputs[:7], targets[:7]))
        assert evaluated == pytest.approx(loss(truth(inputs[:7]), (inputs, targets[:7])).item(), rel=1e-12)
        # In batches of 5, 5 and 2.
        loader = DataLoader(TensorDataset(inputs, targets), 5)
        assert job.evaluate(loader) == pytest.approx(loss(truth(inputs), (inputs, targets)).item(), rel=1e-12)
        with pytest.raises(UsageError, match="the loader has no batch to evaluate"):
            job.evaluate(DataLoader(TensorDataset(inputs[:3], targets[:3]), 5, drop_last=True))
        # What only the loss reads need not be given for predictions.
        predicted = job.predict((inputs[:5],))
    with pytest.raises(UsageError, match="closed; start another"):
        job.step((inputs, targets))
    with pytest.raises(UsageError, match="closed; start another"):
        job.state_dict()
    assert state is not None
    assert predicted is not None
    torch.testing.assert_close(predicted["output"], truth(inputs[:5]).detach(), rtol=1e-12, atol=1e-12)
    for name, value in truth.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-12)
    saved = weights.read(tmp_path, state)
    assert all(torch.equal(saved[name], state[name]) for name, _ in truth.named_parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training


@pytest.mark.slow
def test_a_model_that_changes_python_state_is_held_to_what_the_plan_ignores() -> None:
    model, ((inputs, targets),) = make_model(), batches(1)
    seen: list[int] = []
    model[2].register_forward_hook(lambda module, given, output: seen.append(len(seen)))
    message = "closure variable seen of <lambda> changes with every forward"
    with pytest.raises(FileError, match=message):
        autopar.materialize(model, script_plan([1]), (inputs, targets), loss=loss)
    with pytest.raises(CaptureError, match=message):
        autopar.profile(model, (inputs, targets), loss=loss, budget_s=0.1, tensor=1)
    ignoring = script_plan([1]).model_copy(update={"ignored_state": ("seen",)})
    with autopar.materialize(model, ignoring, (inputs, targets), loss=loss, optimizer=sgd) as job:
        assert job.step((inputs, targets)).loss == pytest.approx(trained_plainly()[0][0], rel=1e-12)
    measured = autopar.profile(model, (inputs, targets), loss=loss, ignored_state=["seen"], budget_s=0.1, tensor=1)
    assert autopar.plan(measured, gpus=1).ignored_state == ("seen",)


@pytest.mark.reliability(37)
def test_other_batches_are_refused_and_draws_as_without_a_job(pool: RankPool, tmp_path: Path) -> None:
    with autopar.materialize(make_model(), script_plan([1]), loss=loss, optimizer=sgd) as job:
        with pytest.raises(UsageError, match="the job has seen no batch yet"):
            job.state_dict()
        (first, second, _) = batches(3)
        job.step(first)
        for batch, said in (
            ((first[0][:5], first[1][:5]), "a batch of 5 samples, the plan is for 12; drop or fill up"),
            (None, r"was given no batch, and its stages read batch.0, batch.1"),
        ):
            with pytest.raises(UsageError, match=said):
                job.step(batch)
        for bad, said in (
            ((first[0][:, :4], first[1]), r"batch.0 is torch.float64 of shape \(4,\) per sample, .* of shape \(5,\)"),
            ((first[0].float(), first[1]), r"batch.0 is torch.float32 .* captured with torch.float64"),
            ({"x": first[0]}, r"the batch has no batch.0; it has batch.x"),
        ):
            with pytest.raises(TrainingError, match=said):
                job.step(bad)
        assert job.step(second).step == 1
    told = {"plan": script_plan([1, 1]).dumps(), "folder": str(tmp_path), "seed": 5}
    assert pool.run("script_jobs:train_shuffled", told, ranks=2) == [draw_and_shuffle(lambda *_: None, 5)] * 2
    text = "import sys, autopar; autopar.Cluster.of('2xH100'), autopar.plan, autopar.Plan, autopar.Profile"
    subprocess.run([sys.executable, "-c", f"{text}; assert 'torch' not in sys.modules"], check=True, timeout=100)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
@pytest.mark.reliability(58)
def test_a_loader_that_forks_gives_a_job_what_one_without_processes_does() -> None:
    data = TensorDataset(*(torch.cat(each) for each in zip(*batches(3), strict=True)))
    losses = []
    for workers in (0, 1):
        loader = DataLoader(data, 12, num_workers=workers, multiprocessing_context="fork" if workers else None)
        with autopar.materialize(make_model(), script_plan([1]), loss=loss, optimizer=sgd) as job:
            losses.append([job.step(tuple(batch)).loss for batch in loader])
    assert losses[0] == losses[1] == pytest.approx(trained_plainly()[0], rel=1e-12)


@pytest.mark.parametrize(
    ("widths", "shard", "sizes"),
    [([1, 1, 1], "none", ()), ([2, 1], "parameters", ()), ([1, 1], "none", (2, 1)), ([2, 1], "parameters", (2, 1))],
)
@pytest.mark.some(1)
def test_ranks_train_evaluate_and_refuse_together(
    pool: RankPool, widths: list[int], shard: Shard, sizes: Sequence[int], tmp_path: Path
) -> None:
    expected, truth = trained_plainly()
    plan = script_plan(widths, shard, sizes=sizes)
    arguments = {"plan": plan.dumps(), "steps": STEPS, "folder": str(tmp_path)}
    results = pool.run("script_jobs:train_and_refuse", arguments, ranks=len(plan.devices), watch=Watch(60))
    assert all(result == results[0] for result in results)
    losses, evaluated, said = results[0]["losses"], results[0]["evaluated"], results[0]["said"]
    assert losses == pytest.approx(expected, rel=1e-12)
    assert re.fullmatch(r"rank 0: a batch of 5 samples, the plan is for 12; .*", said[0])
    assert re.match(r"ranks 0 and 1 were given different batches; give every rank the same whole", said[1])
    for name, value in load_file(tmp_path / "state.safetensors").items():
        torch.testing.assert_close(value, truth.state_dict()[name], rtol=1e-10, atol=1e-12)
    ((inputs, targets),) = batches(1)
    assert evaluated == pytest.approx(loss(truth.eval()(inputs), (inputs, targets)).item(), rel=1e-12)
    torch.testing.assert_close(
        load_file(tmp_path / "predicted.safetensors")["output"], truth(inputs).detach(), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize(
    ("widths", "shard", "sizes"), [([1, 1], "none", ()), ([2, 1], "parameters", ()), ([1, 1], "none", (2, 1))]
)
@pytest.mark.some(1)
def test_a_step_gives_outputs_rates_norm_and_seconds_and_outputs_change_nothing(
    pool: RankPool, widths: list[int], shard: Shard, sizes: Sequence[int]
) -> None:
    plan = script_plan(widths, shard, sizes=sizes, make=make_random_model)
    asked = {"plan": plan.dumps(), "steps": 4}
    without, found = (
        pool.run("script_jobs:train_with_outputs", {**asked, "outputs": each}, ranks=len(plan.devices), watch=Watch(60))
        for each in (False, True)
    )
    for rank, steps in enumerate(found):
        assert [step["loss"] for step in steps] == [step["loss"] for step in without[rank]]
        assert [step["again"] is None for step in steps] == [True, rank > 0] * 2
        assert [step["rates"] for step in steps] == [[LEARNING_RATE * 0.5**step] for step in range(4)]
        assert all(step["norm"] > 0 and step["fits"] and step["seconds"]["forwards"] > 0 for step in steps)
        assert tuple(steps[0]["seconds"]) == CAUSES
        assert {step["seconds"]["loading"] for step in steps} == {0.0}
    for step in found[0][1::2]:
        # The dropout is that of the step.
        assert step["again"] == pytest.approx(step["loss"], rel=1e-12)


def test_outputs_are_refused_where_there_is_no_one_version_of_the_weights() -> None:
    plan = script_plan([1]).model_copy(update={"weight_policy": "stash"})
    ((inputs, targets),) = batches(1)
    with autopar.materialize(make_model(), plan, loss=loss, optimizer=sgd) as job:
        with pytest.raises(UsageError, match="`outputs=True` is of one version of the weights; weight policy stash"):
            job.step((inputs, targets), outputs=True)
        job.step((inputs, targets))


@pytest.mark.slow
@pytest.mark.core
def test_the_example_script_plans_and_trains_under_torchrun(tmp_path: Path) -> None:
    script = str(EXAMPLES / "train.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    options: dict[str, Any] = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    planned = warm.run([sys.executable, script], timeout=200, **options)
    assert planned.returncode == 0, planned.stderr
    done = warm.run([*torchrun(2), script, "--epochs", "1"], timeout=400, **options)
    assert done.returncode == 0, done.stderr
    example = load(str(EXAMPLES / "mlp.py"))
    model = example.build()
    optimizer = example.make_optimizer(model.named_parameters())
    loader = DataLoader(example.dataset(), 64, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(0))
    for batch in loader:
        optimizer.zero_grad()
        value = example.functions["loss"](model(batch[0]), batch)
        value.backward()
        optimizer.step()
    found = re.search(r"epoch 0: loss (\S+), evaluated (\S+),", done.stdout)
    assert found is not None
    # In single precision one ReLU's input rounds to either side of zero, as the micro-batches are summed: the last
    # loss is 0.14198 or 0.14310 in plain training, too, whole or in micro-batches.
    assert float(found[1]) == pytest.approx(value.item(), rel=2e-2)
    model.load_state_dict(weights.read(tmp_path / "trained", model.state_dict()))
    samples = next(iter(DataLoader(example.dataset(), 200)))
    assert float(found[2]) == pytest.approx(example.functions["loss"](model(samples[0]), samples).item(), rel=1e-5)


@pytest.mark.parametrize(
    ("how", "own", "others"),
    [
        ("has no model", "ModelError: ", r"\w+Error: rank 1 has failed: "),
        ("has a bad option", "UsageError: `clip_norm` must be", "UsageError: rank 1 has failed: `clip_norm` must be"),
        ("raises", "", r"\w+Error: .*rank 1.*by 0"),
        (
            "stands still",
            "TrainingError: rank . has failed: ",
            # Of two that wait, the later one may hear of the other.
            "TrainingError: (rank . has failed: )?rank . has waited 1 s for rank 1 of 3, ",
        ),
        ("works", "", ""),
    ],
)
@pytest.mark.reliability(6)
def test_in_setting_up_who_refuses_or_stands_still_is_named_at_once_and_who_works_is_waited_for(
    how: str, own: str, others: str, pool: RankPool
) -> None:
    timeout_s = 1.0 if how in ("stands still", "works") else 600.0
    arguments = {"plan": script_plan([2, 1]).dumps(), "how": how, "timeout_s": timeout_s}
    found = pool.run("script_jobs:set_up_with_trouble", arguments, ranks=3, watch=Watch(60))
    mine = str(found.pop(1))
    assert re.match(own, mine), mine
    assert all(re.match(others, str(each)) for each in found), found
    assert any(map(bool, found)) == (how != "works")


@pytest.mark.some(1)
@pytest.mark.slow
@pytest.mark.parametrize("start", ["a launcher", "the script"])
@pytest.mark.reliability(31)
def test_jobs_of_a_script_follow_each_other_also_behind_one_that_failed(start: str, tmp_path: Path) -> None:
    plans: dict[str, tuple[list[int], Shard]] = {"a": ([2, 1], "none"), "b": ([1, 2], "none"), "c": ([3], "parameters")}
    for name, (widths, shard) in plans.items():
        script_plan(widths, shard).save(tmp_path / f"{name}.json")
    script = [str(HARNESS / "several_jobs.py"), *(str(tmp_path / f"{name}.json") for name in "aabc")]
    found = ended(launch(3, script, OWN_GROUP="1" if start == "the script" else ""))
    assert [code for code, *_ in found] == [0] * 3, found
    expected, _ = trained_plainly()
    for rank, (_, said, _) in enumerate(found):
        losses = {line[1]: json.loads(line[2]) for line in re.finditer(rf"job (\d) rank {rank}: (.*)", said)}
        assert losses.pop("1") == []
        assert losses == dict.fromkeys("023", pytest.approx(expected, rel=1e-12))


@pytest.mark.slow
@pytest.mark.reliability(30)
def test_ranks_of_a_script_that_do_not_come_are_named_after_its_own_timeout(tmp_path: Path) -> None:
    script_plan([2, 1]).save(tmp_path / "plan.json")
    script = [str(HARNESS / "several_jobs.py"), str(tmp_path / "plan.json")]
    began_s = time.monotonic()
    (first,) = ended(launch(1, script, WORLD_SIZE="3", LOCAL_WORLD_SIZE="3"))
    assert re.search(r"job 0: ranks 1, 2 of 3 did not come to 127.0.0.1:\d+ within 4 s; start a worker", first[2]), (
        first
    )
    assert time.monotonic() - began_s < 60.0


def test_two_jobs_of_a_process_train_beside_each_other_and_without_gradients_none_does() -> None:
    plan, steps = script_plan([1]), batches(3)

    def started() -> ScriptJob:
        return autopar.materialize(make_model(), plan, loss=loss, optimizer=sgd)

    with started() as job:
        alone = [job.step(batch).loss for batch in steps]
    first, second = started(), started()
    for off in (torch.no_grad, torch.inference_mode):
        with off(), pytest.raises(UsageError, match="gradients are off"):
            first.step(steps[0])
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(UsageError, match=r"autocast is on around step\(\)"),
    ):
        first.step(steps[0])
    assert (
        [first.step(batch).loss for batch in steps[:2]] == alone[:2] == [second.step(each).loss for each in steps[:2]]
    )
    first.close()
    assert second.step(steps[2]).loss == alone[2]
    second.close()
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_a_transformers_model_counts_its_labels_as_a_plain_loop_over_whole_mini_batches_does() -> None:
    transformers = pytest.importorskip("transformers", reason="autopar[hf] is not installed")
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, use_cache=False
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    truth = copy.deepcopy(model)
    tokens = torch.randint(1, 31, (3, 4, 12))
    # Of the first batch, which is profiled, all labels count.
    padded = [tokens[0].clone(), *(step.clone() for step in tokens[1:])]
    for row in range(4):
        padded[1][row, 12 - 3 * row :], padded[2][row, 2 + 3 * row :] = -100, -100
    steps = [{"input_ids": inputs, "labels": labels} for inputs, labels in zip(tokens, padded, strict=True)]
    measured = autopar.profile(model, steps[0], optimizer=sgd, budget_s=0.1, tensor=1)
    plan = autopar.plan(measured, gpus=1, micro_batches=2)
    assert (measured.counts_labels, plan.counts_labels, plan.loss_difference) == (True, True, None)
    optimizer = sgd(list(truth.parameters()))
    with autopar.materialize(model, plan, optimizer=sgd) as job:
        for batch in steps:
            expected = truth.train()(**batch).loss
            expected.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert job.step(batch).loss == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("policy", "widths", "depths", "turns"),
    [
        ("stash", (1, 1, 1), (3, 2, 1), ()),
        ("2bw", (2, 1), (2, 1), ()),
        ("2bw", (1,), (1,), ()),
        ("stash", (1, 1), (9, 1), ()),
        ("stash", (2, 1), (2, 1), (0,)),
        ("stash", (1, 3), (3, 1), (1,)),
    ],
)
@pytest.mark.some(1)
def test_without_flushes_a_step_gives_what_has_ended(
    policy: str, widths: Sequence[int], depths: Sequence[int], turns: Sequence[int], tmp_path: Path, pool: RankPool
) -> None:
    count, drains_at = 12, 7
    plan = script_plan(list(widths), turns=turns)
    stages = [each.model_copy(update={"warmup": depth}) for each, depth in zip(plan.stages, depths, strict=True)]
    plan = plan.model_copy(update={"weight_policy": policy, "stages": tuple(stages)})
    arguments = {"plan": plan.dumps(), "steps": count, "drains_at": drains_at, "folder": str(tmp_path)}
    results = pool.run("script_jobs:train_unflushed", arguments, ranks=sum(widths), watch=Watch(60))
    assert all(result == results[0] for result in results)
    user = described()
    graph = capture(user, user.build())
    layers = {layer: index for index, stage in enumerate(plan.stages) for layer in stage.layers}
    stage_of = {name: layers[layer.name] for layer in graph.layers for name in layer.parameters.values()}
    model, losses, every = make_model(), list[float](), batches(count)
    for part in (every[:drains_at], every[drains_at:]):
        samples = [pair for inputs, targets in part for pair in zip(inputs, targets, strict=True)]
        places = torch.randperm(len(samples), generator=torch.Generator().manual_seed(plan.seed)).argsort()
        data = [samples[at] for at in places]
        functions = {
            "dataset": partial(list, data),
            "collate": default_collate,
            "loss": loss,
            "optimizer": partial(torch.optim.SGD, lr=LEARNING_RATE),
        }
        asked = replace(user, factory=partial(copy.deepcopy, model), functions=functions)
        found = train_plainly(asked, plan, len(part), stage_of=stage_of)
        model.load_state_dict(found.parameters)
        losses += found.losses
    ended = dict((*results[0]["ended"], *results[0]["drained"]))
    assert results[0]["drained"]
    assert [step for step, _ in results[0]["ended"]] == sorted(step for step, _ in results[0]["ended"])
    assert [ended[step] for step in range(count)] == pytest.approx(losses, rel=1e-12)
    for name, value in load_file(tmp_path / "state.safetensors").items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-12, atol=1e-12)
