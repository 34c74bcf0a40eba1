"""Numbers that are not finite: of all ranks that find some, the one where they appeared is named."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from autopar.errors import TrainingError
from autopar.options.train import RunOptions
from autopar.ranks.pool import RankPool
from autopar.runtime.start.launch import run
from training_cases import make_case

MODEL = """
import math, torch, torch.distributed as dist
from torch import library
@library.custom_op("spoiling::{name}", mutates_args=())
def op(x: torch.Tensor, stage: int) -> torch.Tensor:
    return spoilt(x, "forward", stage)
op.register_fake(lambda x, stage: torch.empty_like(x))
def setup(ctx, inputs, output): ctx.stage = inputs[1]
def backward(ctx, gradient): return spoilt(gradient, "backward", ctx.stage), None
op.register_autograd(backward, setup_context=setup)
calls = 0
def spoilt(x, way, stage):
    global calls
    mine = dist.is_initialized() and (way, stage) == ({way!r}, {stage})
    calls += mine
    return x * math.nan if mine and calls > 5 else x.clone()
class Block(torch.nn.Module):
    def __init__(self, stage):
        super().__init__()
        self.stage, self.linear = stage, torch.nn.Linear(8, 8)
    def forward(self, x): return op(torch.tanh(self.linear(x)), self.stage)
def model(): return torch.nn.Sequential(*(Block(stage) for stage in range(3)))
def dataset(): return [(torch.randn(8), torch.randn(8)) for _ in range(64)]
def loss(output, batch): return (output - batch[1]).square().mean()
"""
CASES = [(way, stage, clip) for way in ("forward", "backward") for stage in range(3) for clip in (None, 1.0)]


@pytest.mark.some(2)
@pytest.mark.parametrize(("way", "stage", "clip"), CASES)
@pytest.mark.parametrize("widths", [(1, 1, 1), (1, 2, 1)])
@pytest.mark.reliability(11, 12)
def test_the_stage_where_they_appeared_is_named(
    way: str,
    stage: int,
    clip: float | None,
    widths: tuple[int, ...],
    tmp_path: Path,
    living_pool: Callable[[], RankPool],
) -> None:
    name = f"{way}_{stage}_{clip is None}_{len(widths)}{sum(widths)}"
    case = make_case(tmp_path / "spoiling.py", MODEL.format(way=way, stage=stage, name=name))
    plan = case.plan(list(widths), 4, 4, cuts=[1, 2])
    with pytest.raises(TrainingError) as raised:
        run(plan, str(case.file), RunOptions(8, clip_norm=clip), pool=living_pool())
    said = str(raised.value)
    forward = (
        r"what the stage gives is not finite in micro-batch \d" if stage < 2 else "the loss is not finite in micro"
    )
    gradient = rf"the gradient of {stage}\.linear\.\w+ \(stage {stage}\) is not finite"
    assert re.match(rf"rank \d \(stage {stage}, step \d, .*\): {forward if way == 'forward' else gradient}", said), said
