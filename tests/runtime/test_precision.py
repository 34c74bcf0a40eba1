"""Every schedule trains under autocast as the plain loop does under autocast, within what the precision resolves."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import plain
import pytest
import torch
from any_plan import truth_of
from dictated import dictate
from safetensors.torch import load_file
from threads import train_in_threads

from autopar.capture.export import capture
from autopar.capture.graph import LayerGraph
from autopar.capture.source import UserModel, load
from autopar.formats.layout import chunks_of, layout_of
from autopar.formats.plan import Plan
from autopar.schedules import SCHEDULES

MODELS = Path(__file__).parent / "models"
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
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models' files, in float32."""
    folder, files = tmp_path_factory.mktemp("models"), {}
    for name in ("narrow_gpt", "narrow_resnet"):
        files[name] = folder / f"{name}.py"
        text = (MODELS / f"{name}.py").read_text().replace("torch.float64", "torch.float32")
        files[name].write_text(text + GENTLE)
    return files


@cache
def captured(file: Path) -> tuple[UserModel, LayerGraph, dict[str, torch.Tensor]]:
    model = load(str(file))
    module = model.build(0)
    state = {name: each.detach().clone() for name, each in module.state_dict(keep_vars=True).items()}
    return model, capture(model, module), state


def lowered(plan: Plan, graph: LayerGraph, model: UserModel, precision: str) -> Plan:
    """Give a plan a precision, and its tensors the types that they have in it, as a profile would tell."""
    rows, types = plan.micro_batch_size, dict[str, str]()
    known = {spec.name: torch.zeros(spec.shape(rows), dtype=spec.dtype) for spec in graph.tensors}
    with torch.no_grad(), torch.autocast("cpu", TYPES[precision]):
        for layer in graph.layers:
            outputs = copy.deepcopy(layer.module)(rows, *(known[name] for name in layer.inputs))
            known.update(zip(layer.outputs, outputs, strict=True))
    types = {name: str(value.dtype).removeprefix("torch.") for name, value in known.items()}
    tensors = tuple(each.model_copy(update={"dtype": types[each.name]}) for each in plan.tensors)
    return plan.model_copy(update={"precision": precision, "tensors": tensors})


def errors(plan: Plan, truth: plain.Trained, initial: Mapping[str, torch.Tensor], folder: Path) -> tuple[float, float]:
    """Return how far gradients and changes of parameters are off: the most of any tensor, over the largest's norm."""
    found = [
        (load_file(folder / f"gradients-{rank}"), load_file(folder / f"parameters-{rank}"))
        for rank in range(len(plan.devices))
    ]
    moved = {name: (value - initial[name]).norm() for name, value in truth.parameters.items()}
    largest = max(each.norm() for each in truth.gradients.values()), max(moved.values())
    most = []
    for index, expected in enumerate((truth.gradients, truth.parameters)):
        assert set().union(*(parts[index] for parts in found)) == expected.keys()
        off = [(value - expected[name]).norm() for parts in found for name, value in parts[index].items()]
        most.append(float(max(off) / largest[index]))
    return most[0], most[1]


@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["narrow_gpt", "narrow_resnet"])
def test_stages_without_replicas_round_as_the_plain_loop_rounds(
    name: str, schedule: str, precision: str, single: dict[str, Path], tmp_path: Path
) -> None:
    model, graph, state = captured(single[name])
    chunks = chunks_of(layout_of(schedule)) or 2
    recompute = {layer.name for layer in graph.layers[::2]}
    plan = dictate(graph, model, (1, 1), 3, 4, schedule, recompute=recompute, chunks=chunks)
    plan = lowered(plan, graph, model, precision)
    train_in_threads(plan, graph, model, state, tmp_path, STEPS)
    # Only sums of float32 gradients may be taken in other orders.
    truth = truth_of(single[name], graph, plan, STEPS)
    assert max(errors(plan, truth, state, tmp_path)) <= 1e-6


@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["narrow_gpt", "narrow_resnet"])
def test_replicas_train_as_the_plain_loop_within_the_precision(
    name: str, schedule: str, precision: str, single: dict[str, Path], tmp_path: Path
) -> None:
    model, graph, state = captured(single[name])
    chunks = chunks_of(layout_of(schedule)) or 2
    plan = lowered(dictate(graph, model, (2, 1), 2, 12, schedule, chunks=chunks), graph, model, precision)
    train_in_threads(plan, graph, model, state, tmp_path, 1)
    # Each replica rounds the gradients of its share; what is off of one step, a ReLU at zero magnifies in the next.
    tolerance = torch.finfo(TYPES[precision]).eps
    found = errors(plan, truth_of(single[name], graph, plan, 1), state, tmp_path)
    assert max(found) <= tolerance
