"""Training as a plan says gives what plain training gives: the first of docs/promises.md, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import plain
import pytest
import torch
from dictated import dictate
from safetensors.torch import load_file

from autopar.capture.export import capture
from autopar.capture.graph import LayerGraph
from autopar.capture.source import UserModel, load
from autopar.formats.plan import Plan
from autopar.ranks.pool import RankPool
from autopar.runtime.start.workspace import Workspace

EXAMPLES = Path(__file__).parents[2] / "examples"
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
            found[example, optimizer] = _case(file)
    return found


@pytest.fixture(scope="module")
def dropout(tmp_path_factory: pytest.TempPathFactory) -> Case:
    file = tmp_path_factory.mktemp("dropout") / "dropout.py"
    file.write_bytes((Path(__file__).parent / "models" / "dropout.py").read_bytes())
    return _case(file)


def _case(file: Path) -> Case:
    model = load(str(file))
    graph = capture(model, model.build(0))
    workspace = file.with_suffix("")
    workspace.mkdir()
    Workspace(workspace).prepare(model, dictate(graph, model, (1,), 1, 2), None)
    return Case(file, model, graph, workspace)


def _train(pool: RankPool, case: Case, plan: Plan, folder: Path, steps: int = STEPS) -> list[float]:
    arguments = {
        "plan": plan.dumps(),
        "model": str(case.file),
        "workspace": str(case.workspace),
        "folder": str(folder),
        "steps": steps,
    }
    parts = pool.run("rank_jobs:train_and_keep", arguments, ranks=len(plan.devices))
    return [sum(step) for step in zip(*parts, strict=True)]  # type: ignore[call-overload]


def _check(plan: Plan, truth: plain.Trained, folder: Path, losses: Sequence[float]) -> None:
    assert losses == pytest.approx(truth.losses, rel=1e-12)
    largest = max(float(gradient.abs().max()) for gradient in truth.gradients.values())
    seen: set[str] = set()
    for rank in range(len(plan.devices)):
        gradients = load_file(folder / f"gradients-{rank}")
        for name, gradient in gradients.items():
            difference = float((gradient - truth.gradients[name]).abs().max())
            assert difference <= 1e-12 * largest, f"gradient of {name} on rank {rank}"
        parameters = load_file(folder / f"parameters-{rank}")
        assert parameters.keys() == gradients.keys()
        for name, parameter in parameters.items():
            seen.add(name)
            expected = truth.parameters[name]
            bound = 1e-10 * float(expected.abs().max()) + 1e-10
            assert float((parameter - expected).abs().max()) <= bound, f"parameter {name} on rank {rank}"
    assert seen == truth.parameters.keys()


def _check_buffers(plan: Plan, truth: plain.Trained, folder: Path) -> None:
    first = 0
    for stage in plan.stages:
        for name, value in load_file(folder / f"buffers-{first}").items():
            torch.testing.assert_close(value, truth.buffers[name], rtol=1e-10, atol=1e-10)
        first += stage.replicas


def _shares_of(graph: LayerGraph, plan: Plan, name: str) -> tuple[int, ...]:
    """Return how the stage that a module is in divides a micro-batch."""
    stage_of = {layer: stage for stage in plan.stages for layer in stage.layers}
    modules = {module: layer.name for layer in graph.layers for module in layer.modules}
    while name not in modules:
        name = name.rpartition(".")[0]
    stage = stage_of[modules[name]]
    return stage.rows if stage.division == "split" else stage.rows[:1]


PLANS = [
    ((1,), "gpipe"),
    ((2,), "1f1b"),
    ((4,), "1f1b"),
    ((1, 1), "gpipe"),
    ((1, 1), "1f1b"),
    ((1, 2), "gpipe"),
    ((1, 2), "1f1b"),
    ((2, 1), "gpipe"),
    ((2, 1), "1f1b"),
    ((1, 1, 1), "1f1b"),
    ((1, 2, 1), "1f1b"),
    ((1, 1, 1, 1), "gpipe"),
    ((1, 1, 1, 1), "1f1b"),
    ((2, 3), "gpipe"),
    ((2, 3), "1f1b"),
    ((3, 2), "1f1b"),
]


@pytest.mark.parametrize(("widths", "schedule"), PLANS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("example", NARROW)
def test_training_equals_the_plain_loop(
    example: str,
    optimizer: str,
    widths: tuple[int, ...],
    schedule: str,
    cases: dict[tuple[str, str], Case],
    pool: RankPool,
    tmp_path: Path,
) -> None:
    case = cases[example, optimizer]
    # Seven rows divide unevenly among two and among three; at least two rows a share, for batch statistics.
    rows = 7 if max(widths) < 4 else 8
    plan = dictate(case.graph, case.model, widths, micro_batches=3, rows=rows, schedule=schedule)
    losses = _train(pool, case, plan, tmp_path)
    truth = plain.train(case.file, 3, rows, lambda name: _shares_of(case.graph, plan, name))
    _check(plan, truth, tmp_path, losses)
    _check_buffers(plan, truth, tmp_path)


@pytest.mark.parametrize(
    ("widths", "schedule", "cuts"), [((1,), "gpipe", []), ((1, 2), "1f1b", [3]), ((2, 1, 1), "gpipe", [2, 4])]
)
def test_dropout_depends_on_the_division_and_on_nothing_else(
    widths: tuple[int, ...], schedule: str, cuts: list[int], dropout: Case, pool: RankPool, tmp_path: Path
) -> None:
    random = [layer.name for layer in dropout.graph.layers if layer.random]
    assert random == ["1", "2", "3", "4"]
    plan = dictate(dropout.graph, dropout.model, widths, 3, 5, schedule, cuts=cuts, seed=3)
    losses = _train(pool, dropout, plan, tmp_path)
    truth = plain.train(
        dropout.file, 3, 5, lambda name: _shares_of(dropout.graph, plan, name), random, seed=3, model_seed=0
    )
    _check(plan, truth, tmp_path, losses)


@pytest.mark.parametrize("example", NARROW)
@pytest.mark.parametrize(("widths", "schedule"), [((1, 1, 1), "1f1b"), ((1, 2), "gpipe"), ((2,), "1f1b")])
def test_recomputation_changes_nothing(
    example: str,
    widths: tuple[int, ...],
    schedule: str,
    cases: dict[tuple[str, str], Case],
    pool: RankPool,
    tmp_path: Path,
) -> None:
    case = cases[example, "adamw"]
    plan = dictate(case.graph, case.model, widths, 3, 7, schedule, recompute=True)
    losses = _train(pool, case, plan, tmp_path)
    truth = plain.train(case.file, 3, 7, lambda name: _shares_of(case.graph, plan, name))
    _check(plan, truth, tmp_path, losses)
    _check_buffers(plan, truth, tmp_path)


@pytest.mark.parametrize(
    ("widths", "turns", "recompute"),
    [((2,), [0], False), ((2, 1), [0], True), ((1, 3), [1], False), ((2, 2), [0, 1], False), ((2, 3), [0, 1], True)],
)
def test_replicas_that_take_turns_train_as_the_plain_loop(
    widths: tuple[int, ...], turns: list[int], recompute: bool, dropout: Case, pool: RankPool, tmp_path: Path
) -> None:
    random = [layer.name for layer in dropout.graph.layers if layer.random]
    plan = dictate(dropout.graph, dropout.model, widths, 5, 3, "gpipe", seed=3, turns=turns, recompute=recompute)
    losses = _train(pool, dropout, plan, tmp_path)
    truth = plain.train(
        dropout.file, 5, 3, lambda name: _shares_of(dropout.graph, plan, name), random, seed=3, model_seed=0
    )
    _check(plan, truth, tmp_path, losses)
