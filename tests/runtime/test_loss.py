"""Gradients that are not finite are not applied, end the run, and leave nothing behind."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import autopar
import plain
from autopar.capture.batch import given_model
from autopar.capture.export import capture
from autopar.capture.source import load
from autopar.errors import TrainingError
from autopar.formats.plan import Plan, Shard
from autopar.ranks.pool import RankPool
from autopar.runtime.execute import StepRecord
from autopar.runtime.loss import all_finite, first_not_finite
from autopar.runtime.settings import TrainSettings
from autopar.runtime.start.launch import RunOptions, run
from autopar.runtime.start.workspace import Workspace
from dictated import dictate
from paths import MODELS
from threads import train_in_threads

STEPS, MICRO_BATCHES, ROWS = 3, 2, 4
COUNTED = """

def loss(output, batch):
    return F.cross_entropy(output, batch[-1], reduction="sum"), torch.ones_like(output[:, 0]).sum()
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_element_among_many_is_found(dtype: torch.dtype, bad: float) -> None:
    tensors = [torch.ones(5, 3, dtype=dtype), torch.zeros((), dtype=dtype), torch.ones(0, dtype=dtype)]
    assert all_finite(tensors)
    assert all_finite([])
    tensors[0][4, 2] = bad
    assert not all_finite(tensors)
    assert first_not_finite(zip("abc", tensors[::-1], strict=True)) == "c"


def test_numbers_whose_squares_are_too_large_are_finite() -> None:
    tensors = [torch.full((4,), 3e38), torch.full((2,), 1e200, dtype=torch.float64)]
    assert all_finite(tensors)
    assert not all_finite([*tensors, torch.tensor([3e38, float("inf")])])


def _file(folder: Path, step: int, *, counted: bool = False) -> Path:
    """Write the model's file, with a bad sample in one step."""
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    text = (MODELS / "rooted.py").read_text()
    text = text.replace("BAD = ()", f"BAD = ({int(order[step * MICRO_BATCHES * ROWS + 5])},)")
    file = folder / f"rooted_{step}.py"
    file.write_text(text + (COUNTED if counted else ""))
    return file


def _plan(file: Path, widths: tuple[int, ...], micro_batches: int = MICRO_BATCHES, shard: Shard = "none") -> Plan:
    model = load(str(file))
    rows = MICRO_BATCHES * ROWS // micro_batches
    return dictate(capture(model, model.build(0)), model, widths, micro_batches, rows, shard=shard)


@pytest.mark.parametrize("widths", [(1,), (1, 1), (2, 1), (2, 2)])
@pytest.mark.reliability(12)
def test_a_rank_does_not_step_and_names_parameter_stage_and_step(widths: tuple[int, ...], tmp_path: Path) -> None:
    file = _file(tmp_path, 1)
    model = load(str(file))
    module = model.build(0)
    graph = capture(model, module)
    state = {name: each.detach() for name, each in module.named_parameters()}
    records: dict[int, list[StepRecord]] = {}
    said = r"rank \d \(stage 0, step 1, U@0\): the gradient of 0.linear.weight \(stage 0\) is not finite; nothing was"
    with pytest.raises(TrainingError, match=said):
        train_in_threads(_plan(file, widths), graph, model, state, tmp_path, STEPS, records=records)
    truth = plain.train(file, MICRO_BATCHES, ROWS, lambda name: [ROWS], steps=1)
    assert all(bool(value.isfinite().all()) for value in truth.parameters.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shard", "clip_norm", "counted"),
    [
        ("none", None, False),
        ("none", None, True),
        ("none", 1.0, False),
        ("optimizer", None, False),
        ("gradients", None, True),
        ("parameters", None, False),
        ("parameters", 1.0, False),
    ],
)
@pytest.mark.reliability(11)
def test_a_run_ends_and_saves_nothing(
    shard: Shard, clip_norm: float | None, counted: bool, pool: RankPool, tmp_path: Path
) -> None:
    # Of the last step, the other stage knows nothing.
    step = STEPS - 1
    file = _file(tmp_path, step, counted=counted)
    options = RunOptions(steps=STEPS, save=tmp_path / "saved", settings=TrainSettings(clip_norm=clip_norm))
    with pytest.raises(TrainingError, match=rf"step {step}, U@0\): the gradient of 0.linear.(weight|bias) \(stage 0\)"):
        run(_plan(file, (2, 1), shard=shard), str(file), options, pool=pool)
    assert not options.save.exists()


