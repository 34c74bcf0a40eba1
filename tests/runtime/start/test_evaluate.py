"""Evaluating and predicting with a plan's stages gives what the plain model gives in evaluation mode."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import plain
from autopar.capture.batch import model_arguments, named_tensors
from autopar.capture.evaluation import EvaluationGraph, capture_evaluation, capture_prediction
from autopar.capture.export import capture
from autopar.capture.graph import LayerGraph
from autopar.capture.source import UserModel, load
from autopar.errors import UsageError
from autopar.formats.plan import Plan
from autopar.runtime.messages.transport import Transport
from autopar.runtime.start.evaluate import Evaluation, rounds
from autopar.runtime.start.job import Job
from dictated import dictate
from in_teams import in_teams
from paths import MODELS
from threads import act_in_threads, own

CPU = torch.device("cpu")


class Case(NamedTuple):
    user: UserModel
    module: nn.Module
    graph: LayerGraph
    loss: EvaluationGraph
    outputs: EvaluationGraph


@cache
def case(name: str) -> Case:
    return case_of(MODELS / f"{name}.py")


def case_of(file: Path) -> Case:
    user = load(str(file))
    module = user.build(0)
    graph = capture(user, module)
    batch = user.load_batch(user.dataset(), range(2))
    cut = (module, batch, user.loss, graph)
    return Case(user, module, graph, capture_evaluation(*cut), capture_prediction(*cut))


def found_by_ranks(
    known: Case, plan: Plan, batch: object, rows: int, steps: int
) -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train, evaluate and predict; return the loss, rank 0's predictions and the state of first replicas."""
    parts: dict[int, tuple[float, float]] = {}
    predicted: dict[str, torch.Tensor] = {}
    state: dict[str, torch.Tensor] = {}
    values = named_tensors(batch)

    def act(job: Job, transport: Transport) -> None:
        for step in range(steps):
            job.step(step)
        loss = Evaluation(job, own(known.loss), transport, CPU)
        outputs = Evaluation(job, own(known.outputs), transport, CPU)
        parts[job.rank] = loss.loss(0, rows, values)
        found = outputs.predict(0, rows, values)
        assert (found is None) == (job.rank > 0)
        predicted.update(found or {})
        # Training goes on as before.
        job.step(steps)
        parts[job.rank] = loss.loss(0, rows, values)
        predicted.update(outputs.predict(0, rows, values) or {})
        job.finish()
        whole = {name: job.whole(name) for name in job.state()}
        if job.replica == 0:
            state.update(whole)

    held = {**dict(known.module.named_parameters()), **dict(known.module.named_buffers())}
    act_in_threads(plan, known.graph, known.user, held, act)
    total, count = (sum(each) for each in zip(*parts.values(), strict=True))
    return total / count, predicted, state


def plainly(known: Case, state: dict[str, torch.Tensor], batch: object) -> tuple[float, dict[str, torch.Tensor]]:
    model = plain.load_file(known.user.path).model()
    model.load_state_dict(state, strict=False)
    model.eval()
    assert known.user.loss is not None
    with torch.no_grad():
        positional, named = model_arguments(model, batch, has_loss=True)
        output = model(*positional, **named)
        loss = known.user.loss(output, batch)
    value = float(loss[0] / loss[1]) if isinstance(loss, tuple) else float(loss)
    if isinstance(output, torch.Tensor):
        return value, {"output": output}
    if isinstance(output, tuple):
        return value, {"0": output[0]}
    return value, {"logits": output["logits"], **{f"hidden.{i}": each for i, each in enumerate(output["hidden"])}}


def holds(known: Case, plan: Plan, rows: int) -> None:
    """Hold what ranks find of so many rows against the plain model that has their weights."""
    batch = known.user.load_batch(known.user.dataset(), range(40, 40 + rows))
    loss, predicted, state = found_by_ranks(known, plan, batch, rows, steps=2)
    expected, outputs = plainly(known, state, batch)
    assert loss == pytest.approx(expected, rel=1e-12)
    assert predicted.keys() == outputs.keys()
    for key, output in outputs.items():
        torch.testing.assert_close(predicted[key], output, rtol=1e-12, atol=1e-12)


@pytest.mark.some(5)
@pytest.mark.parametrize("name", ["otherwise", "everything", "otherwise_listed"])
@pytest.mark.parametrize(
    ("widths", "options", "rows"),
    [
        ((1, 1, 1), {"schedule": "gpipe"}, 12),
        ((2, 3, 1), {}, 33),
        ((3, 1, 2), {"turns": [0]}, 15),
        ((1, 2), {"turns": [1], "cuts": [4]}, 5),
        ((2, 1), {"schedule": "interleaved", "chunks": 2}, 24),
    ],
)
def test_batches_of_any_size_on_any_plan_give_the_plain_models_loss_and_outputs(
    name: str, widths: tuple[int, ...], options: dict[str, Any], rows: int
) -> None:
    known = case(name)
    # Of 12 samples in a mini-batch, 6 in a micro-batch: batch normalisation needs two in a share.
    holds(known, dictate(known.graph, known.user, widths, 2, 6, **options), rows)


@pytest.fixture(scope="module")
def without_dropout(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Give models whose ranks never wait for each other to draw, as threads do."""
    folder = tmp_path_factory.mktemp("models")

    @cache
    def made(name: str) -> Case:
        text = (MODELS / f"{name}.py").read_text().replace("nn.Dropout(", "nn.Threshold(-1e9, ")
        (folder / f"{name}.py").write_text(text)
        return case_of(folder / f"{name}.py")

    return made


@pytest.mark.some(5)
@pytest.mark.parametrize("name", ["otherwise", "everything", "narrow_gpt"])
@pytest.mark.parametrize(
    ("widths", "sizes", "rows"),
    [((1,), (4,), 1), ((1, 1), (2, 2), 12), ((1, 1), (2, 4), 7), ((2, 1), (2, 1), 33), ((1, 2), (1, 2), 15)],
)
def test_teams_evaluate_batches_of_any_size_once(
    name: str, widths: tuple[int, ...], sizes: tuple[int, ...], rows: int, without_dropout: Callable[[str], Case]
) -> None:
    known = without_dropout(name)
    plan = in_teams(known.graph, dictate(known.graph, known.user, widths, 2, 6), sizes)
    assert any(stage.cuts for stage in plan.stages)
    holds(known, plan, rows)


def test_rounds_are_the_plans_and_what_is_left() -> None:
    known = case("otherwise")
    plan = dictate(known.graph, known.user, [3, 1], 2, 4)
    assert rounds(plan, 31) == [(2, 4)] * 3 + [(1, 4), (1, 3)]
    assert rounds(plan, 8) == [(2, 4)]
    with pytest.raises(UsageError, match=r"leaves 2 samples .* the 3 replicas of stage 0 cannot split; .* of 4"):
        rounds(plan, 10)
