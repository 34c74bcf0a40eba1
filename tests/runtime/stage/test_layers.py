"""Layers train under autocast as the plain loop does there, compiled or not, within what the precision resolves."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import plain
from any_plan import truth_of
from autopar.capture.export import capture
from autopar.capture.source import load
from autopar.errors import UsageError
from autopar.formats.plan import Plan, Shard, chunks_of, layout_of
from autopar.ranks.pool import RankPool
from autopar.runtime.messages.transport import Exchange, InProcessTransport
from autopar.runtime.settings import TrainSettings
from autopar.runtime.start.job import Job
from autopar.runtime.start.launch import RunOptions, run
from autopar.schedules import SCHEDULES
from autopar.schedules.expand import expand
from dictated import dictate
from paths import MODELS
from sharded_cases import Case, make_case
from threads import train_in_threads

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
STEPS = 2
GENTLE = """

def loss(output, batch):
    return base.loss(output, batch) / 64


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
"""
"""Scaled gradients of float16 stay finite, and parameters change in proportion to them."""


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """The models, in float32."""
    folder, found = tmp_path_factory.mktemp("models"), {}
    for name in ("narrow_gpt", "narrow_resnet"):
        text = (MODELS / f"{name}.py").read_text().replace("torch.float64", "torch.float32")
        found[name] = make_case(folder / f"{name}.py", text + GENTLE)
    return found


def initial(case: Case) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers that a model begins with."""
    module = case.model.build(0)
    return {name: each.detach() for name, each in [*module.named_parameters(), *module.named_buffers()]}


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


def errors(plan: Plan, truth: plain.Trained, begun: Mapping[str, torch.Tensor], folder: Path) -> tuple[float, float]:
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
    state, plan = initial(case), lowered(plan, case, precision)
    train_in_threads(plan, case.graph, case.model, state, folder, steps)
    return max(errors(plan, truth_of(case.file, case.graph, plan, steps), state, folder))


@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["narrow_gpt", "narrow_resnet"])
def test_stages_without_replicas_round_as_the_plain_loop_rounds(
    name: str, schedule: str, precision: str, single: dict[str, Case], tmp_path: Path
) -> None:
    case, chunks = single[name], chunks_of(layout_of(schedule)) or 2
    recompute = {layer.name for layer in case.graph.layers[::2]}
    plan = dictate(case.graph, case.model, (1, 1), 3, 4, schedule, recompute=recompute, chunks=chunks)
    # Only sums of float32 gradients may be taken in other orders.
    assert found_in_threads(case, plan, precision, tmp_path, STEPS) <= 1e-6


@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["narrow_gpt", "narrow_resnet"])
def test_replicas_train_as_the_plain_loop_within_the_precision(
    name: str, schedule: str, precision: str, single: dict[str, Case], tmp_path: Path
) -> None:
    case, chunks = single[name], chunks_of(layout_of(schedule)) or 2
    plan = dictate(case.graph, case.model, (2, 1), 2, 12, schedule, chunks=chunks)
    # Each replica rounds the gradients of its share; what is off of one step, a ReLU at zero magnifies in the next.
    assert found_in_threads(case, plan, precision, tmp_path, 1) <= torch.finfo(TYPES[precision]).eps


@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize(
    ("level", "schedule", "chunks"), [("optimizer", "1f1b", 1), ("gradients", "zb-h1", 1), ("parameters", "zb-v", 2)]
)
def test_sharded_replicas_train_as_the_plain_loop_within_the_precision(
    level: Shard, schedule: str, chunks: int, precision: str, single: dict[str, Case], pool: RankPool, tmp_path: Path
) -> None:
    case = single["narrow_gpt"]
    plan = dictate(case.graph, case.model, (2, 1), 2, 12, schedule, recompute=True, chunks=chunks, shard=level)
    plan = lowered(plan, case, precision)
    arguments = {"plan": plan.dumps(), "model": str(case.file), "workspace": str(case.workspace)}
    pool.run("rank_jobs:train_and_keep", {**arguments, "folder": str(tmp_path), "steps": 1}, ranks=3)
    found = errors(plan, truth_of(case.file, case.graph, plan, 1), initial(case), tmp_path)
    assert max(found) <= torch.finfo(TYPES[precision]).eps


MICRO_BATCHES, ROWS, STEPS = 2, 4, 3
# What torch's compiler warns of is none of ours.
pytestmark = pytest.mark.filterwarnings("ignore")
needs_a_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU"
)


