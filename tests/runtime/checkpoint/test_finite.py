"""Checkpoints that training has spoilt: marked, said and left out, whatever the losses say; masks of -inf are none."""

import math
import random
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from autopar.errors import FileError
from autopar.formats.checkpoint import NonFiniteTensor
from autopar.formats.plan import Plan
from autopar.options.train import RunOptions
from autopar.ownership import SHARDS
from autopar.ranks.pool import RankPool
from autopar.runtime.checkpoint import finite
from autopar.runtime.checkpoint.finite import non_finite_elements, non_finite_tensors
from autopar.runtime.checkpoint.folder import CheckpointFolder, CheckpointReader, read_verified, views
from autopar.runtime.checkpoint.state import held_pieces
from autopar.runtime.start.launch import run
from checkpoint_pairs import largest_difference, saved
from conftest import Command
from training_cases import Case, make_case

TYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e5m2,
)  # fmt: skip


@pytest.mark.parametrize("dtype", TYPES)
def test_elements_are_counted_as_one_by_one_in_any_type_and_however_they_lie(dtype: torch.dtype) -> None:
    rng = random.Random(str(dtype))
    with patch.object(finite, "_CHUNK", 7):
        for size in (0, 1, 6, 7, 8, 40):
            values = [rng.choice([0.0, 1.0, -3e4, 3e4, math.nan, math.inf, -math.inf]) for _ in range(size)]
            tensor = torch.tensor(values).to(torch.complex64 if dtype.is_complex else torch.float32).to(dtype)
            known = sum(not math.isfinite(each) for each in values)
            assert non_finite_elements(tensor) == known
            if size == 40 and dtype.itemsize > 1:
                assert non_finite_elements(tensor.reshape(5, 8).t()) == known
                assert non_finite_elements(tensor.conj()) == known
    for other in (torch.int64, torch.uint8, torch.bool):
        assert non_finite_elements(torch.ones(5).to(other)) == 0
    # Sums and squares of finite numbers may not be finite.
    assert non_finite_elements(torch.full((9,), torch.finfo(torch.float32).max)) == 0


def test_what_was_there_at_step_0_and_the_optimizers_copies_of_it_are_no_fault() -> None:
    mask = torch.tensor([0.0, -math.inf, -math.inf, 1.0])
    worse = torch.tensor([math.nan, -math.inf, -math.inf, 1.0])
    start = {"parameter/mask": 2, "optimizer/w/best": 1}

    def found(kind: str, name: str, tensor: torch.Tensor, state: str | None = None) -> tuple[NonFiniteTensor, ...]:
        return non_finite_tensors(held_pieces(kind, name, tensor, state), start)  # type: ignore[arg-type]

    assert found("parameter", "mask", mask) == found("optimizer", "mask", mask, "slow") == ()
    assert found("parameter", "mask", worse) == (NonFiniteTensor(key="parameter/mask", elements=1),)
    assert found("optimizer", "w", mask, "exp_avg") == (NonFiniteTensor(key="optimizer/w/exp_avg", elements=2),)
    assert found("optimizer", "w", mask[:2], "best") == ()
    assert found("buffer", "w", worse) == ()


MODEL = """
import math, torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.middle, self.head = torch.nn.Embedding(9, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)
        self.mask = torch.nn.Parameter(torch.tensor([0.0, -math.inf] * 4))
    def forward(self, x):
        return self.head(self.middle(torch.softmax(self.table(x) + self.mask, -1)).mean(1))
class Spoiling(torch.optim.Adam):
    steps = 0
    def step(self, closure=None):
        super().step(closure)
        self.steps += 1
        for parameter in (each for group in self.param_groups for each in group["params"]):
            if self.steps == STEP and parameter.shape == SHAPE:
                values = PLACE
                (values.to_local() if hasattr(values, "to_local") else values)[-1] = math.nan
def model(): return Net()
def dataset(): return [(torch.tensor([i % 2, 1 - i % 2]), i % 2) for i in range(64)]
def loss(output, batch): return torch.nn.functional.cross_entropy(output, batch[1])
def optimizer(parameters): return Spoiling(parameters, lr=0.01)
"""
WEIGHTS, STATE = "parameter.data", "self.state[parameter].setdefault('kept', torch.zeros(8, 8))"


def case(folder: Path, place: str = WEIGHTS, shape: str = "(9, 8)", step: int = 5) -> Case:
    text = MODEL.replace("PLACE", place).replace("SHAPE", shape).replace("STEP", str(step))
    return make_case(folder / "spoiling.py", text)


PLACES = {
    "a row that nobody reads": (WEIGHTS, "(9, 8)", {}),
    "the state of a rank in the middle": (STATE, "(8, 8)", {}),
    "parts of a parameter that replicas divide": (WEIGHTS, "(9, 8)", {"shard": ["parameters", "none"]}),
}


