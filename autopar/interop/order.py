"""Order: the one sequence in which a graph's nodes become layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

Edge = tuple[int, int]
"""From a node to another, by index."""


def topological(names: Sequence[str], sizes: Sequence[int], edges: Iterable[Edge]) -> list[int]:
    """Return the nodes' indices so that every edge points forward, and cuts between them are cheap.

    Of the nodes that may come next, the one is taken after which the outputs that are still to be read are smallest;
    a node that reads nothing, only if there is no other; of equals, the least by name, since profilers number nodes as
    a model runs them. Cuts behind each then cross few bytes, and branches that run side by side are cut where they are
    narrow. Nodes on a cycle, and those behind one, are left out.

    >>> topological(["node10", "node9", "node2"], [8, 8, 8], [(2, 0), (2, 1)])
    [2, 1, 0]
    """
    graph = _RemainingGraph(names, sizes, edges)
    order: list[int] = []
    while graph.ready:
        order.append(graph.take())
    return order


class _RemainingGraph:
    """What is left of a graph while its nodes are put in order."""

    def __init__(self, names: Sequence[str], sizes: Sequence[int], edges: Iterable[Edge]) -> None:
        self._producers: list[list[int]] = [[] for _ in names]
        self._readers: list[list[int]] = [[] for _ in names]
        for source, target in sorted(set(edges)):
            self._readers[source].append(target)
            self._producers[target].append(source)
        self._sizes = sizes
        self._rank = [0] * len(names)
        for rank, index in enumerate(sorted(range(len(names)), key=lambda each: (natural(names[each]), each))):
            self._rank[index] = rank
        self._waiting = [len(made) for made in self._producers]
        self._unread = [len(readers) for readers in self._readers]
        self.ready = [index for index, waiting in enumerate(self._waiting) if not waiting]

    def take(self) -> int:
        """Remove the best of the nodes that may come next."""
        best = min(self.ready, key=self._order)
        self.ready.remove(best)
        for maker in self._producers[best]:
            self._unread[maker] -= 1
        for reader in self._readers[best]:
            self._waiting[reader] -= 1
            if not self._waiting[reader]:
                self.ready.append(reader)
        return best

    def _order(self, index: int) -> tuple[bool, int, int]:
        reads = bool(self._producers[index])
        return (not reads, self._size_increase(index) if reads else 0, self._rank[index])

    def _size_increase(self, index: int) -> int:
        """Return how much more is still to be read once a node is placed."""
        freed = sum(self._sizes[maker] for maker in self._producers[index] if self._unread[maker] == 1)
        return (self._sizes[index] if self._readers[index] else 0) - freed


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a key by which names sort as people count: numbers in them by value, before letters.

    >>> sorted(["node10", "node9", "7"], key=natural)
    ['7', 'node9', 'node10']
    """
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return tuple((0, int(part), part) if part[0] in "0123456789" else (1, 0, part) for part in parts)


def cycle(count: int, edges: Sequence[Edge]) -> list[int]:
    """Return positions, in ``edges``, of edges that form a cycle, each leading to the next; none without one.

    The last of them in ``edges`` comes first: it is the one that closes the cycle for whoever reads them in order.

    >>> cycle(4, [(0, 1), (1, 2), (2, 1), (2, 3)])
    [2, 1]
    """
    ordered = set(topological([""] * count, [0] * count, edges))
    if len(ordered) == count:
        return []
    import networkx as nx

    # From a reader back to what it reads: all that is left reads something that is left, so no way ends but in a cycle.
    back = nx.DiGraph()
    for position, (source, target) in enumerate(edges):
        if source not in ordered and target not in ordered:
            back.add_edge(target, source, position=position)
    found = [back.edges[edge]["position"] for edge in nx.find_cycle(back, next(iter(back)))][::-1]
    last = found.index(max(found))
    return [*found[last:], *found[:last]]
