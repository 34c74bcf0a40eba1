"""Evaluating and predicting with a plan's stages gives what the plain model gives in evaluation mode."""

from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.capture.layers.evaluation import EvaluationGraph, capture_evaluation, capture_prediction
from autopar.capture.model.batch import named_tensors
from autopar.errors import UsageError
from autopar.formats.plan import Plan
from autopar.runtime.job import Job
from autopar.runtime.messages.transport import Transport
from autopar.runtime.start.evaluate import Evaluation, rounds
from drawn_models import model_case
from in_teams import in_teams
from paths import MODELS
from threads import act_in_threads, own
from training_cases import Case, make_case

GRAPHS: dict[str, tuple[EvaluationGraph, EvaluationGraph]] = {}
"""Of the loss and of outputs, by the text of a model."""


def holds(case: Case, plan: Plan, rows: int) -> None:
    """Train, evaluate and predict so many rows with ranks, and hold it against the plain model with their weights."""
    parts: dict[int, tuple[float, float]] = {}
    predicted: dict[str, torch.Tensor] = {}
    state: dict[str, torch.Tensor] = {}
    text, samples, data = case.file.read_text(), range(40, 40 + rows), case.model.dataset()
    values = named_tensors(case.model.load_batch(data, samples))
    if text not in GRAPHS:
        cut = (case.model.build(0), case.model.load_batch(data, range(2)), case.model.loss, case.graph)
        GRAPHS[text] = capture_evaluation(*cut), capture_prediction(*cut)

    def act(job: Job, transport: Transport) -> None:
        loss, outputs = (Evaluation(job, own(each), transport, torch.device("cpu")) for each in GRAPHS[text])
        for step in range(3):
            # Training goes on as before behind an evaluation.
            job.step(step)
            if step:
                (parts[job.rank],), found = loss.loss(0, rows, values), outputs.predict(0, rows, values)
                assert (found is None) == (job.rank > 0)
                predicted.update(found or {})
        job.finish()
        whole = {name: job.whole(name) for name in job.state()}
        if job.own.replica == 0:
            state.update(whole)

    act_in_threads(plan, case.graph, case.model, case.state, act)
    total, count = (sum(each) for each in zip(*parts.values(), strict=True))
    expected, outputs = case.evaluate(state, samples)
    assert total / count == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(predicted, outputs, rtol=1e-12, atol=1e-12)


@pytest.mark.some(3)
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
    # Of 12 samples in a mini-batch, 6 in a micro-batch: batch normalisation needs two in a share.
    holds(model_case(name), model_case(name).plan(widths, 2, 6, **options), rows)


@pytest.mark.some(2)
@pytest.mark.parametrize("name", ["otherwise", "everything", "narrow_gpt"])
@pytest.mark.parametrize(
    ("widths", "sizes", "rows"),
    [((1,), (4,), 1), ((1, 1), (2, 2), 12), ((1, 1), (2, 4), 7), ((2, 1), (2, 1), 33), ((1, 2), (1, 2), 15)],
)
def test_teams_evaluate_batches_of_any_size_once(
    name: str, widths: tuple[int, ...], sizes: tuple[int, ...], rows: int, tmp_path: Path
) -> None:
    # Without dropout: threads wait for each other to draw.
    text = (MODELS / f"{name}.py").read_text().replace("nn.Dropout(", "nn.Threshold(-1e9, ")
    case = make_case(tmp_path / f"{name}.py", text)
    plan = in_teams(case.graph, case.plan(widths, 2, 6), sizes)
    assert any(stage.cuts for stage in plan.stages)
    holds(case, plan, rows)


def test_rounds_are_the_plans_and_what_is_left() -> None:
    plan = model_case("otherwise").plan([3, 1], 2, 4)
    assert rounds(plan, 31) == [(2, 4)] * 3 + [(1, 4), (1, 3)]
    assert rounds(plan, 8) == [(2, 4)]
    with pytest.raises(UsageError, match=r"leaves 2 samples .* the 3 replicas of stage 0 cannot split; .* of 4"):
        rounds(plan, 10)
