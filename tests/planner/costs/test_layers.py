"""Times of layers at any number of rows, and their sums against one layer after the other."""

import random

import numpy as np
import pytest

from autopar.hardware.topology import Place
from autopar.ownership import SCATTERING, SHARDS
from autopar.planner import PlanOptions
from autopar.planner.costs.layers import LayerCosts, Levels, Site, Span, at_rows, share_limits
from autopar.planner.costs.model import CostModel
from random_problems import gpt_profile, random_cluster, random_profile


def test_costs_follow_lines_between_measured_bytes_and_sets_grow_in_order() -> None:
    sizes, values = (2, 4, 8), (3.0, 4.2, 7.0)
    slope, start = np.polyfit(sizes, values, 1)
    assert at_rows(sizes, values, 1) == pytest.approx(slope + start)
    assert at_rows(sizes, values, 20) == pytest.approx(20 * slope + start)
    assert at_rows(sizes, values, 4) == 4.2
    assert at_rows(sizes, values, 6) == pytest.approx(5.6)
    assert at_rows((8, 16), (1.0, 9.0), 1) == 0.0
    assert at_rows((4,), (2.0,), 1) == 0.5
    layers = list(gpt_profile(blocks=4).layers)
    for at, (least, most) in {1: (2, None), 2: (1, 4), 4: (2, None)}.items():
        layers[at] = layers[at].model_copy(update={"least_samples": least, "most_samples": most})
    limits = share_limits(gpt_profile(blocks=4).model_copy(update={"layers": tuple(layers)}))
    assert [limit.layers for limit in limits] == [(1, 4), (2,)]
    for shares in ((1, 1), (2, 3), (4, 4), (4, 5), (1, 4)):
        assert [limit.admits(shares) for limit in limits] == [min(shares) >= 2, max(shares) <= 4]
    for seed in range(40):
        profile = random_profile(seed)
        costs = LayerCosts(profile.layers)
        for at, layer in enumerate(profile.layers):
            for rows in range(layer.costs[0].micro_batch, layer.costs[-1].micro_batch + 1):
                for name, size in costs.saved_at(at, rows).items():
                    per_row = next(each.bytes for each in layer.costs[0].saved if each.storage == name)
                    assert size == per_row // layer.costs[0].micro_batch * rows, f"seed {seed}: {name}"
                assert costs.bytes_at(at, "output_bytes", rows) == 1000 * rows
    for seed in range(100):
        rng = random.Random(seed)
        order = rng.sample(range(8), rng.randint(0, 8))
        first, stop = sorted(rng.sample(range(9), 2))
        own = [layer for layer in order if first <= layer < stop]
        low, high = rng.randint(0, 9), rng.choice([None, rng.randint(0, 9)])
        most = len(own) if high is None else min(high, len(own))
        expected = [tuple(sorted(own[:count])) for count in range(min(low, most), most + 1)]
        found = Span(Levels(order), low, high).within(first, stop)
        assert ([*found], found[-1]) == (expected, expected[-1]), f"seed {seed}"


def test_sums_over_layers_are_those_of_single_layers_with_what_recomputing_and_communicating_add() -> None:
    """A CPU's ranks gather and scatter between their computations, so that seconds add up."""
    for seed in range(30):
        rng = random.Random(seed)
        costs = CostModel(random_profile(seed), random_cluster(seed, 4), PlanOptions(gpus=4))
        rows, adding, ranks = rng.randint(1, 9), rng.random(), rng.randint(2, 4)
        again = frozenset(layer for layer in range(costs.layer_count) if rng.random() < 0.5)
        kinds = ("all_gather", "reduce_scatter")
        gathers, scatters = (costs.sums.collectives_s(kind, Place(ranks)) for kind in kinds)
        for shard in SHARDS:
            site = Site(shard, Place(ranks))
            forward = costs.sums.forward(rows, site)
            backward = costs.sums.backward(rows, adding, site, again)
            for at, layer in enumerate(costs.profile.layers):
                sizes = [cost.micro_batch for cost in layer.costs]
                there_s = at_rows(sizes, [cost.forward_s for cost in layer.costs], rows)
                back_s = at_rows(sizes, [cost.backward_s for cost in layer.costs], rows)
                back_s += (there_s if at in again else 0.0) + adding * layer.accumulate_s / ranks
                gathered_s = gathers[at] if shard == "parameters" else 0.0
                back_s += gathered_s + (scatters[at] if shard in SCATTERING else 0.0)
                assert forward[at + 1] - forward[at] == pytest.approx(there_s + gathered_s, abs=1e-12), f"seed {seed}"
                assert backward[at + 1] - backward[at] == pytest.approx(back_s, abs=1e-12), f"seed {seed}"