def _job(file: Path, settings: TrainSettings, precision: str = "fp64", width: int = 1, **wanted: Any) -> Job:  # noqa: ANN401
    """Return the job of a stage's first rank."""
    model = load(str(file))
    module = model.build(0)
    state = {key: value.detach() for key, value in module.state_dict().items()}
    graph = capture(model, module)
    plan = dictate(graph, model, (width,), MICRO_BATCHES, ROWS, **wanted)
    plan = plan.model_copy(update={"precision": precision})
    place = InProcessTransport(Exchange(), 0), torch.device("cpu"), lambda step, position: None
    return Job(
        plan, expand(plan), 0, graph, model, lambda names: {n: state[n].clone() for n in names}, *place, settings
    )


def _assert_alike(one: Job, other: Job, tolerance: float) -> None:
    for step in range(STEPS):
        assert one.step(step).loss == pytest.approx(other.step(step).loss, rel=tolerance)
    expected = other.state()
    for name, value in one.state().items():
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance, msg=name)


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
    file = MODELS / f"{name}.py"
    if precision != "fp64":
        file = tmp_path / file.name
        file.write_text((MODELS / file.name).read_text().replace("torch.float64", "torch.float32"))
    plainly = _job(file, TrainSettings(**settings), precision, recompute=recompute)  # type: ignore[arg-type]
    compiled = _job(file, TrainSettings(**settings, compile=True), precision, recompute=recompute)  # type: ignore[arg-type]
    before = {key: value.clone() for key, value in compiled.state().items()}
    assert compiled.warm_up() == []
    assert all(torch.equal(value, before[key]) for key, value in compiled.state().items())
    _assert_alike(compiled, plainly, tolerance)


def _counting(made: list[object], fails: Callable[[int], bool]) -> Callable[..., object]:
    """Stand in for ``torch.compile``: what it returns runs as it is, or fails in its first run."""

    def stand_in(module: torch.nn.Module, **options: object) -> object:
        made.append(module)
        index = len(made)

        def run(*arguments: object) -> object:
            if fails(index):
                raise RuntimeError("no code for it\nand more")
            return module(*arguments)

        return run

    return stand_in


def test_layers_of_a_kind_share_their_code(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(torch, "compile", _counting(made, lambda index: False))
    compiled = _job(MODELS / "dropout.py", TrainSettings(compile=True))
    layers = [layer for stage in compiled.stages.values() for layer in stage.layers]
    assert len(made) == len({layer.fingerprint for layer in layers}) < len(layers)
    assert compiled.warm_up() == []
    _assert_alike(compiled, _job(MODELS / "dropout.py", TrainSettings()), 0.0)


def test_a_layer_that_does_not_compile_is_named_and_run_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(torch, "compile", _counting(made, lambda index: index == 2))
    compiled = _job(MODELS / "batch_normed.py", TrainSettings(compile=True))
    assert compiled.warm_up() == ["layer 1 is not compiled: RuntimeError: no code for it"]
    _assert_alike(compiled, _job(MODELS / "batch_normed.py", TrainSettings()), 0.0)


def test_halves_of_backwards_are_not_compiled() -> None:
    with pytest.raises(UsageError, match=r"`compile`: the program \(schedule zb-v\) runs backwards in halves"):
        _job(MODELS / "small_normed.py", TrainSettings(compile=True), schedule="zb-v", chunks=2)


def test_sharded_layers_are_not_compiled() -> None:
    with pytest.raises(UsageError, match="`compile`: sharded layers are not compiled"):
        _job(MODELS / "small_normed.py", TrainSettings(compile=True), width=2, shard="parameters")


@pytest.mark.slow
@needs_a_compiler
def test_compiled_replicas_with_synchronised_statistics_train_as_the_whole_model(tmp_path: Path) -> None:
    file = MODELS / "small_normed.py"
    model = load(str(file))
    plan = dictate(capture(model, model.build(0)), model, (2,), MICRO_BATCHES, ROWS, shares=[[3, 1]])
    settings = TrainSettings(sync_batch_norm=True, compile=True)
    outcome = run(plan, str(file), RunOptions(steps=STEPS, save=tmp_path / "trained", settings=settings))
    truth = plain.train(file, MICRO_BATCHES, ROWS, lambda name: (ROWS,), steps=STEPS)
    assert outcome.report.notes == ()
    assert outcome.report.loss == pytest.approx(truth.losses, rel=1e-10)
    (file,) = (tmp_path / "trained").glob("model-00001-of-00001-*.safetensors")
    for name, value in load_file(file).items():
        expected = {**truth.parameters, **truth.buffers}[name]
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10, msg=name)
