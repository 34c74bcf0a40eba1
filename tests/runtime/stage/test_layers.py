"""Layers train under autocast as the plain loop does there, compiled or not, within what the precision resolves."""

import copy
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from autopar.capture.plain.mini_batch import PlainRun
from autopar.errors import UsageError
from autopar.formats.plan import Plan
from autopar.formats.stage import chunks_of, layout_of
from autopar.options.train import RunOptions, TrainSettings
from autopar.ownership import Shard
from autopar.ranks.pool import RankPool
from autopar.runtime.job import Job
from autopar.runtime.messages.transport import Exchange, InProcessTransport
from autopar.runtime.start.launch import run
from autopar.schedules import SCHEDULES
from autopar.schedules.expand import expand
from drawn_models import model_case
from paths import HARNESS, MODELS
from threads import own
from training_cases import TYPES, Case, make_case, train

STEPS = 2
GENTLE = """
def loss(output, batch): return base.loss(output, batch) / 64
def optimizer(parameters): return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
"""
"""Scaled gradients of float16 stay finite, and parameters change in proportion to them."""


def single(name: str, folder: Path) -> Case:
    """Return a model in float32."""
    text = (MODELS / f"{name}.py").read_text().replace("torch.float64", "torch.float32")
    return make_case(folder / f"{name}.py", text + GENTLE)


def lowered(plan: Plan, case: Case, precision: str) -> Plan:
    """Give a plan a precision, and its tensors the types that they have in it, as a profile would tell."""
    rows, graph = plan.micro_batch_size, case.graph
    known = {spec.name: torch.zeros(spec.shape(rows), dtype=spec.dtype) for spec in graph.tensors}
    with torch.no_grad(), torch.autocast("cpu", TYPES[precision]):
        for layer in graph.layers:
            outputs = copy.deepcopy(layer.module)(rows, *(known[name] for name in layer.inputs))
            known.update(zip(layer.outputs, outputs, strict=True))
    types = {name: str(value.dtype).removeprefix("torch.") for name, value in known.items()}
    tensors = tuple(each.model_copy(update={"dtype": types[each.name]}) for each in plan.tensors)
    return plan.model_copy(update={"precision": precision, "tensors": tensors})


def errors(plan: Plan, truth: PlainRun, begun: Mapping[str, torch.Tensor], folder: Path) -> tuple[float, float]:
    """Return how far gradients and changes of parameters are off: the most of any tensor, over the largest's norm."""
    found = [
        (load_file(folder / f"gradients-{rank}"), load_file(folder / f"parameters-{rank}"))
        for rank in range(len(plan.devices))
    ]
    moved = {name: (value - begun[name]).norm() for name, value in truth.parameters.items()}
    largest = max(each.norm() for each in truth.gradients.values()), max(moved.values())
    most = []
    for index, expected in enumerate((truth.gradients, truth.parameters)):
        assert set().union(*(parts[index] for parts in found)) == expected.keys()
        off = [(value - expected[name]).norm() for parts in found for name, value in parts[index].items()]
        most.append(float(max(off) / largest[index]))
    return most[0], most[1]


def found_in_threads(case: Case, plan: Plan, precision: str, folder: Path, steps: int) -> float:
    """Train in threads; return the larger of :func:`errors`."""
    plan = lowered(plan, case, precision)
    case.train(plan, folder, steps)
    return max(errors(plan, case.truth(plan, steps), case.state, folder))


@pytest.mark.some(6)
@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["narrow_gpt", "narrow_resnet"])
@pytest.mark.parametrize("replicated", [False, True])
def test_stages_train_as_the_plain_loop_within_the_precision(
    name: str, schedule: str, precision: str, replicated: bool, tmp_path: Path
) -> None:
    case, chunks = single(name, tmp_path), chunks_of(layout_of(schedule)) or 2
    if replicated:
        plan = case.plan((2, 1), 2, 12, schedule, chunks=chunks)
        # Each rounds the gradients of its share; what is off of one step, a ReLU at zero magnifies in the next.
        assert found_in_threads(case, plan, precision, tmp_path, 1) <= torch.finfo(TYPES[precision]).eps
    else:
        recompute = {layer.name for layer in case.graph.layers[::2]}
        plan = case.plan((1, 1), 3, 4, schedule, recompute=recompute, chunks=chunks)
        # Only sums of float32 gradients may be taken in other orders.
        assert found_in_threads(case, plan, precision, tmp_path, STEPS) <= 1e-6


@pytest.mark.some(1)
@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize(
    ("level", "schedule", "chunks"), [("optimizer", "1f1b", 1), ("gradients", "zb-h1", 1), ("parameters", "zb-v", 2)]
)
def test_sharded_replicas_train_as_the_plain_loop_within_the_precision(
    level: Shard, schedule: str, chunks: int, precision: str, pool: RankPool, tmp_path: Path
) -> None:
    case = single("narrow_gpt", tmp_path)
    plan = lowered(case.plan((2, 1), 2, 12, schedule, recompute=True, chunks=chunks, shard=level), case, precision)
    train(pool, case, plan, tmp_path, 1)
    assert max(errors(plan, case.truth(plan, 1), case.state, tmp_path)) <= torch.finfo(TYPES[precision]).eps


