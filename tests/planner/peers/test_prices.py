"""What peers' formulas are given, against the cost model's own answers."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.schedules.route import even_shares
from priced import prices_of


def test_times_are_those_of_the_largest_share() -> None:
    for seed in range(40):
        prices = prices_of(seed, (4,))
        costs = prices.costs
        for replicas in range(1, 5):
            rows = max(even_shares(prices.rows, replicas))
            adding = costs.adding(prices.micro_batches, replicas)
            for stop in range(prices.layer_count + 1):
                assert prices.forward_s(replicas)[stop] == costs.sums.forward(rows)[stop]
                assert prices.backward_s(replicas)[stop] == costs.sums.backward(rows, adding)[stop]


def test_a_cut_costs_a_message_of_all_tensors_that_cross_it_and_nothing_where_none_does() -> None:
    crossed = 0
    for seed in range(60):
        prices = prices_of(seed, (2, 2))
        costs, count = prices.costs, prices.layer_count
        position = {layer.name: index for index, layer in enumerate(costs.profile.layers)}
        for cut in range(1, count):
            over = [
                tensor
                for tensor in costs.profile.tensors
                if tensor.producer is not None
                and position[tensor.producer] < cut
                and max(position[name] for name in tensor.consumers) >= cut
            ]
            for sent, found in ((over, prices.forth_s), ([each for each in over if each.gradient], prices.back_s)):
                size = max(even_shares(prices.rows, 2)) * sum(tensor.bytes_per_sample for tensor in sent)
                expected = costs.links.message_s(size, "network") if sent else 0.0
                assert found("network", 2)[cut] == pytest.approx(expected, rel=1e-12), f"seed {seed}"
                crossed += bool(sent)
        assert prices.forth_s("node")[[0, count]].tolist() == [0.0, 0.0]
    assert crossed > 100


def test_reducing_the_whole_model_takes_what_the_cost_model_says() -> None:
    for seed in range(40):
        prices = prices_of(seed, (3, 3))
        total = prices.weights_bytes[-1]
        assert prices.reduce_rate(1, "node") == 0
        for replicas, level in ((2, "node"), (3, "node"), (6, "network")):
            expected = prices.costs.links.collective_s("all_reduce", int(total), replicas, level)  # type: ignore[arg-type]
            assert prices.reduce_rate(replicas, level) * total == pytest.approx(expected)  # type: ignore[arg-type]


def test_a_layers_size_is_what_it_keeps_and_its_states() -> None:
    prices = prices_of(3, (2,))
    layer = prices.costs.profile.layers[0]
    states = layer.parameters_bytes + layer.gradient_bytes + layer.optimizer_bytes
    kept = sum(prices.costs.layers[0].saved_at(0, prices.rows).values())
    assert prices.layer_bytes[0] == kept + states
    assert np.all(np.array(prices.layer_bytes) >= 0)
    assert len(prices.layer_bytes) == prices.layer_count