@pytest.mark.slow
def test_nothing_is_saved_before_all_ranks_have_looked_at_their_gradients(pool: RankPool, tmp_path: Path) -> None:
    file = _file(tmp_path, 0)
    plan, workspace, saved = _plan(file, (1, 1)), tmp_path / "workspace", tmp_path / "saved"
    workspace.mkdir()
    saved.mkdir()
    Workspace(workspace).prepare(load(str(file)), plan, None)
    arguments: dict[str, object] = {
        "plan": plan.dumps(),
        "program": None,
        "model": str(file),
        "data": None,
        "workspace": str(workspace),
        "checkpoint": None,
        "faults": [],
        "keep": None,
    }
    arguments |= {"steps": 1, "save": str(saved), "settings": asdict(TrainSettings())}
    with pytest.raises(TrainingError, match=r"the gradient of 0\.linear\.weight"):
        pool.run("rank_jobs:train_and_find_late", arguments, ranks=2)
    assert not list(saved.iterdir())


@pytest.mark.slow
@pytest.mark.reliability(11, 12)
def test_a_single_micro_batch_is_named(tmp_path: Path) -> None:
    file = _file(tmp_path, 0)
    with pytest.raises(TrainingError, match=r"0.linear.weight \(stage 0, micro-batch 0\) is not finite"):
        run(_plan(file, (1,), micro_batches=1), str(file), RunOptions(steps=1))


@pytest.mark.slow
def test_gradients_whose_norm_no_number_holds_are_not_clipped(tmp_path: Path) -> None:
    file = _file(tmp_path, STEPS)
    file.write_text(file.read_text() + "\n\ndef loss(output, batch):\n    return 1e200 * output.mean()\n")
    options = RunOptions(steps=1, settings=TrainSettings(clip_norm=1.0))
    with pytest.raises(TrainingError, match=r"step 0, U@0\): the norm of all gradients is too large for a number"):
        run(_plan(file, (1,)), str(file), options)


def test_large_gradients_in_float32_are_applied(tmp_path: Path) -> None:
    text = _file(tmp_path, STEPS).read_text().replace(".double()", "").replace("torch.float64", "torch.float32")
    text = text.replace("AdamW(parameters, lr=1e-2)", "SGD(parameters, lr=1e-32)")
    text += "\n\ndef loss(output, batch):\n    return 1e30 * F.cross_entropy(output, batch[-1])\n"
    file = tmp_path / "large.py"
    file.write_text(text)
    model = load(str(file))
    module = model.build(0)
    graph = capture(model, module)
    state = {name: each.detach().clone() for name, each in module.named_parameters()}
    plan = _plan(file, (2, 1)).model_copy(update={"precision": "fp32"})
    (before, *_, after) = train_in_threads(plan, graph, model, state, tmp_path, STEPS)
    assert before != after


@pytest.mark.slow
def test_a_script_is_given_no_state_after_it(tmp_path: Path) -> None:
    file = _file(tmp_path, STEPS)
    module, loss = load(str(file)).build(0), plain.load_file(file).loss
    inputs, targets = (
        torch.stack(part) for part in zip(*(load(str(file)).dataset()[i] for i in range(8)), strict=True)
    )
    user = given_model(module, (inputs, targets), loss=loss)
    plan = autopar.Plan.parse(dictate(capture(user, module), user, [1], 2, 4).dumps(), Path("plan.json"))
    with autopar.materialize(module, plan, loss=loss) as job:
        job.step((inputs, targets))
        inputs[3, 0] = 0.0
        with pytest.raises(TrainingError, match=r"0.linear.weight \(stage 0\) is not finite"):
            job.step((inputs, targets))
        with pytest.raises(TrainingError, match="the job has failed"):
            job.state_dict()
        with pytest.raises(TrainingError, match="the job has failed"):
            job.save_weights(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_an_overflow_of_scaled_losses_is_left_out_as_before(tmp_path: Path) -> None:
    model = load(str(MODELS / "steep.py"))
    module = model.build(0)
    graph = capture(model, module)
    state = {name: each.detach() for name, each in module.named_parameters()}
    plan = dictate(graph, model, (1, 1), 2, 4).model_copy(update={"precision": "fp16"})
    records: dict[int, list[StepRecord]] = {}
    train_in_threads(plan, graph, model, state, tmp_path, STEPS, records=records)
    assert any(record.overflow for record in records[0])
