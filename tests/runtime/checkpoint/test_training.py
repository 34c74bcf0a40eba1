"""Runs, and scripts, that are gone on with, beside those that were never interrupted; between any two plans."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

import autopar
from autopar.capture.export import capture
from autopar.capture.graph import LayerGraph
from autopar.capture.source import UserModel, load
from autopar.errors import FileError, UsageError
from autopar.formats.checkpoint import Checkpoint, SavedPlan
from autopar.formats.plan import Plan, Shard
from autopar.formats.profile import Writes
from autopar.ranks.pool import RankPool
from autopar.runtime.checkpoint.folder import CheckpointFolder, CheckpointReader, export, read_verified
from autopar.runtime.checkpoint.training import check_state, plan_notes
from autopar.runtime.outcome import Outcome
from autopar.runtime.start.launch import RunOptions, run
from autopar.runtime.start.script import ScriptJob
from dictated import dictate
from paths import MODELS
from script_jobs import batches, loss, make_model, script_plan

STEPS = 12


@pytest.fixture(scope="module")
def captured() -> tuple[UserModel, LayerGraph]:
    model = load(str(MODELS / "resumed.py"))
    return model, capture(model, model.build(0))


def plan_of(captured: tuple[UserModel, LayerGraph], widths: list[int], micro_batches: int = 4, **how: object) -> Plan:
    model, graph = captured
    return dictate(graph, model, widths, micro_batches, 16 // micro_batches, **how)  # type: ignore[arg-type]


def train(plan: Plan, folder: Path, steps: int, pool: RankPool, *, resume: bool = False, **options: object) -> Outcome:
    asked = RunOptions(steps, checkpoint=folder, resume=resume, **{"every": 4, **options})  # type: ignore[arg-type]
    return run(plan, str(MODELS / "resumed.py"), asked, pool=pool)


def tensors(folder: Path, step: int) -> dict[str, torch.Tensor]:
    place = CheckpointFolder(folder).folder_of(step)
    manifest = read_verified(place)
    with CheckpointReader(place, manifest) as reader:
        return {each.key: reader.read(each) for each in manifest.tensors if each.kind != "generator"}


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    found = 0.0
    for key, tensor in one.items():
        assert tensor.shape == other[key].shape, key
        if tensor.is_floating_point() and tensor.numel():
            found = max(found, float((tensor - other[key]).abs().max() / max(1e-3, float(other[key].abs().max()))))
        else:
            assert torch.equal(tensor, other[key]), key
    return found


HOW: dict[str, tuple[list[int], dict[str, object]]] = {
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


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
def test_a_run_that_is_gone_on_with_is_bit_for_bit_one_that_was_not_interrupted(
    captured: tuple[UserModel, LayerGraph], how: str, tmp_path: Path, pool: RankPool
) -> None:
    widths, options = HOW[how]
    plan = plan_of(captured, widths, **options)
    whole = train(plan, tmp_path / "whole", STEPS, pool)
    first = train(plan, tmp_path / "parts", 8, pool)
    second = train(plan, tmp_path / "parts", STEPS, pool, resume=True)
    assert second.report.first_step == 8
    assert (*first.report.loss, *second.report.loss) == whole.report.loss
    assert largest_difference(tensors(tmp_path / "parts", STEPS), tensors(tmp_path / "whole", STEPS)) == 0.0
    assert CheckpointFolder(tmp_path / "parts").steps() == [8, 12]


@pytest.mark.slow
@pytest.mark.reliability(23, 25)
def test_any_plan_goes_on_from_what_any_other_saved(
    captured: tuple[UserModel, LayerGraph], tmp_path: Path, pool: RankPool
) -> None:
    """The mini-batch is divided alike everywhere, but for shares: dropout's masks are per share, so it is left out."""
    folder = tmp_path / "parts"
    file = tmp_path / "model.py"
    file.write_text((MODELS / "resumed.py").read_text().replace("nn.Dropout(0.2)", "nn.Identity()"))
    model = load(str(file))
    graph = capture(model, model.build(0))
    alone = dictate(graph, model, [1], 4, 4)
    whole = run(alone, str(file), RunOptions(14, checkpoint=tmp_path / "whole", every=14), pool=pool)
    losses: list[float] = []
    for at, (widths, options) in enumerate(HOW[name] for name in ("three stages", "two unequal stages", "one stage")):
        plan = dictate(graph, model, widths, 4, 4, **options)  # type: ignore[arg-type]
        asked = RunOptions(2 * at + 2, checkpoint=folder, every=1, resume=at > 0)
        losses += run(plan, str(file), asked, pool=pool).report.loss
    for at, name in enumerate(("sharded", "optimizer sharded by three", "interleaved", "gradients sharded"), start=3):
        widths, options = HOW[name]
        plan = dictate(graph, model, widths, 4, 4, **options)  # type: ignore[arg-type]
        outcome = run(plan, str(file), RunOptions(2 * at + 2, checkpoint=folder, every=1, resume=True), pool=pool)
        assert any("sharding" in note for note in outcome.report.notes) or name == "optimizer sharded by three"
        losses += outcome.report.loss
    assert losses == pytest.approx(whole.report.loss, rel=1e-12)
    assert largest_difference(tensors(folder, 14), tensors(tmp_path / "whole", 14)) < 1e-10


