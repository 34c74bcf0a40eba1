"""Predicted peaks of ranks that run several stages, against a rehearsal of their programs on fake tensors."""

from __future__ import annotations

import pytest

from autopar.capture import LayerGraph, load
from autopar.capture.source import UserModel
from autopar.formats.profile import Profile
from autopar.hardware.clusters import cluster_named
from autopar.hardware.gpus import find
from autopar.planner import PlanOptions, plan
from autopar.profiler.estimate import estimate
from autopar.profiler.subject import ProfileOptions, prepare
from autopar.runtime.rehearsal.memory import rehearse
from paths import EXAMPLES

Model = tuple[UserModel, LayerGraph, Profile]


@pytest.fixture(scope="module")
def perceptron() -> Model:
    options = ProfileOptions(batch=512)
    user = load(str(EXAMPLES / "mlp.py"))
    subject = prepare(user, options)
    return user, subject.graph, estimate(subject, find("A100"), options)


@pytest.mark.parametrize(
    ("stages", "micro_batches"),
    [("0-1,2-3,4-5,6-10", 8), ("0-1:2,2-3,4-5:2,6-10", 4), ("0,1,2-3,4-5,6-7,8-10", 8), ("0-1,2-3,4-5,6-10", 2)],
)
def test_a_rank_holds_what_was_predicted_of_all_its_stages(perceptron: Model, stages: str, micro_batches: int) -> None:
    user, graph, profile = perceptron
    options = PlanOptions(schedule="interleaved", chunks=2, stages=stages, micro_batches=micro_batches)
    made = plan(profile, cluster_named("4xA100-80G"), options)
    # Messages, counted with some to spare, are a large part of so small a model.
    assert list(made.predicted.peak_bytes) == pytest.approx(rehearse(made, graph, user), rel=0.12)
