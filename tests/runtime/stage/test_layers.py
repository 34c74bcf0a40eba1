"""Every schedule trains under autocast as the plain loop does under autocast, within what the precision resolves."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import plain
from any_plan import truth_of
from autopar.formats.plan import Plan, Shard, chunks_of, layout_of
from autopar.ranks.pool import RankPool
from autopar.schedules import SCHEDULES
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
