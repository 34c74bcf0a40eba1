"""Faults of every kind: said by name, and nothing is lost but the steps since the last checkpoint."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from autopar.errors import TrainingError, UsageError
from autopar.formats.plan import Plan
from autopar.formats.program import Fault
from autopar.options.train import RunOptions
from autopar.ranks.pool import RankPool
from autopar.runtime.checkpoint.folder import CheckpointFolder
from autopar.runtime.start.launch import run
from checkpoint_pairs import largest_difference, saved
from drawn_models import model_case
from paths import MODELS

FILE = str(MODELS / "resumed.py")
STEPS, EVERY = 7, 2


@pytest.fixture(scope="module")
def plan() -> Plan:
    return model_case("resumed").plan([1, 2], 4, 4)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Return what is saved in the end where there is no fault."""
    folder, case = tmp_path_factory.mktemp("whole"), model_case("resumed")
    with RankPool(3) as pool:
        run(case.plan([1, 2], 4, 4), FILE, RunOptions(STEPS, checkpoint=folder, every=STEPS), pool=pool)
    return saved(folder, STEPS)


ENDING = {
    "kill@0:5:F2": r"rank 0 \(stage 0, step 5, F2@0\) was killed by SIGKILL",
    "kill@1:5:B2": r"rank 1 \(stage 1, step 5, .*\) was killed by SIGKILL",
    "kill@2:5:A": r"rank 2 \(stage 1, step 5, A@1\) was killed by SIGKILL",
    "segfault@0:4": r"rank 0 .*was killed by SIGSEGV",
    "exit@2:5:F": r"rank 2 .*ended by itself with exit code 3",
    "exception@1:6:F1": r"rank 1 .*RuntimeError: injected",
    "out-of-memory@0:5:B": r"rank 0 .*injected",
    "stop@2:5:R": r"rank 2 .*is stopped; the others waited",
    "nan@1:5:F0": r"the loss is not finite|is not finite",
    "nan@0:5": r"the gradient of .* \(stage 0\) is not finite",
    "disconnect@1:5:S": r"rank \d \(stage \d, step 5, .*all ranks are there: the network between them is lost",
}
HARMLESS = ("slow@1:3", "disk-full@1:3", "fail-fsync@0:3", "fail-rename@2:3", "fail-write@1:3", "fail-write@0:0:F0")
_QUICK = ("kill@1:5:B2", "nan@0:5")


@pytest.mark.parametrize(
    "fault", [each if each in _QUICK else pytest.param(each, marks=pytest.mark.slow) for each in ENDING]
)
@pytest.mark.reliability(1, 2, 3, 6, 8, 10, 11, 12)
def test_a_fault_is_said_and_the_run_goes_on_as_if_it_had_not_been(
    plan: Plan, whole: dict[str, torch.Tensor], fault: str, tmp_path: Path, living_pool: Callable[[], RankPool]
) -> None:
    parts = tmp_path / "parts"
    asked = RunOptions(STEPS, checkpoint=parts, every=EVERY, inject_fault=(Fault.parse(fault),), timeout_s=3.0)
    with pytest.raises(TrainingError, match=ENDING[fault]):
        run(plan, FILE, asked, pool=living_pool())
    left = CheckpointFolder(parts).steps()
    assert left[-1] in (2, 4, 6)
    again = run(plan, FILE, RunOptions(STEPS, checkpoint=parts, every=EVERY, resume=True), pool=living_pool())
    assert again.report.first_step == left[-1]
    assert largest_difference(saved(parts, STEPS), whole) == 0.0


@pytest.mark.parametrize("every", [STEPS, pytest.param(EVERY, marks=pytest.mark.slow)])
@pytest.mark.reliability(15)
def test_that_the_last_step_is_in_no_checkpoint_is_said_at_the_end(
    plan: Plan, every: int, tmp_path: Path, pool: RankPool
) -> None:
    asked = RunOptions(STEPS, checkpoint=tmp_path, every=every, inject_fault=(Fault.parse("disk-full@1:3"),))
    notes = [each for each in run(plan, FILE, asked, pool=pool).report.notes if "in no checkpoint" in each]
    # The disk is full for one of them.
    assert [each.partition(": rank 1: ")[0] for each in notes] == (
        [f"step {STEPS}, the last, is in no checkpoint"] if every == STEPS else []
    )


@pytest.mark.parametrize(
    "fault", [each if "full" in each else pytest.param(each, marks=pytest.mark.slow) for each in HARMLESS]
)
@pytest.mark.reliability(15)
def test_what_training_goes_on_with_is_said_and_changes_nothing(
    plan: Plan, whole: dict[str, torch.Tensor], fault: str, tmp_path: Path, pool: RankPool
) -> None:
    asked = RunOptions(STEPS, checkpoint=tmp_path / "parts", every=EVERY, inject_fault=(Fault.parse(fault),))
    outcome = run(plan, FILE, asked, pool=pool)
    assert outcome.report.checkpoints is not None
    if fault.startswith("slow"):
        assert not outcome.report.checkpoints.failures
    else:
        # Of the step before, where that was still being written.
        assert [each.split(":")[0] for each in outcome.report.checkpoints.failures] in (["step 4"], ["step 2"])
        assert f"rank {fault.split('@')[1][0]}" in outcome.report.checkpoints.failures[0]
    assert largest_difference(saved(tmp_path / "parts", STEPS), whole) == 0.0


def test_a_fault_of_a_rank_that_there_is_not_is_refused(plan: Plan) -> None:
    with pytest.raises(UsageError, match="the plan has 3 ranks"):
        run(plan, FILE, RunOptions(2, inject_fault=(Fault.parse("kill@3:1"),)))
