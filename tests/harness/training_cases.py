"""Examples trained by rank processes and by a plain loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

import plain
from autopar.capture.export import capture
from autopar.capture.graph import LayerGraph
from autopar.capture.source import UserModel, load
from autopar.formats.plan import Plan
from autopar.ranks.pool import RankPool
from autopar.runtime.start.workspace import Workspace
from autopar.schedules.expand import part_of, stages_of
from dictated import dictate
from paths import EXAMPLES, MODELS

STEPS = 5


# The GPT keeps its twelve blocks and is made narrow, so that many plans can be tried.
NARROW = {"gpt": {"WIDTH": 32, "CONTEXT": 16}, "resnet": {"WIDTHS": (4, 8, 8)}, "mlp": {"WIDTHS": (64, 48, 96, 24, 64)}}


OPTIMIZERS = {
    "sgd": "torch.optim.SGD(parameters, lr=0.05, momentum=0.9)",
    "adamw": "torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)",
}


FILE = """
import importlib.util
import torch

spec = importlib.util.spec_from_file_location("base", {base!r})
base = importlib.util.module_from_spec(spec)
spec.loader.exec_module(base)
for name, value in {narrow!r}.items():
    setattr(base, name, value)
data = base.dataset()


class Double(torch.utils.data.Dataset):
    def __len__(self):
        return len(data)

    def __getitem__(self, index):
        sample = data[index]
        cast = lambda value: value.double() if value.is_floating_point() else value
        return {{k: cast(v) for k, v in sample.items()}} if isinstance(sample, dict) else tuple(map(cast, sample))


def model():
    return base.model().double()


def dataset():
    return Double()


loss = base.loss


def optimizer(parameters):
    return {optimizer}
"""


class Case(NamedTuple):
    file: Path
    model: UserModel
    graph: LayerGraph
    workspace: Path
    """Prepared once: it does not depend on how the model is cut."""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Case]:
    folder = tmp_path_factory.mktemp("models")
    found = {}
    for example, narrow in NARROW.items():
        for optimizer, text in OPTIMIZERS.items():
            file = folder / f"{example}_{optimizer}.py"
            file.write_text(FILE.format(base=str(EXAMPLES / f"{example}.py"), narrow=narrow, optimizer=text))
            found[example, optimizer] = make_case(file)
    return found


@pytest.fixture(scope="module")
def dropout(tmp_path_factory: pytest.TempPathFactory) -> Case:
    file = tmp_path_factory.mktemp("dropout") / "dropout.py"
    file.write_bytes((MODELS / "dropout.py").read_bytes())
    return make_case(file)


def make_case(file: Path) -> Case:
    model = load(str(file))
    graph = capture(model, model.build(0))
    workspace = file.with_suffix("")
    workspace.mkdir()
    Workspace(workspace).prepare(model, dictate(graph, model, (1,), 1, 2), None)
    return Case(file, model, graph, workspace)


def train(pool: RankPool, case: Case, plan: Plan, folder: Path, steps: int = STEPS) -> list[float]:
    arguments = {
        "plan": plan.dumps(),
        "model": str(case.file),
        "workspace": str(case.workspace),
        "folder": str(folder),
        "steps": steps,
    }
    parts = pool.run("rank_jobs:train_and_keep", arguments, ranks=len(plan.devices))
    return [sum(step) for step in zip(*parts, strict=True)]  # type: ignore[call-overload]


def check(plan: Plan, truth: plain.Trained, folder: Path, losses: Sequence[float]) -> None:
    assert losses == pytest.approx(truth.losses, rel=1e-12)
    largest = max(float(gradient.abs().max()) for gradient in truth.gradients.values())
    seen: set[str] = set()
    for rank in range(len(plan.devices)):
        gradients = load_file(folder / f"gradients-{rank}")
        for name, gradient in gradients.items():
            difference = float((gradient - own_part(plan, rank, name, truth.gradients[name])).abs().max())
            assert difference <= 1e-12 * largest, f"gradient of {name} on rank {rank}"
        parameters = load_file(folder / f"parameters-{rank}")
        assert parameters.keys() == gradients.keys()
        for name, parameter in parameters.items():
            seen.add(name)
            expected = own_part(plan, rank, name, truth.parameters[name])
            bound = 1e-10 * float(expected.abs().max()) + 1e-10
            assert float((parameter - expected).abs().max()) <= bound, f"parameter {name} on rank {rank}"
    assert seen == truth.parameters.keys()


def own_part(plan: Plan, rank: int, name: str, whole: torch.Tensor) -> torch.Tensor:
    """Return what a rank has of a parameter that its team may cut, by the plan's own numbers."""
    for stage in (plan.stages[index] for index in stages_of(plan, rank)[0]):
        for cut in (cut for cut in stage.cuts if cut.parameter == name):
            indices = [at for start, stop in cut.parts[part_of(plan, rank)] for at in range(start, stop)]
            return whole.index_select(cut.dim, torch.tensor(indices))
    return whole


def check_buffers(plan: Plan, truth: plain.Trained, folder: Path) -> None:
    first = 0
    for stage in plan.stages:
        for name, value in load_file(folder / f"buffers-{first}").items():
            torch.testing.assert_close(value, truth.buffers[name], rtol=1e-10, atol=1e-10)
        first += stage.replicas


def shares_of(graph: LayerGraph, plan: Plan, name: str) -> tuple[int, ...]:
    """Return how the stage that a module is in divides a micro-batch."""
    stage_of = {layer: stage for stage in plan.stages for layer in stage.layers}
    modules = {module: layer.name for layer in graph.layers for module in layer.modules}
    while name not in modules:
        name = name.rpartition(".")[0]
    stage = stage_of[modules[name]]
    return stage.rows if stage.division == "split" else stage.rows[:1]
