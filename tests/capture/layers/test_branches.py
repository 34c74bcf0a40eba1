"""Joins of independent branches belong to the layer that reads them, and train what the plain loop trains."""

import random
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.capture.graph import LayerGraph
from autopar.capture.layers.evaluation import capture_evaluation
from autopar.capture.layers.export import capture_module
from autopar.capture.model.batch import named_tensors
from capture_zoo import Made, linear, mean_square
from paths import MODELS
from suite.tiers import evenly
from training_cases import Case, check, text_case


def towers(seed: int) -> Case:
    return text_case("towers", (MODELS / "towers.py").read_text().replace("SEED, WIDTH = 0,", f"SEED, WIDTH = {seed},"))


def needed(graph: LayerGraph, layer: str) -> set[str]:
    """Return the layers on which one depends."""
    made = {tensor.producer for tensor in graph.tensors if layer in tensor.consumers and tensor.producer is not None}
    return made.union(*(needed(graph, each) for each in made))


def check_apart(case: Case) -> None:
    """Check that no layer of a tower needs another tower's, but by joins that stay where they are."""
    model = case.model.build()
    if {"in place", "dropout"}.intersection(model.kinds[: len(model.towers) - 1]):
        return
    for name in model.towers:
        own = [each.name for each in case.graph.layers if each.name.startswith(f"towers.{name}")]
        assert {each.rsplit(".", 2)[0] for layer in own for each in needed(case.graph, layer)} <= {f"towers.{name}"}


SEEDS, CORE = range(60), 8


def test_the_cores_towers_are_joined_in_every_way() -> None:
    made = runpy.run_path(str(MODELS / "towers.py"))
    models = [made["Towers"](random.Random(seed)) for seed in evenly(len(SEEDS), CORE)]
    assert {kind for model in models for kind in model.kinds[: len(model.towers) - 1]} >= set(made["JOINS"])


@pytest.mark.some(CORE)
@pytest.mark.parametrize("seed", SEEDS)
def test_towers_need_nothing_of_each_other_and_train_as_the_plain_loop(seed: int, tmp_path: Path) -> None:
    draw, case = random.Random(seed), towers(seed)
    check_apart(case)
    layers = len(case.graph.layers)
    count = draw.randint(2, min(4, layers))
    cuts = sorted(draw.sample(range(1, layers), count - 1))
    widths = [draw.choice((1, 1, 2)) for _ in range(count)]
    plan = case.plan(widths, draw.randint(1, 3), 4, draw.choice(("1f1b", "gpipe")), cuts=cuts, recompute=seed % 3 == 0)
    losses = case.train(plan, tmp_path, 2)
    check(plan, case.truth(plan, 2), tmp_path, losses)
    model, samples = case.model.build(), case.model.load_batch(case.model.dataset(), range(5))
    graph = capture_evaluation(model, samples, case.model.loss, case.graph)
    known = named_tensors(samples)
    for layer in graph.layers:
        known.update(zip(layer.outputs, layer.module(5, *(known[name] for name in layer.inputs)), strict=True))
    assert float(known["loss"].detach()) == pytest.approx(case.evaluate(case.state, range(5))[0], rel=1e-12)


def layers(call, count: int = 3, **modules: nn.Module) -> dict[str, tuple[str, ...]]:  # noqa: ANN001
    """Return the layers of a model of three linear modules and others, with what each reads that others make."""
    branches = {name: linear() for name in "abc"[:count]}
    model = Made(call, **branches, **modules, head=linear()).double()
    batch = (torch.randn(4, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64))
    graph = capture_module(model, batch, mean_square)
    return {each.name: tuple(name for name in each.inputs if ":" in name) for each in graph.layers}


def test_a_join_goes_behind_branches_that_do_not_read_it() -> None:
    found = layers(lambda m, x: m.head((m.a(x) + m.b(x)) * m.c(x)))
    assert found == {"a": (), "b": (), "c": (), "head": ("a:linear", "b:linear_1", "c:linear_2")}
    found = layers(lambda m, x: m.head(m.c(torch.cat((m.a(x), m.b(x)), 1).unflatten(1, (2, 8)).sum(1))))
    assert found == {"a": (), "b": (), "c": ("a:linear", "b:linear_1"), "head": ("c:linear_2",)}


def test_a_module_that_multiplies_nothing_and_begins_with_a_join_is_joined_to_what_follows() -> None:
    found = layers(lambda m, x: m.head(m.norm(m.a(x) + m.b(x))), count=2, norm=nn.LayerNorm(8))
    assert found == {"a": (), "b": (), "norm+head": ("a:linear", "b:linear_1")}


@pytest.mark.parametrize(
    "call",
    [
        # The second needs the first: a residual connection, a skip.
        lambda m, x: m.head((one := m.a(x)) + m.b(one)),
        lambda m, x: m.head((one := m.a(x).tanh()) * m.b(one).relu()),
        # Random numbers are those of the call before.
        lambda m, x: m.head(F.dropout(m.a(x) + m.b(x), 0.1)),
        # What is written in place is in one layer.
        lambda m, x: m.head((m.a(x) + m.b(x)).add_(1)),
        # The loss is no call.
        lambda m, x: m.a(x) + m.b(x) + 0 * x[:, :1],
    ],
)
def test_other_operators_belong_to_the_call_before(call) -> None:  # noqa: ANN001
    found = layers(call, count=2)
    assert len(found["b"]) == 1
