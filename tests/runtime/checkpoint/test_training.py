"""Runs, and scripts, that are gone on with, beside those that were never interrupted."""

import math
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import autopar
from autopar.errors import FileError, UsageError
from autopar.formats.plan import Plan
from autopar.formats.profile import Writes
from autopar.formats.program import Fault
from autopar.options.train import RunOptions
from autopar.ownership import Shard
from autopar.ranks.monitor import Watch
from autopar.ranks.pool import RankPool
from autopar.runtime.checkpoint.folder import CheckpointFolder, export, read_verified
from autopar.runtime.checkpoint.state import class_name
from autopar.runtime.checkpoint.training import changes, check_state, optimizer_changes, plan_notes
from autopar.runtime.outcome import Outcome
from autopar.runtime.start.launch import run
from autopar.runtime.start.script import ScriptJob
from autopar.signals import ends_by_itself
from checkpoint_pairs import PLAN, RUN, largest_difference, saved
from drawn_models import model_case
from labelled import loss
from paths import MODELS
from policy_cases import planned
from script_jobs import batches, make_model, script_plan
from training_cases import Case, make_case

SOURCE = (MODELS / "resumed.py").read_text()


def plan_of(widths: list[int], micro_batches: int = 4, **how: Any) -> Plan:  # noqa: ANN401
    return model_case("resumed").plan(widths, micro_batches, 16 // micro_batches, **how)


def train(
    pool: RankPool,
    plan: Plan,
    folder: Path,
    steps: int,
    resume: bool = False,
    case: Case | None = None,
    **options: Any,  # noqa: ANN401
) -> Outcome:
    asked = RunOptions(steps, checkpoint=folder, resume=resume, **{"every": 4, **options})
    return run(plan, str((case or model_case("resumed")).file), asked, pool=pool)


def goes_on(pool: RankPool, plan: Plan, folder: Path, steps: tuple[int, int], case: Case | None = None) -> None:
    """Train as many steps as the last says without and with an interruption after the first; all bits are equal."""
    first, last = steps
    whole = train(pool, plan, folder / "whole", last, case=case, every=last)
    parts = [train(pool, plan, folder / "parts", each, each == last, case, every=2) for each in steps]
    assert [part.report.first_step for part in parts] == [0, first]
    assert (*parts[0].report.loss, *parts[1].report.loss) == whole.report.loss
    assert largest_difference(saved(folder / "parts", last), saved(folder / "whole", last)) == 0.0


HOW: dict[str, tuple[list[int], dict[str, Any]]] = {
    "three stages": ([1, 1, 1], {}),
    "two unequal stages": ([1, 2], {}),
    "one stage": ([1], {}),
    "two replicas that take turns": ([2, 1], {"turns": (0,)}),
    "sharded": ([2, 2], {"shard": "parameters"}),
    "optimizer sharded by three": ([3, 1], {"shard": "optimizer"}),
    "gradients sharded": ([4], {"shard": "gradients"}),
    "interleaved": ([1, 1], {"schedule": "interleaved", "chunks": 2}),
    "zb-h1": ([1, 1, 1], {"schedule": "zb-h1"}),
}


@pytest.mark.some(1)
@pytest.mark.parametrize("how", HOW)
def test_a_run_that_is_gone_on_with_is_bit_for_bit_one_that_was_not_interrupted(
    how: str, tmp_path: Path, pool: RankPool
) -> None:
    widths, options = HOW[how]
    goes_on(pool, plan_of(widths, **options), tmp_path, (4, 7))
    assert CheckpointFolder(tmp_path / "parts").steps() == [6, 7]


@pytest.mark.some(1)
@pytest.mark.parametrize("every", [3, "auto"])
@pytest.mark.parametrize(
    ("policy", "optimizer", "micro_batches", "how"),
    [
        ("stash", "adam", 2, {}),
        ("2bw", "sgd", 2, {}),
        ("predict", "adam", 2, {}),
        ("pipemare", "adam", 2, {}),
        ("stash", "momentum", 1, {"widths": [2, 1], "turns": [0]}),
    ],
)
def test_without_flushes_no_clock_and_no_stop_changes_what_is_trained(
    policy: str,
    optimizer: str,
    micro_batches: int,
    how: dict[str, Any],
    every: int | str,
    tmp_path: Path,
    pool: RankPool,
) -> None:
    plan = planned(tmp_path, optimizer, policy, [2, 1], micro_batches, synchronous_steps=1, **how)
    # Planned steps are so long that writing a checkpoint costs nothing beside draining the pipeline.
    plan = plan.model_copy(update={"predicted": plan.predicted.model_copy(update={"step_s": 1e3})})
    train = partial(run, plan, str(tmp_path / "model.py"), pool=pool)
    count = 3 if every == 3 else math.ceil(plan.lead / 0.03)
    stop = random.Random(policy).randint(1, 7) if every == 3 else count + 2
    steps = stop + 15
    whole = train(RunOptions(steps, every=every, checkpoint=tmp_path / "whole"))
    parts = RunOptions(steps, every=every, checkpoint=tmp_path / "parts")
    slow = replace(parts, inject_fault=[Fault.parse(f"slow@0:{stop}")])
    first = train(slow, lambda step, loss: ends_by_itself() if step == stop else None)
    last = train(replace(parts, resume=True))
    done, drained = first.report.steps, last.report.first_step
    assert stop <= done < steps
    assert drained == done // count * count
    assert any(note.startswith(f"steps {drained + 1} to {done} are trained") for note in first.report.notes) == (
        drained < done
    )
    assert whole.report.loss == (*first.report.loss[:drained], *last.report.loss)
    assert largest_difference(saved(tmp_path / "parts", steps), saved(tmp_path / "whole", steps)) == 0.0
    assert read_verified(tmp_path / "parts" / f"step-{steps}").plan.drained_every == count
    other = train(RunOptions(steps + 1, every=count + 1, checkpoint=tmp_path / "parts", resume=True))
    said = [note.partition(",")[0] for note in other.report.notes if "otherwise than by a run that was not" in note]
    off = [f"the checkpoint is of step {steps}"] if steps % (count + 1) else []
    assert said == [f"the pipeline is drained every {count + 1} steps", *off]


KEPT = {
    "SGD with momentum": (
        "SGD(named, lr=1e-2, momentum=0.9, nesterov=True)",
        "ReduceLROnPlateau(optimizer, patience=1, threshold=0.5, factor=0.5)",
    ),
    "Adafactor": ("Adafactor(named, lr=1e-2)", "CosineAnnealingWarmRestarts(optimizer, 4)"),
    "ASGD, whose settings change by themselves": (
        "ASGD(named, lr=1e-2, t0=3)",
        "SequentialLR(optimizer, [torch.optim.lr_scheduler.ConstantLR(optimizer, 0.1, 2), "
        "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)], [3])",
    ),
    "RAdam on tensors": ("RAdam(named, lr=torch.tensor(1e-3), foreach=False, capturable=False)", ""),
    "Rprop": ("Rprop(named, lr=1e-3)", "CyclicLR(optimizer, 1e-4, 1e-2, step_size_up=3, cycle_momentum=False)"),
    "Adam with amsgrad": ("Adam(named, lr=1e-3, amsgrad=True)", ""),
}
"""Optimizers, and schedulers if there are any."""


@pytest.mark.some(1)
@pytest.mark.parametrize("name", KEPT)
def test_whatever_an_optimizer_keeps_and_a_scheduler_does_goes_on(name: str, tmp_path: Path, pool: RankPool) -> None:
    optimizer, scheduler = KEPT[name]
    source = SOURCE.split("def optimizer(")[0]
    source += f"def optimizer(parameters):\n    named = list(parameters)\n    return torch.optim.{optimizer}\n"
    if scheduler:
        source += f"\ndef scheduler(optimizer):\n    return torch.optim.lr_scheduler.{scheduler}\n"
    case = make_case(tmp_path / "model.py", source)
    goes_on(pool, case.plan([1, 1], 4, 4), tmp_path, (4, 9), case)


def test_exports_load_strictly_and_manifests_say_what_replicas_wrote(tmp_path: Path, pool: RankPool) -> None:
    train(pool, plan_of([2, 1], shard="parameters"), tmp_path / "c", 4)
    assert export(tmp_path / "c", tmp_path / "model.safetensors") == 4
    state = load_file(tmp_path / "model.safetensors")
    assert torch.equal(state["head.weight"], state["embedding.weight"])
    model = model_case("resumed").model.build(0)
    model.load_state_dict(state, strict=True)
    stored = saved(tmp_path / "c", 4)
    assert torch.equal(model.get_parameter("blocks.1.inner.weight"), stored["parameter/blocks.1.inner.weight"])
    train(pool, plan_of([3], micro_batches=1, shard="parameters", shares=[[6, 5, 5]]), tmp_path / "d", 4)
    manifest = read_verified(tmp_path / "d" / "step-4")
    inner = manifest.tensor("optimizer", "blocks.0.inner.weight", "exp_avg")
    assert inner is not None
    assert inner.shape == (24, 12)
    ranges = [each.ranges[0] for each in inner.pieces]
    assert [(each.dim, each.start, each.stop) for each in ranges] == [(0, 0, 8), (0, 8, 16), (0, 16, 24)]
    # Tied weights stay whole, and one replica writes them.
    assert manifest.tensor("parameter", "embedding.weight") is not None


CHANGES = [
    ("lr=1e-2", "lr=3e-2", r"the optimizer's lr is 0\.03 for .*, it was 0\.01"),
    ("WORDS, WIDTH, SAMPLES = 23", "WORDS, WIDTH, SAMPLES = 29", r"has shape \[29, 12\], it had \[23, 12\]"),
    ("self.unused", "self.other", r"the model has other that the checkpoint has not; .* has unused"),
]


@pytest.mark.slow
@pytest.mark.reliability(24)
def test_what_may_not_change_is_refused_with_both_values_unless_that_is_accepted(
    tmp_path: Path, living_pool: Callable[[], RankPool]
) -> None:
    folder, kept = tmp_path / "c", tmp_path / "kept"
    train(living_pool(), plan_of([1, 2]), kept, 4)
    for at, (before, after, message) in enumerate(CHANGES):
        assert before in SOURCE
        case = make_case(tmp_path / f"model_{at}.py", SOURCE.replace(before, after))
        changed = case.plan([1, 2], 4, 4)
        shutil.copytree(kept, folder)
        with pytest.raises(UsageError, match=message):
            train(living_pool(), changed, folder, 6, True, case)
        outcome = train(living_pool(), changed, folder, 6, True, case, accept_changes=True)
        assert any(note.startswith("accepted: ") for note in outcome.report.notes)
        shutil.rmtree(folder)


@pytest.mark.reliability(18, 19, 20)
def test_damage_is_noticed_the_file_named_and_the_older_checkpoint_taken(
    tmp_path: Path, living_pool: Callable[[], RankPool]
) -> None:
    plan, folder = plan_of([1, 1]), tmp_path / "c"
    train(living_pool(), plan, folder, 8)
    file = next((folder / "step-8").glob("stage-00001*"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    outcome = train(living_pool(), plan, folder, 12, True)
    assert outcome.report.first_step == 4
    assert any(file.name in note and "damaged" in note for note in outcome.report.notes)
    for place in folder.glob("step-*"):
        (place / "manifest.json").write_text("{}")
    with pytest.raises(FileError, match="no checkpoint is sound"):
        train(living_pool(), plan, folder, 16, True)


def test_one_run_at_a_time_and_with_the_new_files_schedulers(
    tmp_path: Path, living_pool: Callable[[], RankPool]
) -> None:
    plan, folder = plan_of([1]), tmp_path / "c"
    train(living_pool(), plan, folder, 4)
    with pytest.raises(UsageError, match="holds checkpoints already, the newest of step 4"):
        train(living_pool(), plan, folder, 8)
    with CheckpointFolder(folder).lock(), pytest.raises(UsageError, match="another run writes"):
        train(living_pool(), plan, folder, 8, True)
    with pytest.raises(UsageError, match="the newest checkpoint is of step 4, and the run has 4"):
        train(living_pool(), plan, folder, 4, True)
    source = SOURCE.replace("torch.optim.AdamW(", "Own(") + "\n\nclass Own(torch.optim.AdamW):\n    pass\n"
    for at, name in enumerate(("one.py", "other.py"), start=1):
        case = make_case(tmp_path / name, source)
        outcome = train(living_pool(), case.plan([1, 1], 4, 4), tmp_path / "own", 2 * at, at > 1, case)
        assert outcome.report.first_step == 2 * (at - 1)
    train(living_pool(), plan_of([1, 1]), tmp_path / "other", 4)
    case = make_case(tmp_path / "model.py", SOURCE.replace("STEP_SIZE = 3", "STEP_SIZE = 5"))
    train(living_pool(), case.plan([1, 1], 4, 4), tmp_path / "other", 6, True, case)
    manifest = read_verified(tmp_path / "other" / "step-6")
    assert manifest.optimizer is not None
    rates = sorted({group.current["lr"] for group in manifest.optimizer.groups})  # type: ignore[type-var]
    assert rates == pytest.approx([0.7 * 1e-2, 0.7 * 2e-2])


def test_state_that_is_not_as_it_was_or_of_python_is_said() -> None:
    stored = [
        SimpleNamespace(name=name, shape=(2, 3), kind=kind) for name, kind in (("w", "parameter"), ("b", "buffer"))
    ]
    before: Any = SimpleNamespace(run=RUN, tensors=[*stored, SimpleNamespace(name="m", shape=(), kind="optimizer")])
    same = {"w": (2, 3), "b": (2, 3)}
    assert (
        list(changes(before, RUN, same)) == list(changes(before, RUN.model_copy(update={"samples": None}), same)) == []
    )
    other = RUN.model_copy(update={"batch": 4, "seed": 1, "samples": 63, "last": "pad"})
    assert list(changes(before, other, {"w": (3, 2), **dict.fromkeys("vxyz", (1,))})) == [
        "the batch is 4, it was 8", "the seed is 1, it was 0", "the number of samples is 63, it was 64",
        "the last is pad, it was drop", "the model has v, x, y and 1 more that the checkpoint has not",
        "the checkpoint has b that the model has not", "w has shape [3, 2], it had [2, 3]",
    ]  # fmt: skip
    layers = [SimpleNamespace(name="a", writes=None), SimpleNamespace(name="b", writes=Writes(state=("b.count",)))]
    graph: Any = SimpleNamespace(layers=layers)
    with pytest.raises(UsageError, match=r"layer b changes the Python state b\.count .*register_buffer"):
        check_state(graph)
    layers.pop()
    check_state(graph)
    parameter = nn.Parameter(torch.ones(1))
    update = SimpleNamespace(optimizer=torch.optim.SGD([parameter]), optimizer_parameters={"w": parameter})
    update.fresh_groups, update.scheduler = [{"lr": 0.1}], None
    job: Any = SimpleNamespace(update=update)
    kind = class_name(update.optimizer)
    for name, settings, past, said in (
        (kind, {"lr": 0.1}, None, []),
        ("Adam", {"lr": 0.1}, None, [f"the optimizer is {kind}, it was Adam"]),
        (kind, {"lr": 0.2}, None, ["the optimizer's lr is 0.1 for w, it was 0.2"]),
        (kind, {"lr": 0.1}, "StepLR", ["the scheduler is absent, it was StepLR"]),
    ):
        group = SimpleNamespace(settings=settings, parameters=("w",))
        checkpoint: Any = SimpleNamespace(optimizer=SimpleNamespace(kind=name, groups=[group]), scheduler=None)
        checkpoint.scheduler = past and SimpleNamespace(kind=past)
        assert list(optimizer_changes(checkpoint, job)) == said


@pytest.mark.reliability(23, 26)
def test_what_another_plan_does_otherwise_and_layers_that_go_by_the_division_are_said() -> None:
    other = PLAN.model_copy(update={"ranks": 3, "schedule": "gpipe", "torch": "2.14.0", "sharded": True})
    other = other.model_copy(update={"stages": 3, "precision": "bf16", "tensor_parallel": (2, 1)})
    said = list(plan_notes(PLAN, other, random=True, batch_norm=True))
    assert said == [
        "goes on with torch 2.14.0; the checkpoint was saved with 2.13.0",
        "goes on with ranks 3; the checkpoint was saved with 2",
        "goes on with stages 3; the checkpoint was saved with 2",
        "goes on with schedule gpipe; the checkpoint was saved with 1f1b",
        "goes on with precision bf16; the checkpoint was saved with fp32",
        "goes on with ranks for a replica (by stage) 2, 1; the checkpoint was saved with 1",
        "goes on with sharding, unlike the checkpoint's run",
    ]

    for changed in ({"micro_batches": 4}, {"division": ((2, 2), (4,))}):
        other = PLAN.model_copy(update=changed)
        said = [each.split(" go on ")[0] for each in plan_notes(PLAN, other, random=True, batch_norm=True)]
        assert said[-2:] == ["layers that draw random numbers", "batch normalisation"]
        assert not [each for each in plan_notes(PLAN, other, random=False, batch_norm=False) if "otherwise" in each]


def train_by_script(
    pool: RankPool, widths: list[int], folder: Path, until: int, shard: Shard = "none", sizes: Sequence[int] = ()
) -> list[dict[str, Any]]:
    plan = script_plan(widths, shard, sizes)
    arguments = {"plan": plan.dumps(), "folder": str(folder), "until": until}
    found = pool.run("script_jobs:train_between", arguments, ranks=len(plan.devices), watch=Watch(60.0))
    return cast(list[dict[str, Any]], found)


@pytest.mark.slow
@pytest.mark.reliability(23, 25)
def test_a_script_goes_on_from_what_another_plan_saved(tmp_path: Path, pool: RankPool) -> None:
    whole = train_by_script(pool, [1], tmp_path / "whole", 7)[0]["losses"]
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
        results = train_by_script(pool, widths, tmp_path / "parts", until, shard, sizes)
        assert {result["begun"] for result in results} == {len(losses)}
        assert all("has trained" in result["said"] for result in results)
        losses += results[0]["losses"]
    assert losses == pytest.approx(whole, rel=1e-12)
    assert CheckpointFolder(tmp_path / "parts").steps() == [6, 7]


@pytest.mark.slow
def test_generators_and_scales_go_on_where_they_were(tmp_path: Path, pool: RankPool) -> None:
    train_by_script(pool, [1, 1], tmp_path, 3)
    torch.manual_seed(2)
    expected = float(torch.rand(()))
    assert [result["drawn"] for result in train_by_script(pool, [1, 1], tmp_path, 4)] == [expected, expected]
    # The last layer's gradients overflow until the scale has shrunk.
    source = SOURCE.replace("Model().double()", "Model()").replace("return self.head(x)", "return 300 * self.head(x)")
    case = make_case(tmp_path / "model.py", source)
    plan = case.plan([1, 2], 4, 4).model_copy(update={"precision": "fp16"})
    goes_on(pool, plan, tmp_path, (10, 13), case)
    between, *scales = (
        read_verified(tmp_path / folder).loss_scale for folder in ("parts/step-12", "whole/step-13", "parts/step-13")
    )
    assert between is not None
    assert between.value < 2.0**16
    assert scales[0] == scales[1] != between


@pytest.mark.slow
def test_parameters_in_other_memory_are_saved_and_a_folder_of_another_run_is_left_alone(tmp_path: Path) -> None:
    (batch,) = batches(1)

    def parameters(job: ScriptJob) -> dict[str, torch.Tensor]:
        assert job._built_job is not None
        return dict(job._built_job.job.parameters)

    with autopar.materialize(make_model(), script_plan([1]), batch, loss=loss) as job:
        assert job.load(tmp_path) == 0
        job.step(batch)
        job.save(tmp_path, wait=True)
        assert CheckpointFolder(tmp_path).steps() == [1]
        for parameter in parameters(job).values():
            parameter.data = torch.full_like(parameter, 3.0)
        job.step(batch)
        expected = {name: parameter.detach().clone() for name, parameter in parameters(job).items()}
        job.save(tmp_path, wait=True)
    again = make_model(), script_plan([1]), batch
    with autopar.materialize(*again, loss=loss) as job, pytest.raises(UsageError, match=r"holds .* step 2; .*load\(\)"):
        job.save(tmp_path)
    with autopar.materialize(*again, loss=loss) as job:
        assert job.load(tmp_path) == 2
        assert all(torch.equal(parameter, expected[name]) for name, parameter in parameters(job).items())
    for place in tmp_path.glob("step-*"):
        (place / "manifest.json").write_text("")
    with autopar.materialize(*again, loss=loss) as job, pytest.raises(FileError, match="no checkpoint is sound"):
        job.load(tmp_path)
