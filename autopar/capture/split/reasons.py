"""Why a layer does not split in a number of parts, and in which it would.

    explain(analysis, 3)     # "does not split in 3 parts; 2, 4, 8 would"

A layer splits in a number of parts if they divide nearly as many numbers of its parameters as any other number does.
Two matrices split in any number, but a block only in one that its heads allow.
"""

from __future__ import annotations

from collections import Counter
from math import prod

from torch import fx

from autopar.capture.effects import Storages
from autopar.capture.split.analysis import Analysis
from autopar.capture.split.choice import choose
from autopar.capture.split.names import leaves, size

NEARLY = 0.9
"""Of the numbers of parameters that the best number of parts divides."""


def explain(analysis: Analysis, count: int, most: int = 8) -> str | None:
    """Say why a layer does not split in a number of parts, to stand behind its name; none if it does.

    Args:
        analysis: of the layer.
        count: of parts.
        most: parts that are tried, to say which would do.
    """
    counts = counts_that_split(analysis, max(most, count))
    if count in counts:
        return None
    if counts:
        return f"does not split in {count} parts; {', '.join(map(str, counts))} would"
    return f"splits in no number of parts: {_obstacle(analysis)}"


def counts_that_split(analysis: Analysis, most: int = 8) -> tuple[int, ...]:
    """Return the numbers of parts that a layer splits in, from 2 to ``most``."""
    numbers = {count: _numbers_divided(analysis, count) for count in range(2, most + 1)}
    best = max(numbers.values(), default=0)
    return tuple(count for count, found in numbers.items() if best and found >= NEARLY * best)


def _numbers_divided(analysis: Analysis, count: int) -> float:
    """Return how many numbers parts would have saved as much of, had they divided those and no others."""
    return sum(split.numbers_saved for split in choose(analysis, count)) / (1 - 1 / count)


def _obstacle(analysis: Analysis) -> str:
    """Return what keeps most numbers of parameters whole."""
    if not analysis.parameters:
        return "it has no parameters"
    found = written_tensor(analysis.module)
    if found is not None:
        return f"it writes into {found}"
    votes: Counter[str] = Counter()
    for dims in dict.fromkeys(analysis.parameters.values()):
        reasons = {
            name.obstacle or "it is not there in every operator that reads it" for d in dims for name in leaves(d)
        }
        votes.update(dict.fromkeys(reasons, prod(map(size, dims))))
    return "; ".join(reason for reason, _ in votes.most_common(3)) or "its parameters are single numbers"


def written_tensor(module: fx.GraphModule) -> str | None:
    """Return the name of a tensor that a graph writes into: a buffer's or input's, if it is one."""
    nodes = list(module.graph.nodes)
    schemas = ((node, getattr(node.target, "_schema", None)) for node in nodes)
    writing = [node for node, schema in schemas if schema is not None and schema.is_mutable]
    if not writing:
        return None
    storages = Storages(nodes)
    roots = {storages.root(source) for node in writing for source in node.all_input_nodes[:1]}
    named = [node for node in nodes if node.op in ("get_attr", "placeholder") and storages.root(node) in roots]
    return str(named[0].target) if named else f"tensors that are read again ({writing[0].target})"