@pytest.mark.slow
def test_a_scale_of_float16_goes_on_where_it_was(tmp_path: Path, pool: RankPool) -> None:
    file = tmp_path / "model.py"
    # The last layer's gradients overflow until the scale has shrunk.
    source = (MODELS / "resumed.py").read_text().replace("Model().double()", "Model()")
    file.write_text(source.replace("return self.head(x)", "return 300 * self.head(x)"))
    model = load(str(file))
    plan = dictate(capture(model, model.build(0)), model, [1, 2], 4, 4).model_copy(update={"precision": "fp16"})
    folders = tmp_path / "whole", tmp_path / "parts"
    run(plan, str(file), RunOptions(12, checkpoint=folders[0], every=12), pool=pool)
    run(plan, str(file), RunOptions(5, checkpoint=folders[1], every=5), pool=pool)
    between = read_verified(folders[1] / "step-5").loss_scale
    run(plan, str(file), RunOptions(12, checkpoint=folders[1], every=5, resume=True), pool=pool)
    scales = [read_verified(folder / "step-12").loss_scale for folder in folders]
    assert scales[0] is not None
    assert scales[0] == scales[1]
    assert between is not None
    assert between.value < 2.0**16
    assert scales[0].sound_steps > between.sound_steps
    assert largest_difference(tensors(folders[1], 12), tensors(folders[0], 12)) == 0.0


OPTIMIZERS = {
    "SGD with momentum": "torch.optim.SGD(named, lr=1e-2, momentum=0.9, nesterov=True)",
    "Adafactor": "torch.optim.Adafactor(named, lr=1e-2)",
    "ASGD, whose settings change by themselves": "torch.optim.ASGD(named, lr=1e-2, t0=3)",
    "RAdam on tensors": "torch.optim.RAdam(named, lr=torch.tensor(1e-3), foreach=False, capturable=False)",
    "Rprop": "torch.optim.Rprop(named, lr=1e-3)",
    "Adam with amsgrad": "torch.optim.Adam(named, lr=1e-3, amsgrad=True)",
}
SCHEDULERS = {
    "one that watches the loss": "ReduceLROnPlateau(optimizer, patience=1, threshold=0.5, factor=0.5)",
    "a cycle of rates and momenta": "CyclicLR(optimizer, 1e-4, 1e-2, step_size_up=3, cycle_momentum=False)",
    "several in a row": "SequentialLR(optimizer, [torch.optim.lr_scheduler.ConstantLR(optimizer, 0.1, 2), "
    "torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)], [3])",
    "restarts": "CosineAnnealingWarmRestarts(optimizer, 4)",
}


