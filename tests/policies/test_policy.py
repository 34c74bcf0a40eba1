"""Weight policies: programs and replicas in turn see their rules' versions; papers' formulas and XPipe's constants."""

import math
import random
from collections.abc import Iterator
from fractions import Fraction
from itertools import permutations
from typing import get_args

import pytest

from autopar.depths import StageDepths, updates_ahead
from autopar.formats.plan import Plan, WeightPolicy
from autopar.formats.program import BACKWARD, BEGIN_SUM, FORWARD, UPDATE, Action
from autopar.ownership import Share
from autopar.planner.candidate import Candidate, CandidateStage
from autopar.planner.simulator.simulate import skeleton
from autopar.policies import POLICIES, rate_factor
from autopar.policies.policy import Computed
from autopar.schedules.one_forward_one_backward import warmups
from autopar.schedules.repetition import Repetition
from oracles.unflushed import RULES, SAME_BACKWARD, Question


def computed(plan: Plan, own: Share) -> Iterator[Computed]:
    """Yield what a rank computes in a repetition."""
    return plan.policy.repetition(own, plan.depths[own.stage], plan.span, ())


def test_plans_and_rules_know_the_same_policies_and_xpipes_constants_are_seldom_what_is_counted() -> None:
    assert set(get_args(WeightPolicy)) == set(POLICIES) == {"sync", "wsp", *RULES}
    agreeing, places = [0, 0], 0
    for stages in range(2, 9):
        for micro_batches in range(1, 9):
            depths = warmups(stages, 1, stages)["PA"]
            counted = POLICIES["predict"].stage_depths(depths, micro_batches)
            given = POLICIES["predict"].stage_depths(depths, micro_batches, ahead="xpipe")
            for stage in range(stages):
                exact = (
                    (stages + micro_batches - Fraction(stage, 2) - 2) / micro_batches,
                    Fraction(micro_batches + stage // 2 - 1, micro_batches),
                )
                own, other = updates_ahead(given[stage]), updates_ahead(counted[stage])
                assert own == tuple(math.floor(each + Fraction(1, 2)) for each in exact)
                assert other == (math.ceil((depths[stage] - 1) / micro_batches), 0)
                assert POLICIES["predict"].buffers(given[stage]) == sum(each > 0 for each in own)
                agreeing = [sum_ + (one == two) for sum_, one, two in zip(agreeing, own, other, strict=True)]
                places += 1
    # The docstring of autopar.policies.Predict says so.
    assert [f"{100 * each / places:.0f}" for each in agreeing] == ["34", "5"]
    assert [rate_factor(4.0, step, 4) for step in (0, 2, 4, 9)] == [0.25, 0.5, 1.0, 1.0]
    assert rate_factor(0.5, 0, 4) == 1.0


@pytest.mark.some(12)
@pytest.mark.parametrize("policy", SAME_BACKWARD)
@pytest.mark.parametrize("seed", range(20))
def test_every_forward_and_backward_sees_the_rules_version(seed: int, policy: str) -> None:
    draw = random.Random(seed)
    depths = sorted((draw.randint(1, 6) for _ in range(draw.randint(1, 4))), reverse=True)
    micro_batches = max(draw.randint(1, 5), POLICIES[policy].least_micro_batches(depths[0]))
    stages = tuple(CandidateStage(at, at + 1, (at,), (1,), depth) for at, depth in enumerate(depths))
    plan = skeleton(Candidate(micro_batches, 1, "1f1b", stages), (), ())
    plan = plan.model_copy(update={"weight_policy": policy})
    rule = RULES[policy](depths, micro_batches)
    for stage in range(len(depths)):
        updates, most, seen = 0, 0, {}
        for number in range(-plan.lead, 12):
            here = Repetition(number, micro_batches, 12)
            for kind, _, micro_batch, distance in computed(plan, plan.ownership.holders(stage)[0]):
                step, index = here.place(micro_batch) if kind != UPDATE else (number, 0)
                if not 0 <= step < 12 or kind == BEGIN_SUM:
                    continue
                if kind == UPDATE:
                    updates += 1
                    continue
                version = max(0, updates - distance)
                most = max(most, updates - version)
                assert version == rule(Question(step, index, stage))
                if kind == FORWARD:
                    seen[step, index] = version
                else:
                    assert kind == BACKWARD
                    assert seen.pop((step, index)) == version
        assert (updates, seen) == (12, {})
        assert most + 1 == POLICIES[policy].kept_versions(plan.depths[stage])


@pytest.mark.some(10)
@pytest.mark.parametrize("seed", range(30))
def test_replicas_in_turn_see_the_rules_version(seed: int) -> None:
    draw = random.Random(seed)
    stages, first = [], 0
    for at in range(draw.randint(1, 3)):
        width, turning = draw.randint(1, 4), draw.random() < 0.7
        devices, division = tuple(range(first, first + width)), "round-robin" if turning else "split"
        shares = (1.0,) * width if turning else (1 / width,) * width
        stages.append(CandidateStage(at, at + 1, devices, shares, draw.randint(1, 4), division=division))  # type: ignore[arg-type]
        first += width
    plan = skeleton(Candidate(1, 1, "1f1b", tuple(stages)), (), ()).model_copy(update={"weight_policy": "stash"})
    start, stop = draw.randint(0, 3), draw.randint(8, 20)
    for own in plan.ownership.ranks:
        index, placed = own.stage, stages[own.stage]
        updates, met, seen = 0, set(), {}
        for number in range(start - plan.lead, stop, plan.span):
            here = Repetition(number, 1, stop, start, plan.span)
            for kind, _, micro_batch, distance in computed(plan, own):
                action = Action(kind, index, micro_batch, version=distance)
                if not here.has(action) or kind == BEGIN_SUM:
                    continue
                step, count = here.step_of(action), (here.step_of(action) - start) // placed.period
                if kind == UPDATE:
                    assert updates == count
                    met |= set(here.mini_batches_of(action, placed.period))
                    updates += 1
                    continue
                assert (step - start) % placed.period == own.replica % placed.period, own
                version = max(0, updates - distance)
                assert version == max(0, count - placed.warmup + 1)
                assert kind == FORWARD or seen.pop(step) == version
                if kind == FORWARD:
                    seen[step] = version
        assert (met, seen) == (set(range(start, stop)), {})


def test_backwards_see_what_is_made_for_them_and_updates_wait_for_shared_parameters() -> None:
    """By counting what a stage does: forwards run ``depth`` micro-batches ahead of backwards."""
    stages = tuple(CandidateStage(at, at + 1, (at,), (1,), depth) for at, depth in enumerate((3, 2, 1)))
    plan = skeleton(Candidate(2, 1, "1f1b", stages), (), ()).model_copy(update={"weight_policy": "predict"})
    for ahead, made in (("counted", [["P"], ["P"], []]), ("xpipe", [["C", "P"], ["C", "P"], ["C", "P"]])):
        asked = plan.model_copy(update={"ahead": ahead})
        kinds = [[kind for kind, *_ in computed(asked, own)] for own in asked.ownership.ranks]
        assert [sorted(set(each) & {"P", "C"}) for each in kinds] == made
        assert all(each[each.index("U") + 1] == "C" for each in kinds if "C" in each)
    for shared in permutations(([0, 3], [1, 3], [2, 3])):
        lags = {name: [each.lag for each in POLICIES[name].stage_depths((7, 5, 3, 1), 7, shared)] for name in RULES}
        assert lags["stash"] == lags["predict"] == [0, 0, 0, 3]
        assert lags["2bw"] == [each.lag for each in POLICIES["2bw"].stage_depths((7, 5, 3, 1), 7)]
    assert [StageDepths(3, 3, 4, lag).gradients for lag in (0, 1, 4, 5)] == [1, 2, 2, 3]
    for depth, micro_batches in ((each, count) for count in range(2, 7) for each in range(1, count + 2)):
        lag = POLICIES["2bw"].lag(StageDepths(depth, depth, micro_batches))
        last_backward, next_but_one = micro_batches - 1, 2 * micro_batches
        # The forward of micro-batch m comes behind the backward of m - depth.
        assert 0 <= lag <= max(0, next_but_one - depth - last_backward)
