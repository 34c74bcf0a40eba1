"""Order: the one sequence in which a graph's nodes become layers, and what a graph tells of them.

Graphs are networkx's. A node has the bytes of its output as ``size``, 0 if it says nothing; an edge has as ``at`` where
it stands in its file.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from itertools import chain
from typing import TypeVar

import networkx as nx

_Node = TypeVar("_Node", bound=Hashable)


def topological(graph: nx.DiGraph[_Node]) -> list[_Node]:
    """Return the nodes so that every edge points forward, and cuts between them are cheap.

    Of the nodes that may come next, the one is taken after which the outputs that are still to be read are smallest;
    a node that reads nothing, only if there is no other; of equals, the least by name, since profilers number nodes as
    a model runs them. Cuts behind each then cross few bytes, and branches that run side by side are cut where they are
    narrow. Nodes on a cycle, and those behind one, are left out.

    >>> graph = nx.DiGraph([("node2", "node10"), ("node2", "node9")])
    >>> nx.set_node_attributes(graph, 8, "size")
    >>> topological(graph)
    ['node2', 'node9', 'node10']
    """
    sizes, waiting, unread = graph.nodes(data="size", default=0), dict(graph.in_degree), dict(graph.out_degree)
    ranks = {node: rank for rank, node in enumerate(sorted(graph, key=natural))}

    def preference(node: _Node) -> tuple[bool, int, int]:
        """Return first whether a node reads nothing, then how much more is to be read once it is placed."""
        if not graph.pred[node]:
            return True, 0, ranks[node]
        read = sum(sizes[maker] for maker in graph.pred[node] if unread[maker] == 1)
        return False, (sizes[node] if graph.succ[node] else 0) - read, ranks[node]

    order: list[_Node] = []
    ready = [node for node, count in waiting.items() if not count]
    while ready:
        order.append(min(ready, key=preference))
        ready.remove(order[-1])
        for maker in graph.pred[order[-1]]:
            unread[maker] -= 1
        for reader in graph.succ[order[-1]]:
            waiting[reader] -= 1
            if not waiting[reader]:
                ready.append(reader)
    return order


def natural(name: object) -> tuple[tuple[int, int, str], ...]:
    """Return a key by which names sort as people count: numbers in them by value, before letters.

    >>> sorted(["node10", "node9", "7"], key=natural)
    ['7', 'node9', 'node10']
    """
    parts = re.findall(r"[0-9]+|[^0-9]+", str(name))
    return tuple((0, int(part), part) if part[0] in "0123456789" else (1, 0, part) for part in parts)


def cycle(graph: nx.DiGraph[_Node]) -> list[tuple[_Node, _Node]]:
    """Return edges that form a cycle, each leading to the next; none without one.

    The last of them in the file comes first: it is the one that closes the cycle for whoever reads them in order.

    >>> graph = nx.DiGraph()
    >>> graph.add_edges_from((one, two, {"at": at}) for at, (one, two) in enumerate([(0, 1), (1, 2), (2, 1), (2, 3)]))
    >>> cycle(graph)
    [(2, 1), (1, 2)]
    """
    # From a reader back to what it reads: all that is left reads something that is left, so no way ends but in a cycle.
    back = graph.subgraph(set(graph).difference(topological(graph))).reverse()
    if not back:
        return []
    found = [(source, target) for target, source in nx.find_cycle(back, next(iter(back)))][::-1]
    last = max(range(len(found)), key=lambda place: graph.edges[found[place]]["at"])
    return [*found[last:], *found[:last]]


def dependent(graph: nx.DiGraph[_Node], nodes: Iterable[_Node]) -> set[_Node]:
    """Return some nodes, and all that read of what they make; over the outputs of others no gradient flows back.

    >>> sorted(dependent(nx.DiGraph([(0, 1), (1, 2), (3, 2)]), [1]))
    [1, 2]
    """
    return set(chain.from_iterable(nx.bfs_layers(graph, nodes)))