@pytest.mark.parametrize("name", [*OPTIMIZERS, *SCHEDULERS])
def test_whatever_an_optimizer_keeps_and_a_scheduler_does_goes_on(name: str, tmp_path: Path, pool: RankPool) -> None:
    source = (MODELS / "resumed.py").read_text().split("def optimizer(")[0]
    made = OPTIMIZERS.get(name, "torch.optim.AdamW(named, lr=1e-3)")
    source += f"def optimizer(parameters):\n    named = list(parameters)\n    return {made}\n"
    if name in SCHEDULERS:
        source += f"\ndef scheduler(optimizer):\n    return torch.optim.lr_scheduler.{SCHEDULERS[name]}\n"
    file = tmp_path / "model.py"
    file.write_text(source)
    model = load(str(file))
    plan = dictate(capture(model, model.build(0)), model, [1, 1], 4, 4)
    folders = tmp_path / "whole", tmp_path / "parts"
    whole = run(plan, str(file), RunOptions(9, checkpoint=folders[0], every=9), pool=pool)
    first = run(plan, str(file), RunOptions(4, checkpoint=folders[1], every=4), pool=pool)
    second = run(plan, str(file), RunOptions(9, checkpoint=folders[1], every=4, resume=True), pool=pool)
    assert (*first.report.loss, *second.report.loss) == whole.report.loss
    assert largest_difference(tensors(folders[1], 9), tensors(folders[0], 9)) == 0.0


def test_an_exported_model_is_loaded_strictly_under_all_its_names(
    captured: tuple[UserModel, LayerGraph], tmp_path: Path, pool: RankPool
) -> None:
    train(plan_of(captured, [2, 1], shard="parameters"), tmp_path / "c", 4, pool)
    assert export(tmp_path / "c", tmp_path / "model.safetensors") == 4
    state = load_file(tmp_path / "model.safetensors")
    assert torch.equal(state["head.weight"], state["embedding.weight"])
    model = captured[0].build(0)
    model.load_state_dict(state, strict=True)
    stored = tensors(tmp_path / "c", 4)
    assert torch.equal(model.get_parameter("blocks.1.inner.weight"), stored["parameter/blocks.1.inner.weight"])


@pytest.mark.slow
@pytest.mark.reliability(24)
def test_what_may_not_change_is_refused_with_both_values_unless_that_is_accepted(
    captured: tuple[UserModel, LayerGraph], tmp_path: Path, living_pool: object
) -> None:
    assert callable(living_pool)
    plan, folder = plan_of(captured, [1, 2]), tmp_path / "c"
    train(plan, folder, 4, living_pool())
    source = (MODELS / "resumed.py").read_text()
    for edits, message in (
        ([("lr=1e-2", "lr=3e-2")], r"the optimizer's lr is 0\.03 for .*, it was 0\.01"),
        (
            [("torch.optim.AdamW(", "torch.optim.NAdam(")],
            r"the optimizer is torch\.optim\.nadam\.NAdam, it was .*AdamW",
        ),
        (
            [("lr_scheduler.StepLR(optimizer, step_size=STEP_SIZE,", "lr_scheduler.ExponentialLR(optimizer,")],
            "the scheduler is",
        ),
        ([("SAMPLES = 23, 12, 96", "SAMPLES = 23, 12, 80")], "the number of samples is 80, it was 96"),
        ([("WORDS, WIDTH, SAMPLES = 23", "WORDS, WIDTH, SAMPLES = 29")], r"has shape \[29, 12\], it had \[23, 12\]"),
        ([("self.unused", "self.other")], r"the model has other that the checkpoint has not; .* has unused"),
    ):
        file = tmp_path / "model.py"
        for before, after in edits:
            assert before in source
            file.write_text(source.replace(before, after))
        model = load(str(file))
        changed = dictate(capture(model, model.build(0)), model, [1, 2], 4, 4)
        asked = RunOptions(6, checkpoint=folder, resume=True)
        with pytest.raises(UsageError, match=message):
            run(changed, str(file), asked, pool=living_pool())
        kept = tmp_path / "kept"
        shutil.copytree(folder, kept)
        accepted = RunOptions(6, checkpoint=folder, resume=True, accept_changes=True)
        outcome = run(changed, str(file), accepted, pool=living_pool())
        assert any(note.startswith("accepted: ") for note in outcome.report.notes)
        shutil.rmtree(folder)
        kept.rename(folder)


def test_a_model_file_may_have_moved_with_the_classes_that_it_makes(tmp_path: Path, pool: RankPool) -> None:
    source = (MODELS / "resumed.py").read_text().replace("torch.optim.AdamW(", "Own(")
    source += "\n\nclass Own(torch.optim.AdamW):\n    pass\n"
    for at, name in enumerate(("one.py", "other.py"), start=1):
        file = tmp_path / name
        file.write_text(source)
        model = load(str(file))
        plan = dictate(capture(model, model.build(0)), model, [1, 1], 4, 4)
        asked = RunOptions(2 * at, checkpoint=tmp_path / "c", resume=at > 1)
        assert run(plan, str(file), asked, pool=pool).report.first_step == 2 * (at - 1)


