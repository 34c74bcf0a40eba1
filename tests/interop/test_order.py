"""The order of layers: every edge forward, cuts cheap, always the same."""

from __future__ import annotations

import random

import pytest

from autopar.interop.order import cycle, topological


@pytest.mark.parametrize("seed", range(30))
def test_every_edge_points_forward_whatever_the_nodes_order_in_the_file(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 12)
    edges = [(a, b) for a in range(count) for b in range(a + 1, count) if rng.random() < 0.3]
    sizes = [rng.randint(0, 9) for _ in range(count)]
    names = [f"node{index}" for index in range(count)]
    order = topological(names, sizes, edges)
    assert sorted(order) == list(range(count))
    assert all(order.index(a) < order.index(b) for a, b in edges)
    shuffled = rng.sample(range(count), count)
    place = {old: new for new, old in enumerate(shuffled)}
    again = topological(
        [names[old] for old in shuffled],
        [sizes[old] for old in shuffled],
        rng.sample([(place[a], place[b]) for a, b in edges], len(edges)),
    )
    assert [shuffled[new] for new in again] == order


def test_the_branch_that_frees_what_it_reads_comes_first() -> None:
    names = ["node1", "node2", "node3", "node4", "node5"]
    wide, narrow = [(0, 1), (0, 2), (1, 3), (2, 4), (3, 4)], [8, 6, 1, 6, 1]
    # node2 would hold 8 + 6, node3 only 8 + 1.
    assert topological(names, narrow, wide) == [0, 2, 1, 3, 4]


def test_what_reads_nothing_waits_until_it_is_needed() -> None:
    # The mask, node1, is read by the last layer alone.
    assert topological(["node2", "node1", "node3", "node4"], [5, 1, 5, 5], [(0, 2), (2, 3), (1, 3)]) == [1, 0, 2, 3]
    assert topological(["node2", "node9", "node3", "node4"], [5, 1, 5, 5], [(0, 2), (2, 3), (1, 3)]) == [0, 2, 1, 3]


@pytest.mark.parametrize("seed", range(20))
def test_the_edges_of_a_cycle_lead_back_to_where_they_began(seed: int) -> None:
    rng = random.Random(seed)
    edges = list({(rng.randrange(8), rng.randrange(8)) for _ in range(9)})
    closed = [edges[position] for position in cycle(8, edges)]
    assert bool(closed) == (len(topological([""] * 8, [0] * 8, edges)) < 8)
    for (_, target), (source, _) in zip(closed, closed[1:] + closed[:1], strict=True):
        assert target == source