MICRO_BATCHES, ROWS, STEPS = 2, 4, 3
# What torch's compiler warns of is none of ours.
pytestmark = pytest.mark.filterwarnings("ignore")
needs_a_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU"
)


def _job(case: Case, settings: TrainSettings, precision: str = "fp64", width: int = 1, **wanted: Any) -> Job:  # noqa: ANN401
    """Return the job of a stage's first rank."""
    plan = case.plan((width,), MICRO_BATCHES, ROWS, **wanted).model_copy(update={"precision": precision})
    transport, cpu = InProcessTransport(Exchange(), 0), torch.device("cpu")
    graph = own(case.graph)

    def read(names: Iterable[str]) -> dict[str, torch.Tensor]:
        return {name: case.state[name].clone() for name in names}

    return Job(plan, expand(plan), 0, graph, case.model, read, transport, cpu, lambda step, position: None, settings)


def _assert_alike(one: Job, other: Job, tolerance: float) -> None:
    for step in range(STEPS):
        assert one.step(step).loss == pytest.approx(other.step(step).loss, rel=tolerance)
    expected = other.state()
    for name, value in one.state().items():
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.slow
@pytest.mark.some(1)
@needs_a_compiler
@pytest.mark.parametrize(
    ("name", "settings", "precision", "recompute", "tolerance"),
    [
        ("dropout", {}, "fp64", True, 1e-10),
        ("small_normed", {"deferred_batch_norm": True}, "fp64", True, 1e-10),
        ("normed_layers", {}, "fp64", False, 1e-10),
        ("small_normed", {}, "bf16", False, 1e-2),
    ],
)
def test_compiled_layers_train_as_plain_ones(
    name: str, settings: dict[str, bool], precision: str, recompute: bool, tolerance: float, tmp_path: Path
) -> None:
    text = (MODELS / f"{name}.py").read_text()
    text = text if precision == "fp64" else text.replace("torch.float64", "torch.float32")
    case = make_case(tmp_path / f"{name}.py", text)
    plainly, compiled = (
        _job(case, TrainSettings(**settings, compile=each), precision, recompute=recompute)  # type: ignore[arg-type]
        for each in (False, True)
    )
    before = {key: value.clone() for key, value in compiled.state().items()}
    assert compiled.warm_up() == []
    assert all(torch.equal(value, before[key]) for key, value in compiled.state().items())
    _assert_alike(compiled, plainly, tolerance)


def _counting(made: list[object], failing: int = 0) -> Callable[..., object]:
    """Stand in for ``torch.compile``: what it returns runs as it is, or fails in its first run."""

    def stand_in(module: torch.nn.Module, **options: object) -> object:
        made.append(module)
        return Mock(side_effect=RuntimeError("no code for it\nand more")) if len(made) == failing else module

    return stand_in


def test_layers_of_a_kind_share_their_code_or_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(torch, "compile", _counting(made))
    compiled = _job(model_case("dropout"), TrainSettings(compile=True))
    layers = [layer for stage in compiled.stages.values() for layer in stage.layers]
    assert len(made) == len({layer.fingerprint for layer in layers}) < len(layers)
    assert compiled.warm_up() == []
    _assert_alike(compiled, _job(model_case("dropout"), TrainSettings()), 0.0)
    made: list[object] = []
    monkeypatch.setattr(torch, "compile", _counting(made, failing=2))
    compiled = _job(model_case("batch_normed"), TrainSettings(compile=True))
    assert compiled.warm_up() == ["layer 1 is not compiled: RuntimeError: no code for it"]
    _assert_alike(compiled, _job(model_case("batch_normed"), TrainSettings()), 0.0)
    with pytest.raises(UsageError, match="`compile`: sharded layers are not compiled"):
        _job(model_case("small_normed"), TrainSettings(compile=True), width=2, shard="parameters")


@pytest.mark.slow
@needs_a_compiler
def test_compiled_replicas_with_synchronised_statistics_train_as_the_whole_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HARNESS), prepend=os.pathsep)
    case = model_case("small_normed")
    plan = case.plan((2,), MICRO_BATCHES, ROWS, shares=[[3, 1]])
    settings = {"sync_batch_norm": True, "compile": True}
    outcome = run(plan, str(case.file), RunOptions(steps=STEPS, save=tmp_path / "trained", **settings))
    truth = case.truth(case.plan((1,), MICRO_BATCHES, ROWS), STEPS)
    assert outcome.report.notes == ()
    assert outcome.report.loss == pytest.approx(truth.losses, rel=1e-10)
    (file,) = (tmp_path / "trained").glob("model-00001-of-00001-*.safetensors")
    for name, value in load_file(file).items():
        expected = {**truth.parameters, **truth.buffers}[name]
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10, msg=name)
