"""Gradients that are not finite are not applied, end the run, and leave nothing behind."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import autopar
from autopar.capture.layers.export import capture
from autopar.capture.model.batch import given_model
from autopar.capture.model.source import load
from autopar.capture.plain.loop import train_plainly
from autopar.errors import TrainingError
from autopar.options.train import RunOptions, TrainSettings
from autopar.ownership import Shard
from autopar.ranks.pool import RankPool
from autopar.runtime.checkpoint.training import Attempt
from autopar.runtime.loss import all_finite, first_not_finite
from autopar.runtime.start.launch import run
from autopar.runtime.start.worker import RunFacts, TrainTask
from dictated import dictate
from paths import MODELS
from threads import train_in_threads
from training_cases import Case, make_case

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
    # Squares of these are too large.
    large = [torch.full((4,), 3e38), torch.full((2,), 1e200, dtype=torch.float64)]
    assert all_finite(large)
    assert not all_finite([*large, torch.tensor([3e38, bad])])


def _case(folder: Path, step: int, more: str = "") -> Case:
    """Write the model's file, with a bad sample in one step."""
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    bad = int(order[step * MICRO_BATCHES * ROWS + 5])
    text = (MODELS / "rooted.py").read_text().replace("BAD = ()", f"BAD = ({bad},)")
    return make_case(folder / f"rooted_{step}.py", text + more)


@pytest.mark.parametrize("widths", [(1,), (1, 1), (2, 1), (2, 2)])
@pytest.mark.reliability(12)
def test_a_rank_does_not_step_and_names_parameter_stage_and_step(widths: tuple[int, ...], tmp_path: Path) -> None:
    case = _case(tmp_path, 1)
    said = r"rank \d \(stage 0, step 1, U@0\): the gradient of 0.linear.weight \(stage 0\) is not finite; nothing was"
    with pytest.raises(TrainingError, match=said):
        case.train(case.plan(widths, MICRO_BATCHES, ROWS), tmp_path, STEPS)


@pytest.mark.some(3)
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
    case = _case(tmp_path, step, COUNTED if counted else "")
    plan = case.plan((2, 1), MICRO_BATCHES, ROWS, shard=shard)
    options = RunOptions(steps=STEPS, save=tmp_path / "saved", clip_norm=clip_norm)
    with pytest.raises(TrainingError, match=rf"step {step}, U@0\): the gradient of 0.linear.(weight|bias) \(stage 0\)"):
        run(plan, str(case.file), options, pool=pool)
    assert not options.save.exists()


@pytest.mark.slow
def test_nothing_is_saved_before_all_ranks_have_looked_at_their_gradients(pool: RankPool, tmp_path: Path) -> None:
    case, saved = _case(tmp_path, 0), tmp_path / "saved"
    plan = case.plan((1, 1), MICRO_BATCHES, ROWS)
    saved.mkdir()
    facts = RunFacts(1, "", Attempt(""))
    task = TrainTask(plan.dumps(), None, str(case.file), case.workspace, RunOptions(1, save=saved), facts, None)
    with pytest.raises(TrainingError, match=r"the gradient of 0\.linear\.weight"):
        pool.run("rank_jobs:train_and_find_late", task.as_data(), ranks=2)
    assert not list(saved.iterdir())


@pytest.mark.reliability(11, 12)
def test_large_gradients_are_applied_and_those_whose_norm_no_number_holds_name_the_micro_batch(tmp_path: Path) -> None:
    text = _case(tmp_path, STEPS).file.read_text().replace(".double()", "").replace("torch.float64", "torch.float32")
    text = text.replace("AdamW(parameters, lr=1e-2)", "SGD(parameters, lr=1e-32)")
    text += "\n\ndef loss(output, batch):\n    return 1e30 * F.cross_entropy(output, batch[-1])\n"
    case = make_case(tmp_path / "large.py", text)
    plan = case.plan((2, 1), MICRO_BATCHES, ROWS).model_copy(update={"precision": "fp32"})
    (before, *_, after) = case.train(plan, tmp_path, STEPS)
    assert before != after
    case = _case(tmp_path, 0)
    with pytest.raises(TrainingError, match=r"0.linear.weight \(stage 0, micro-batch 0\) is not finite"):
        case.train(case.plan((1,), 1, 2 * ROWS), tmp_path, 1)
    case = _case(tmp_path, STEPS, "\n\ndef loss(output, batch):\n    return 1e200 * output.mean()\n")
    with pytest.raises(TrainingError, match=r"step 0, U@0\): the norm of all gradients is too large for a number"):
        case.train(case.plan((1,), MICRO_BATCHES, ROWS), tmp_path, 1, TrainSettings(clip_norm=1.0))


@pytest.mark.slow
def test_a_script_is_given_no_state_after_it(tmp_path: Path) -> None:
    case = _case(tmp_path, STEPS)
    module, loss, data = case.model.build(0), case.model.functions["loss"], case.model.dataset()
    inputs, targets = (torch.stack(part) for part in zip(*(data[index] for index in range(8)), strict=True))
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


QUOTIENTS = """
import torch
import torch.nn.functional as F
from torch import nn

def model():
    return nn.Sequential(*(nn.Linear(5, 5) for _ in range(5)), nn.Linear(5, 3)).double()

def dataset():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(36, 5, generator=generator, dtype=torch.float64)
    return [(row, label) for row, label in zip(x, torch.randint(-1, 3, (36,), generator=generator))]

def loss(output, batch):
    each = F.cross_entropy(output, batch[1].clamp(min=0), reduction="none")
    first, others = batch[1] == 0, 0.5 * (batch[1] > 0)
    return {"first": (3 * (each * first).sum(), first.sum()), "others": ((each * others).sum(), others.sum()),
            "size": output.square().mean(), "log": {"right": (output.argmax(1) == batch[1]).double().mean()}}

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)
"""


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    ("schedule", "widths", "shares", "how"),
    [
        ("gpipe", (1, 1), None, {}),
        ("1f1b", (2, 1), [[2, 1], [3]], {"recompute": True}),
        ("1f1b", (1, 2), None, {"turns": (1,)}),
        ("zb-h1", (1, 1), None, {}),
        ("interleaved", (1, 2), [[3], [1, 2]], {"chunks": 2}),
    ],
)
@pytest.mark.some(5)
def test_several_quotients_are_scaled_and_clipped_exactly(
    schedule: str,
    widths: tuple[int, ...],
    shares: list[list[int]] | None,
    how: dict[str, Any],
    scaled: bool,
    clip_norm: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Scaled as for float16, of which autocast is left out, so that float64 shows what scaling does."""
    (tmp_path / "model.py").write_text(QUOTIENTS)
    user = load(str(tmp_path / "model.py"))
    module = user.build(0)
    graph = capture(user, module)
    plan = dictate(graph, user, widths, 4, 3, schedule, shares=shares, **how)
    if scaled:
        monkeypatch.setattr("autopar.runtime.job.autocast_of", lambda precision, device: nullcontext)
        plan = plan.model_copy(update={"precision": "fp16"})
    train_in_threads(plan, graph, user, dict(module.state_dict()), tmp_path, STEPS, TrainSettings(clip_norm=clip_norm))
    truth, found = train_plainly(user, plan, STEPS, clip_norm=clip_norm), dict[str, torch.Tensor]()
    for rank in range(len(plan.devices)):
        found |= load_file(tmp_path / f"parameters-{rank}")
    assert found.keys() == truth.parameters.keys()
    assert max(float((found[name] - value).abs().max()) for name, value in truth.parameters.items()) <= 1e-12
