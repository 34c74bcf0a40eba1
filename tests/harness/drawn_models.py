"""Models and plans that are drawn at random, trained in threads beside plain training."""

import tempfile
from functools import cache
from pathlib import Path

import torch
from hypothesis import strategies as st

from any_plan import plans_of
from autopar.capture.graph import LayerGraph
from autopar.capture.model.source import UserModel
from autopar.formats.plan import Plan
from autopar.formats.program import Program
from in_teams import in_teams
from paths import MODELS
from training_cases import Case, check, make_case

STEPS = 2


@cache
def model_case(name: str) -> Case:
    return make_case(MODELS / f"{name}.py")


def captured(name: str) -> tuple[UserModel, LayerGraph, dict[str, torch.Tensor]]:
    case = model_case(name)
    return case.model, case.graph, case.state


def plans(name: str, **limits: int) -> st.SearchStrategy[Plan]:
    """Draw plans of a model, within limits of :func:`any_plan.plans_of`."""
    model, graph, _ = captured(name)
    return plans_of(graph, model, **limits)


@st.composite
def team_plans(draw: st.DrawFn, name: str, most_ranks: int = 8, **limits: int) -> Plan:
    """Draw plans some of whose replicas several ranks run together, of one size for every group of devices."""
    plan = draw(plans(name, most_groups=3, most_ranks=most_ranks // 2, **limits))
    sizes, left = [1] * len(plan.stages), most_ranks - len(plan.devices)
    for chunks in plan.groups:
        replicas = plan.stages[chunks[0]].replicas
        size = draw(st.sampled_from([each for each in (1, 2, 4) if (each - 1) * replicas <= left]))
        left -= (size - 1) * replicas
        for stage in chunks:
            sizes[stage] = size
    return in_teams(captured(name)[1], plan, sizes, sequence=draw(st.booleans()))


def equals_plain(name: str, plan: Plan, program: Program | None = None) -> None:
    case = model_case(name)
    with tempfile.TemporaryDirectory() as folder:
        losses = case.train(plan, Path(folder), STEPS, program=program)
        check(plan, case.truth(plan, STEPS), Path(folder), losses if case.graph.loss == "mean" else None)