@pytest.mark.parametrize(
    "where", [each if "nobody" in each else pytest.param(each, marks=pytest.mark.slow) for each in PLACES]
)
@pytest.mark.reliability(20)
def test_a_run_goes_on_from_the_newest_that_training_had_not_spoilt(
    where: str, tmp_path: Path, pool: RankPool, command: Command
) -> None:
    place, shape, how = PLACES[where]
    spoilt, parts = case(tmp_path, place, shape), tmp_path / "parts"
    plan = spoilt.plan([2, 1], 2, 4, **how)

    def train(steps: int, folder: Path = parts, **more: object) -> tuple[str, ...]:
        report = run(plan, str(spoilt.file), RunOptions(steps, checkpoint=folder, every=2, **more), pool=pool).report  # type: ignore[arg-type]
        assert report.checkpoints is not None
        assert all(map(math.isfinite, report.loss))
        return (*report.checkpoints.failures, *report.notes)

    said = train(10)
    folder = CheckpointFolder(parts)
    # Two that are sound, and the newest that is not.
    assert folder.steps() == [2, 4, 10]
    key = "optimizer/middle.weight/kept" if place == STATE else "parameter/table.weight"
    count = 16 if how else 8
    for step in (6, 8, 10):
        assert f"step {step}: {count} elements of {key} are not finite, which were at step 0" in said[step // 2 - 3]
    assert [each.problem is None for each in views(parts)] == [True, True, False]
    code, _, error = command("checkpoint", "verify", str(parts))
    assert (code, "1 of 3 checkpoints are not finite: " in error) == (5, True)
    shutil.copytree(parts / "step-10", tmp_path / "alone" / "step-10")
    with pytest.raises(FileError, match=r"no checkpoint is sound: .*`autopar checkpoint export \S+/alone --step 10`"):
        CheckpointFolder(tmp_path / "alone").newest()
    (parts / "step-2" / "manifest.json").unlink()
    code, _, error = command("checkpoint", "verify", str(parts))
    assert (code, "1 of 3 checkpoints are damaged: " in error) == (4, True)
    # This time, it is not spoilt before step 9.
    notes = train(8, resume=True)
    assert any("left out a checkpoint: " in note and f"step-10: {count} elements of " in note for note in notes)
    assert "went on from the checkpoint of step 4" in notes
    assert folder.steps() == [6, 8]
    assert all(read_verified(folder.folder_of(step)).unsound is None for step in (6, 8))
    assert "non_finite" not in (folder.folder_of(8) / "manifest.json").read_text()


ONE_SHARD = "parameter.data", "self.state[parameter]['exp_avg']", "self.state[parameter]['exp_avg_sq']"


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.reliability(20, 23)
def test_one_shard_alone_that_is_spoilt_leaves_a_checkpoint_out_under_any_other_plan(
    seed: int, tmp_path: Path, pool: RankPool
) -> None:
    rng = random.Random(seed)
    place, parts = rng.choice(ONE_SHARD), tmp_path / "parts"
    # The rows that nobody reads are the last of every shard.
    spoilt = case(tmp_path, place, step=rng.choice((5, 6)))
    widths, shard = rng.choice([(2, 1), (3,), (2,)]), rng.choice(SHARDS[1:])
    alone = f"torch.distributed.get_rank() == {rng.randrange(widths[0])} and"
    text = (
        spoilt.file.read_text()
        .replace("self.steps ==", f"{alone} self.steps ==")
        .replace("Net()\ndef", "Net().double()\ndef")
    )
    spoilt, sound = (
        make_case(tmp_path / f"{name}.py", each)
        for name, each in (("one", text), ("none", text.replace(alone, "False and")))
    )

    def trained(case: Case, *runs: tuple[Plan, int], folder: Path, resume: bool = False) -> list[str]:
        for plan, steps in runs:
            asked = RunOptions(steps, checkpoint=folder, every=2, resume=resume)
            report = run(plan, str(case.file), asked, pool=pool).report
            assert report.checkpoints is not None
        return [*report.checkpoints.failures, *report.notes]

    said = trained(spoilt, (spoilt.plan(widths, 2, 6, shard=shard), 8), folder=parts)
    assert any("step 8: " in each and "are not finite, which were at step 0" in each for each in said)
    folder = CheckpointFolder(parts)
    assert folder.steps() == [2, 4, 8]
    manifest = read_verified(folder.folder_of(8))
    with CheckpointReader(folder.folder_of(8), manifest) as reader:
        values = [reader.read(each) for each in manifest.tensors if each.name == "table.weight"]
    broken = {int(row) for each in values if each.dim() == 2 for row in (~each.isfinite()).any(1).nonzero()}
    # The last row of one shard alone.
    assert len(broken) == 1, broken
    other = rng.choice([([1, 1], {}), ([1, 2], {"shard": "optimizer"}), ([1], {}), ([2, 1], {"shard": "parameters"})])
    notes = trained(spoilt, (spoilt.plan(other[0], 2, 6, **other[1]), 8), folder=parts, resume=True)
    assert any("left out a checkpoint: " in note and "step-8: " in note for note in notes)
    assert "went on from the checkpoint of step 4" in notes
    trained(sound, (sound.plan([1], 2, 6), 8), folder=tmp_path / "truth")
    assert largest_difference(saved(parts, 8), saved(tmp_path / "truth", 8)) < 1e-10