def test_a_schedulers_settings_are_the_new_codes_and_its_position_the_checkpoints(
    captured: tuple[UserModel, LayerGraph], tmp_path: Path, pool: RankPool
) -> None:
    train(plan_of(captured, [1, 1]), tmp_path / "c", 4, pool)
    file = tmp_path / "model.py"
    file.write_text((MODELS / "resumed.py").read_text().replace("STEP_SIZE = 3", "STEP_SIZE = 5"))
    model = load(str(file))
    plan = dictate(capture(model, model.build(0)), model, [1, 1], 4, 4)
    run(plan, str(file), RunOptions(6, checkpoint=tmp_path / "c", resume=True), pool=pool)
    manifest = read_verified(tmp_path / "c" / "step-6")
    assert manifest.optimizer is not None
    rates = sorted({group.current["lr"] for group in manifest.optimizer.groups})  # type: ignore[type-var]
    assert rates == pytest.approx([0.7 * 1e-2, 0.7 * 2e-2])


@pytest.mark.reliability(18, 19, 20)
def test_damage_is_noticed_the_file_named_and_the_older_checkpoint_taken(
    captured: tuple[UserModel, LayerGraph], tmp_path: Path, living_pool: object
) -> None:
    assert callable(living_pool)
    plan, folder = plan_of(captured, [1, 1]), tmp_path / "c"
    train(plan, folder, 8, living_pool())
    file = next((folder / "step-8").glob("stage-00001*"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    outcome = train(plan, folder, 12, living_pool(), resume=True)
    assert outcome.report.first_step == 4
    assert any(file.name in note and "damaged" in note for note in outcome.report.notes)
    for place in folder.glob("step-*"):
        (place / "manifest.json").write_text("{}")
    with pytest.raises(FileError, match="no checkpoint is sound"):
        train(plan, folder, 16, living_pool(), resume=True)


def test_one_run_at_a_time_and_none_over_anothers_checkpoints(
    captured: tuple[UserModel, LayerGraph], tmp_path: Path, living_pool: object
) -> None:
    assert callable(living_pool)
    plan, folder = plan_of(captured, [1]), tmp_path / "c"
    train(plan, folder, 4, living_pool())
    with pytest.raises(UsageError, match="holds checkpoints already, the newest of step 4"):
        train(plan, folder, 8, living_pool())
    with CheckpointFolder(folder).lock(), pytest.raises(UsageError, match="another run writes"):
        train(plan, folder, 8, living_pool(), resume=True)
    with pytest.raises(UsageError, match="the newest checkpoint is of step 4, and the run has 4"):
        train(plan, folder, 4, living_pool(), resume=True)


def test_a_manifest_says_which_indices_of_which_tensor_a_replica_has_written(
    captured: tuple[UserModel, LayerGraph], tmp_path: Path, pool: RankPool
) -> None:
    train(plan_of(captured, [3], micro_batches=1, shard="parameters", shares=[[6, 5, 5]]), tmp_path / "c", 4, pool)
    manifest: Checkpoint = read_verified(tmp_path / "c" / "step-4")
    inner = manifest.tensor("optimizer", "blocks.0.inner.weight", "exp_avg")
    assert inner is not None
    assert inner.shape == (24, 12)
    assert [(each.ranges[0].dim, each.ranges[0].start, each.ranges[0].stop) for each in inner.pieces] == [
        (0, 0, 8),
        (0, 8, 16),
        (0, 16, 24),
    ]
    # Tied weights stay whole, and one replica writes them.
    table = manifest.tensor("parameter", "embedding.weight")
    assert table is not None


PLAN = SavedPlan(
    sha256="a" * 64, ranks=2, stages=2, schedule="1f1b", micro_batches=2, division=((4,), (4,)), sharded=False,
    precision="fp32", torch="2.13.0",
)  # fmt: skip


def test_python_state_that_a_forward_changes_is_refused_by_name() -> None:
    layers = [SimpleNamespace(name="a", writes=None), SimpleNamespace(name="b", writes=Writes(state=("b.count",)))]
    graph: Any = SimpleNamespace(layers=layers)
    with pytest.raises(UsageError, match=r"layer b changes the Python state b\.count .*register_buffer"):
        check_state(graph)
    layers.pop()
    check_state(graph)


@pytest.mark.reliability(23, 26)
def test_what_another_plan_does_otherwise_is_said() -> None:
    other = PLAN.model_copy(update={"ranks": 3, "schedule": "gpipe", "torch": "2.14.0", "sharded": True})
    said = list(plan_notes(PLAN, other, random=True, batch_norm=True))
    assert said == [
        "goes on with torch 2.14.0; the checkpoint was saved with 2.13.0",
        "goes on with ranks 3; the checkpoint was saved with 2",
        "goes on with schedule gpipe; the checkpoint was saved with 1f1b",
        "goes on with sharding, unlike the checkpoint's run",
    ]


@pytest.mark.parametrize("changed", [{"micro_batches": 4}, {"division": ((2, 2), (4,))}])
def test_layers_that_go_by_the_division_are_said_where_it_has_changed(changed: dict[str, object]) -> None:
    other = PLAN.model_copy(update=changed)
    said = list(plan_notes(PLAN, other, random=True, batch_norm=True))
    assert [each.split(" go on otherwise")[0] for each in said][-2:] == [
        "layers that draw random numbers",
        "batch normalisation",
    ]
    assert not [each for each in plan_notes(PLAN, other, random=False, batch_norm=False) if "otherwise" in each]


def train_by_script(
    pool: RankPool, widths: list[int], folder: Path, until: int, shard: Shard = "none", sizes: Sequence[int] = ()
) -> list[dict[str, Any]]:
    plan = script_plan(widths, shard, sizes)
    arguments = {"plan": plan.dumps(), "folder": str(folder), "until": until}
    found = pool.run("script_jobs:train_between", arguments, ranks=len(plan.devices), timeout_s=60.0)
    return cast(list[dict[str, Any]], found)


@pytest.mark.slow
@pytest.mark.reliability(23)
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


def test_generators_go_on_where_there_are_as_many_ranks(tmp_path: Path, pool: RankPool) -> None:
    train_by_script(pool, [1, 1], tmp_path, 3)
    torch.manual_seed(2)
    expected = float(torch.rand(()))
    assert [result["drawn"] for result in train_by_script(pool, [1, 1], tmp_path, 4)] == [expected, expected]


@pytest.mark.slow
def test_a_folder_of_another_run_is_left_alone(tmp_path: Path) -> None:
    (batch,) = batches(1)
    with autopar.materialize(make_model(), script_plan([1]), batch, loss=loss) as job:
        assert job.load(tmp_path) == 0
        job.step(batch)
        job.save(tmp_path, wait=True)
        assert CheckpointFolder(tmp_path).steps() == [1]
    with (
        autopar.materialize(make_model(), script_plan([1]), batch, loss=loss) as job,
        pytest.raises(UsageError, match=r"holds checkpoints already, the newest of step 1; .*load\(\)"),
    ):
        job.save(tmp_path)
    (tmp_path / "step-1" / "manifest.json").write_text("")
    with (
        autopar.materialize(make_model(), script_plan([1]), batch, loss=loss) as job,
        pytest.raises(FileError, match="no checkpoint is sound"),
    ):
        job.load(tmp_path)


@pytest.mark.slow
def test_a_parameter_that_has_got_other_memory_is_saved_as_it_is(tmp_path: Path) -> None:
    (batch,) = batches(1)

    def parameters(job: ScriptJob) -> dict[str, torch.Tensor]:
        assert job._built_job is not None
        return dict(job._built_job.job.parameters)

    with autopar.materialize(make_model(), script_plan([1]), batch, loss=loss) as job:
        job.step(batch)
        job.save(tmp_path, wait=True)
        for parameter in parameters(job).values():
            parameter.data = torch.full_like(parameter, 3.0)
        job.step(batch)
        expected = {name: parameter.detach().clone() for name, parameter in parameters(job).items()}
        job.save(tmp_path, wait=True)
    with autopar.materialize(make_model(), script_plan([1]), batch, loss=loss) as job:
        assert job.load(tmp_path) == 2
        assert all(torch.equal(parameter, expected[name]) for name, parameter in parameters(job).items())
