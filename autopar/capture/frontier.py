"""Frontier: where what a backward does for given leaves ends, and what it does for parameters alone begins."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch.autograd.graph import GradientEdge, Node

Edge = tuple[Node, int]
"""An operator of a backward, and which of the gradients that arrive at it."""


class Frontier(NamedTuple):
    """The parameters of an autograd graph, by what leads to them from the operators between its roots and the leaves.

    A parameter belongs to one such operator or root, if nothing else leads to it nor to another parameter by the same
    way; all others are shared. A parameter is where the graph ends.
    """

    deferred: dict[Node, list[GradientEdge]]
    """Operators between roots and leaves, and the parameters that belong to them."""
    outer: list[int]
    """Indices of roots to which parameters belong, and that lead to nothing else."""
    shared: list[GradientEdge]
    reached: bool
    """Whether any leaf can be reached."""


def frontier_of(roots: Sequence[GradientEdge], leaves: Iterable[Node]) -> Frontier:
    """Walk the graph behind some roots, and find where it parts."""
    edges = walk(edge.node for edge in roots)
    inside = _leading(edges, leaves)
    if not inside:
        return Frontier({}, list(range(len(roots))), [], reached=False)
    ways: list[tuple[Node | int, dict[Node, None]]] = [
        (index, _ends(edges, root.node)) for index, root in enumerate(roots) if root.node not in inside
    ]
    for node in edges:
        if node in inside:
            leaving = dict.fromkeys(after for after, _ in edges[node] if after not in inside)
            ways += [(node, _ends(edges, after)) for after in leaving]
    shared = _shared(ways)
    deferred: dict[Node, dict[Node, None]] = defaultdict(dict)
    outer = []
    for source, parameters in ways:
        if not parameters.keys() & shared.keys():
            if isinstance(source, int):
                outer.append(source)
            else:
                deferred[source].update(parameters)
    operators = {node: [GradientEdge(end, 0) for end in ends] for node, ends in deferred.items()}
    return Frontier(operators, outer, [GradientEdge(end, 0) for end in shared], reached=True)


def walk(roots: Iterable[Node]) -> dict[Node, list[Edge]]:
    """Return the edges of every operator behind some."""
    found: dict[Node, list[Edge]] = {}
    ahead = list(roots)
    while ahead:
        node = ahead.pop()
        if node not in found:
            found[node] = [(after, index) for after, index in node.next_functions if after is not None]
            ahead += [after for after, _ in found[node]]
    return found


def _leading(edges: Mapping[Node, list[Edge]], leaves: Iterable[Node]) -> set[Node]:
    """Return the operators from which a leaf can be reached, leaves included."""
    before: dict[Node, list[Node]] = defaultdict(list)
    for node, following in edges.items():
        for after, _ in following:
            before[after].append(node)
    found: set[Node] = set()
    ahead = [leaf for leaf in leaves if leaf in edges]
    while ahead:
        node = ahead.pop()
        if node not in found:
            found.add(node)
            ahead += before[node]
    return found


def _ends(edges: Mapping[Node, list[Edge]], start: Node) -> dict[Node, None]:
    """Return where the graph ends behind an operator, in order."""
    found: dict[Node, None] = {}
    ahead = [start]
    while ahead:
        node = ahead.pop()
        if node not in found:
            found[node] = None
            ahead += [after for after, _ in edges[node]]
    return {node: None for node in found if not edges[node]}


def _shared(ways: Sequence[tuple[Node | int, dict[Node, None]]]) -> dict[Node, None]:
    """Return the parameters to which several sources lead, and all to which ways to those lead as well, in order."""
    sources: dict[Node, set[Node | int]] = defaultdict(set)
    for source, parameters in ways:
        for parameter in parameters:
            sources[parameter].add(source)
    found = dict.fromkeys(parameter for parameter, leading in sources.items() if len(leading) > 1)
    grown = bool(found)
    while grown:
        grown = False
        for _, parameters in ways:
            if parameters.keys() & found.keys() and not parameters.keys() <= found.keys():
                found.update(parameters)
                grown = True
    return found
