"""Cycles of imported graphs: of any graph a cycle, and found as soon where much stands behind one."""

import random
from itertools import pairwise

import networkx as nx

from autopar.interop.order import cycle, natural, topological


def test_cycles_are_found_and_the_next_node_leaves_the_least_to_be_read() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        count = rng.randint(1, 8)
        edges = [(rng.randrange(count), rng.randrange(count)) for _ in range(rng.randint(0, 14))]
        graph = nx.DiGraph()
        graph.add_edges_from((one, two, {"at": at}) for at, (one, two) in enumerate(edges))
        found = cycle(graph)
        left = set(edges)
        while kept := {(one, other) for one, other in left if any(edge[1] == one for edge in left)}:
            if kept == left:
                break
            left = kept
        assert bool(found) == bool(kept), seed
        assert all(one[1] == other[0] for one, other in pairwise([*found, *found[:1]])), seed
        assert found[:1] == sorted(found, key=lambda edge: graph.edges[edge]["at"])[-1:], seed
    # To look from every node for itself would take a hundred million steps.
    count = 15_000
    edges = [*[(at, at + 1) for at in range(2, count)][::-1], (0, 1), (1, 2), (2, 0)]
    graph = nx.DiGraph()
    graph.add_edges_from((one, two, {"at": at}) for at, (one, two) in enumerate(edges))
    assert set(cycle(graph)) == {(0, 1), (1, 2), (2, 0)}
    for seed in range(40):
        rng = random.Random(seed)
        names, sizes = [f"node{each}" for each in rng.sample(range(5, 15), 8)], rng.choices(range(1, 5), k=8)
        edges = [(one, two) for two in range(8) for one in range(two) if rng.random() < 0.3]
        graph = nx.DiGraph()
        graph.add_nodes_from((name, {"size": size}) for name, size in zip(names, sizes, strict=True))
        graph.add_edges_from((names[one], names[two]) for one, two in edges)
        order = [names.index(name) for name in topological(graph)]
        for at, chosen in enumerate(order):
            keys: dict[int, tuple[object, ...]] = {}
            for node in order[at:]:
                placed, makers = {*order[:at], node}, [one for one, two in edges if two == node]
                unread = {one for one, two in edges if one in placed and two not in placed}
                if placed.issuperset(makers):
                    keys[node] = not makers, sum(sizes[one] for one in unread) if makers else 0, natural(names[node])
            assert chosen == min(keys, key=keys.__getitem__), seed
