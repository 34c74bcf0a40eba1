"""The plain loop that `autopar verify` compares with: it is what tests train plainly, and what ranks train."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from autopar.capture.graph import LayerGraph
from autopar.capture.layers.export import capture
from autopar.capture.model.source import UserModel, load
from autopar.capture.plain.loop import PlainRun, float64_model, train_plainly
from autopar.errors import FileError, UsageError
from autopar.formats.plan import Plan
from autopar.policies import POLICIES
from autopar.runtime.stage.parameters import stages_of_parameters
from dictated import dictate
from paths import MODELS
from threads import train_in_threads

STEPS = 3


@functools.cache
def _captured(name: str) -> tuple[UserModel, LayerGraph, dict[str, torch.Tensor]]:
    user = float64_model(load(str(MODELS / f"{name}.py")))
    module = user.build(0)
    graph = capture(user, module)
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return user, graph, {key: value.detach().clone() for key, value in state.items()}


PLANS: dict[str, tuple[str, Sequence[int], dict[str, Any]]] = {
    "random layers in one stage": ("dropout", (2,), {"shares": [[1, 5]]}),
    "random layers in stages of unequal widths": ("dropout", (3, 2), {"recompute": True}),
    "replicas that take turns": ("batch_normed", (2, 2), {"turns": (0, 1)}),
    "turns before shares": ("otherwise", (2, 3), {"turns": (0,)}),
    "listed modules": ("otherwise_listed", (1, 2), {}),
    "listed modules, all divided alike": ("normed_layers", (3,), {}),
    "a loss that counts": ("everything", (2, 1), {}),
    "a model that is given dicts": ("words", (1, 2), {}),
}


@pytest.mark.some(4)
@pytest.mark.parametrize("case", PLANS)
def test_ranks_train_what_it_trains(case: str, tmp_path: Path) -> None:
    name, widths, options = PLANS[case]
    user, graph, state = _captured(name)
    plan = dictate(graph, user, widths, 4, 6, **options)
    losses = train_in_threads(plan, graph, user, state, tmp_path, STEPS)
    truth = train_plainly(user, plan, STEPS)
    assert graph.loss != "mean" or losses == pytest.approx(truth.losses, rel=1e-12)
    _check_ranks(plan, truth, tmp_path)


def _check_ranks(plan: Plan, truth: PlainRun, folder: Path) -> None:
    largest = max(float(value.abs().max()) for value in truth.gradients.values() if value is not None)
    for rank in range(len(plan.devices)):
        gradients, parameters = (load_file(folder / f"{what}-{rank}") for what in ("gradients", "parameters"))
        assert all((truth.gradients[name] is None) == (name not in gradients) for name in parameters)
        _check_close(gradients, truth.gradients, 1e-12 * largest, 0.0)
        _check_close(parameters, truth.parameters, 1e-10, 1e-10)
    for stage in plan.stages:
        _check_close(load_file(folder / f"buffers-{stage.devices[0]}"), truth.buffers, 1e-10, 1e-10)


def _check_close(found: Mapping[str, torch.Tensor], truth: Mapping[str, Any], most: float, relative: float) -> None:
    for name, value in found.items():
        torch.testing.assert_close(value, truth[name], rtol=relative, atol=most)


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

def model(): return Loose()
def dataset():
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(x, x.sum(1))
def loss(output, batch): return (output.sum(1) - batch[-1]).square().mean()
def optimizer(parameters): return torch.optim.SGD(parameters, lr=0.1)
"""


def _loose(folder: Path, widths: Sequence[int]) -> tuple[UserModel, LayerGraph, Plan]:
    (folder / "loose.py").write_text(LOOSE)
    user = float64_model(load(str(folder / "loose.py")))
    graph = capture(user, user.build(0))
    return user, graph, dictate(graph, user, widths, 2, 6)


def test_draws_between_modules_cannot_be_divided_unlike_the_rest(tmp_path: Path) -> None:
    user, _, plan = _loose(tmp_path, (3, 2))
    with pytest.raises(UsageError, match=r"layer blocks.0 \(stage 0\) draws random numbers"):
        train_plainly(user, plan, 1)
    large = plan.model_copy(update={"batch": 128, "micro_batches": 1, "micro_batch_size": 128})
    with pytest.raises(FileError, match="the dataset has 64 samples, a mini-batch takes 128"):
        train_plainly(user, large, 1)


@pytest.mark.parametrize("widths", [(2,), (2, 2)])
def test_draws_between_modules_divide_where_all_stages_divide_alike(widths: Sequence[int], tmp_path: Path) -> None:
    user, graph, plan = _loose(tmp_path, widths)
    train_in_threads(plan, graph, user, dict(user.build(0).named_parameters()), tmp_path, STEPS)
    _check_ranks(plan, train_plainly(user, plan, STEPS), tmp_path)


@pytest.mark.some(4)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("widths", [(1, 1, 1), (2, 1, 2)])
def test_a_plan_without_flushes_trains_by_its_rule(policy: str, widths: Sequence[int], tmp_path: Path) -> None:
    text = (MODELS / "tanh_chain.py").read_text().replace('OPTIMIZER = "sgd"', 'OPTIMIZER = "adamw"')
    (tmp_path / "chain.py").write_text(text)
    user = load(str(tmp_path / "chain.py"))
    module = user.build(0)
    graph = capture(user, module)
    plan = dictate(graph, user, widths, 2, 2, warmup=[1, 1, 1])
    stages = [each.model_copy(update={"warmup": depth}) for each, depth in zip(plan.stages, (3, 2, 1), strict=True)]
    more: dict[str, object] = {"anneal_steps": 4, "synchronous_steps": 2} if policy == "pipemare" else {}
    if policy == "predict":
        more = {"ahead": "xpipe" if widths[0] > 1 else "counted"}
    plan = plan.model_copy(update={"weight_policy": policy, "stages": tuple(stages), **more})
    state = {name: value.detach().clone() for name, value in module.named_parameters()}
    train_in_threads(plan, graph, user, state, tmp_path, 8)
    truth = train_plainly(user, plan, 8, stage_of=stages_of_parameters(graph, plan))
    _check_ranks(plan, truth, tmp_path)
    # Every version is another.
    other = train_plainly(user, plan.model_copy(update={"weight_policy": "sync"}), 8)
    assert other.losses != pytest.approx(truth.losses, rel=1e-6)
