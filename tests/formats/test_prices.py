"""ActionPrices: every action of a program has one, that of the simulator's own durations."""

from __future__ import annotations

import random

import pytest

from autopar.formats.prices import price_key
from autopar.formats.program import REDUCE, SENDS, Action
from autopar.planner import PlanOptions
from autopar.planner.assemble import action_prices, assemble
from autopar.planner.costs.model import CostModel, durations
from autopar.schedules.expand import expand
from drawn import random_candidate
from random_problems import random_cluster, random_profile


def test_actions_that_differ_in_their_micro_batch_have_one_price() -> None:
    texts = ["F0@0", "F1@0", "F0@1", "S0@0>1@1", "S1@0>1@1", "S0@0>2@1", "S0@0>1@2", "T0@0", "T1@0", "A@0", "U@0"]
    keys = [price_key(Action.parse(text)) for text in texts]
    assert len(set(keys)) == 9
    assert keys[0] == keys[1]
    assert keys[3] == keys[4]


@pytest.mark.parametrize("seed", range(20))
def test_prices_are_the_durations_of_the_rank_that_acts(seed: int) -> None:
    rng = random.Random(seed)
    profile, cluster = random_profile(seed, batches=(2, 4)), random_cluster(seed, 4)
    costs = CostModel(profile, cluster, PlanOptions(gpus=4))
    candidate = random_candidate(rng, costs)
    try:
        plan = assemble(costs, candidate, PlanOptions(), 0.0, (), ())
    except ValueError:
        pytest.skip("more in flight than the stage before has")
    times, prices = durations(costs, candidate), action_prices(plan, profile, cluster)
    columns = {"F": times.forward_s, "B": times.backward_s, "U": times.update_s, REDUCE: times.reduce_s}
    for rank, (actions, own) in enumerate(zip(expand(plan).ranks, prices.ranks, strict=True)):
        for action in actions:
            seconds = own.seconds.get(price_key(action))
            if action.kind in columns:
                assert seconds == columns[action.kind][rank]
            elif action.kind in SENDS:
                assert seconds == times.message_s[rank, action.peer]
    assert prices.overhead_s == times.overhead_s
