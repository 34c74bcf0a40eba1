"""The plain loop that `autopar verify` compares with: it is what tests train plainly, and what ranks train."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from autopar.capture.plain.loop import train_plainly
from autopar.errors import FileError, UsageError
from autopar.formats.plan import Plan
from autopar.runtime.stage.parameters import first_stages
from drawn_models import equals_plain, model_case
from oracles.unflushed import RULES
from policy_cases import planned
from training_cases import Case, check, make_case


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("name", "widths", "how"),
    [
        ("dropout", (2,), {"shares": [[1, 5]]}),
        ("otherwise", (2, 3), {"turns": (0,)}),
        ("otherwise_listed", (1, 2), {}),
        ("normed_layers", (3,), {}),
    ],
)
def test_ranks_train_what_it_trains(name: str, widths: tuple[int, ...], how: dict[str, Any]) -> None:
    equals_plain(name, model_case(name).plan(widths, 4, 6, **how))


LOOSE = """
import torch
import torch.nn.functional as F
from torch import nn

class Loose(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    def forward(self, x):
        for block in self.blocks:
            x = F.dropout(block(x), 0.5, self.training)
        return x

def model(): return Loose().double()
def dataset():
    x = torch.randn(64, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(x, x.sum(1))
def loss(output, batch): return (output.sum(1) - batch[-1]).square().mean()
def optimizer(parameters): return torch.optim.SGD(parameters, lr=0.1)
"""


def _loose(folder: Path, widths: Sequence[int]) -> tuple[Case, Plan]:
    case = make_case(folder / "loose.py", LOOSE)
    return case, case.plan(widths, 2, 6)


def test_draws_between_modules_cannot_be_divided_unlike_the_rest(tmp_path: Path) -> None:
    case, plan = _loose(tmp_path, (3, 2))
    with pytest.raises(UsageError, match=r"layer blocks.0 \(stage 0\) draws random numbers"):
        train_plainly(case.model, plan, 1)
    large = plan.model_copy(update={"batch": 128, "micro_batches": 1, "micro_batch_size": 128})
    with pytest.raises(FileError, match="the dataset has 64 samples, a mini-batch takes 128"):
        train_plainly(case.model, large, 1)


@pytest.mark.parametrize("widths", [(2,), (2, 2)])
def test_draws_between_modules_divide_where_all_stages_divide_alike(widths: Sequence[int], tmp_path: Path) -> None:
    case, plan = _loose(tmp_path, widths)
    check(plan, case.truth(plan), tmp_path, case.train(plan, tmp_path))


@pytest.mark.some(4)
@pytest.mark.parametrize("policy", RULES)
@pytest.mark.parametrize("widths", [(1, 1, 1), (2, 1, 2)])
def test_a_plan_without_flushes_trains_by_its_rule(policy: str, widths: Sequence[int], tmp_path: Path) -> None:
    ahead = "xpipe" if widths[0] > 1 else "counted"
    plan = planned(tmp_path, "adamw", policy, [3, 2, 1], 2, synchronous_steps=2, widths=widths, ahead=ahead)
    case = make_case(tmp_path / "model.py")
    losses = case.train(plan, tmp_path, 8)
    truth = train_plainly(case.model, plan, 8, stage_of=first_stages(plan, case.graph))
    check(plan, truth, tmp_path, losses)
    # Every version is another.
    other = train_plainly(case.model, plan.model_copy(update={"weight_policy": "sync"}), 8)
    assert other.losses != pytest.approx(truth.losses, rel=1e-6)
