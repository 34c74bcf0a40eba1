"""What steps were spent on: drawn by hand, and of random plans as simulated and as performed in virtual time."""

from __future__ import annotations

import random

import pytest

from autopar.formats.timeline import CAUSES, compare_paths, critical_path
from autopar.planner import PlanOptions, action_prices, simulate
from autopar.planner.assemble import assemble
from autopar.planner.costs.model import CostModel
from autopar.runtime.rehearsal.steps import rehearse_steps
from drawn import random_candidate
from drawn_timelines import timeline
from random_problems import random_cluster, random_profile


def test_a_step_is_spent_on_what_was_waited_for() -> None:
    # Rank 1 waits for a message that is sent late; the gap before the send is between actions.
    rows = (
        "F0@0 1 3  S0@0>1@1 3.5 4  RG0@0<1@1 4 11  B0@0 11 13  U@0 13 14",
        "R0@1<0@0 0 5  F0@1 5 6  B0@1 6 8  SG0@1>0@0 8 9  U@1 9 10",
    )
    path = critical_path(timeline("measured", *rows))
    # Back: update 1, backward 2, message 8-11, backward 2, forward 1, message 3.5-5, 0.5 between, forward 2, 1 before.
    assert path == {
        "forwards": 3.0,
        "backwards": 4.0,
        "messages": 4.5,
        "reductions": 0.0,
        "updates": 1.0,
        "between actions": 1.5,
    }


def test_a_reduction_waits_for_the_last_rank() -> None:
    rows = ("B0@0 0 2  A@0 1 7  U@0 7 8", "B0@0 0 5  A@0 4 7  U@0 7 8")
    path = critical_path(timeline("simulated", *rows))
    assert (path["backwards"], path["reductions"], path["updates"]) == (5.0, 2.0, 1.0)


def test_what_timelines_are_not_of_lies_between_actions() -> None:
    one, other = timeline("measured", "F0@0 1 3"), timeline("simulated", "F0@0 0 1.5")
    causes = {each.cause: (each.measured_s, each.predicted_s) for each in compare_paths(one, other, 4.0, 2.0)}
    assert causes["forwards"] == (2.0, 1.5)
    assert causes["between actions"] == (2.0, 0.5)
    assert [sum(column) for column in zip(*causes.values(), strict=True)] == [4.0, 2.0]


@pytest.mark.parametrize("seed", range(40))
def test_the_parts_add_up_and_are_as_simulated(seed: int) -> None:
    rng = random.Random(seed)
    profile, cluster = random_profile(seed, most_layers=8, batches=(2, 4, 6)), random_cluster(seed, 4)
    costs = CostModel(profile, cluster, PlanOptions(gpus=4))
    try:
        planned = assemble(costs, random_candidate(rng, costs), PlanOptions(), 0.0, (), ())
    except ValueError:
        pytest.skip("more in flight than the stage before has")
    inputs = planned, profile, cluster
    simulated = simulate(*inputs)
    performed = rehearse_steps(planned, profile, action_prices(*inputs), threads=True, timeout_s=30.0).timeline
    for each in (simulated, performed):
        path = critical_path(each)
        assert set(path) == set(CAUSES)
        assert min(path.values()) >= 0.0
        assert sum(path.values()) == pytest.approx(each.end_s, rel=1e-9)
    causes = compare_paths(performed, simulated, performed.end_s, simulated.end_s)
    assert sum(each.measured_s - each.predicted_s for each in causes) == pytest.approx(0.0, abs=1e-12)
