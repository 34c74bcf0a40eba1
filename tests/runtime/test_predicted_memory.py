"""What a stage holds at most is what the planner said, on a model whose activations outweigh its parameters."""

from __future__ import annotations

import pytest

from autopar.capture.export import capture
from autopar.capture.graph import LayerGraph
from autopar.capture.source import UserModel, load
from autopar.formats.profile import Profile
from autopar.hardware.kinds import estimated_cluster
from autopar.planner import PlanOptions, plan
from autopar.profiler import ProfileOptions, profile
from autopar.runtime.rehearsal.memory import rehearse

ROWS, MICRO_BATCHES = 256, 8
MODEL = """
import torch
from torch import nn
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, 48), nn.Linear(48, 24)
    def forward(self, x): return x + self.down(nn.functional.gelu(self.up(self.norm(x))))
def model(): return nn.Sequential(*(Block() for _ in range(8)))
def dataset(): return torch.utils.data.TensorDataset(*[torch.zeros(2048, 24)] * 2)
def loss(output, batch): return (output - batch[1]).square().mean()
"""


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[UserModel, Profile]:
    path = tmp_path_factory.mktemp("blocks") / "blocks.py"
    path.write_text(MODEL)
    user = load(str(path))
    return user, profile(user, ProfileOptions(batch=ROWS, device="cpu", budget_s=0.2))


LINES = ["0-1,2-3,4-5,6-7", "0-2,3-7:2"]


@pytest.fixture(scope="module")
def graph(profiled: tuple[UserModel, Profile]) -> LayerGraph:
    user, _ = profiled
    return capture(user, user.build(0))


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [
        *((schedule, stages) for schedule in ("gpipe", "1f1b", "zb-h1", "zb-h2") for stages in LINES),
        *((schedule, "0,1,2,3,4,5,6,7") for schedule in ("interleaved", "zb-v", "dualpipe-v")),
    ],
)
def test_a_rehearsal_holds_what_was_predicted(
    profiled: tuple[UserModel, Profile], graph: LayerGraph, schedule: str, stages: str
) -> None:
    user, measured = profiled
    options = PlanOptions(
        stages=stages, schedule=schedule, batch=ROWS * MICRO_BATCHES, micro_batches=MICRO_BATCHES, shard="none"
    )
    planned = plan(measured, estimated_cluster(measured, 4), options)
    # A rank of several stages may hold most in a forward, which is charged what a backward takes for a while.
    most = 0.05 if stages in LINES else 0.07
    for held, predicted in zip(rehearse(planned, graph, user), planned.predicted.peak_bytes, strict=True):
        assert predicted * (1 - most) <= held <= predicted * 1.05
