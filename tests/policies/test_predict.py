"""XPipe's constants: what they are, how often they are what is counted, and what programs make of them."""

from __future__ import annotations

import math
from fractions import Fraction

from autopar.planner.candidate import Candidate, CandidateStage
from autopar.planner.simulator.simulate import skeleton
from autopar.policies import POLICIES, stage_depths
from autopar.policies.predict import updates_ahead
from autopar.schedules.continuing import repetition
from autopar.schedules.one_forward_one_backward import warmups


def test_xpipes_constants_are_halves_rounded_up_and_seldom_what_is_counted() -> None:
    agreeing, places = [0, 0], 0
    for stages in range(2, 9):
        for micro_batches in range(1, 9):
            depths = warmups(stages, 1, stages)["PA"]
            counted = stage_depths(POLICIES["predict"], depths, micro_batches)
            given = stage_depths(POLICIES["predict"], depths, micro_batches, ahead="xpipe")
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
    # The docstring of autopar.policies.predict says so.
    assert [f"{100 * each / places:.0f}" for each in agreeing] == ["34", "5"]


def test_what_backwards_see_is_made_behind_every_update_where_it_is_not_the_newest() -> None:
    stages = tuple(CandidateStage(at, at + 1, (at,), (1,), depth) for at, depth in enumerate((3, 2, 1)))
    plan = skeleton(Candidate(2, 1, "1f1b", stages), (), ()).model_copy(update={"weight_policy": "predict"})
    for ahead, made in (("counted", [["P"], ["P"], []]), ("xpipe", [["C", "P"], ["C", "P"], ["C", "P"]])):
        asked = plan.model_copy(update={"ahead": ahead})
        kinds = [[each.kind for each in repetition(asked, stage)] for stage in range(3)]
        assert [sorted(set(each) & {"P", "C"}) for each in kinds] == made
        assert all(each[each.index("U") + 1] == "C" for each in kinds if "C" in each)
