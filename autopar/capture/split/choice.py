"""Which names of a layer are split, for a number of parts; what that makes of its parameters, or why none is.

    splits = choose(analysis, 2)
    cuts_of(analysis, splits)["up_weight"]    # AttributeCut(dim=0, parts=(((0, 4), (8, 12)), ((4, 8), (12, 16))))
    explain(analysis, 3)                      # "does not split in 3 parts; 2, 4, 8 would"

A candidate ends inside the layer: every operator that reads it keeps it or sums over it. It is one name, or two where
neither is long enough: of 2 key and value heads with 2 queries each, four ranks have a pair each, and two of them the
same keys. Candidates that leave a part with the fewest numbers of parameters are taken first, then those for which the
fewest numbers are summed among parts, then the first ones in the graph. One is left out if another saves nearly as much
and sums much less: few heads of keys can be split by their width, but then all scores are summed. No operator is in two
regions: a part that had the first halves of two names would know nothing of the first half of one with the second of
the other. It takes pairs of names times operators; a block has about ten times a hundred.

Cuts are plain numbers that a plan can keep. Of a fused matrix of queries, keys and values a part has a range of each.
Where there are fewer key heads than parts, several parts have the same ranges.

A layer splits in a number of parts if they divide nearly as many numbers of its parameters as any other number does.
Two matrices split in any number, but a block only in one that its heads allow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from math import gcd, prod
from typing import NamedTuple

import torch
from torch import fx

from autopar.capture.model.effects import Storages
from autopar.capture.split.analysis import Analysis, writing_nodes
from autopar.capture.split.names import MismatchError, Name, leaves, resolve, size
from autopar.capture.split.rules import Axis, Dims, Part, Ranges, local_call


class AttributeCut(NamedTuple):
    """How a parameter is divided among the parts of a layer."""

    dim: int
    parts: tuple[Ranges, ...]
    """By part, its indices along that dimension."""

    def indices(self, part: int) -> torch.Tensor:
        """Return the indices that a part has, in ascending order; takes their number."""
        return torch.cat([torch.arange(start, stop) for start, stop in self.parts[part]])


@dataclass(frozen=True, eq=False)
class Split:
    """Names that are split together, with the operators that are computed in parts."""

    names: tuple[Name, ...]
    parts: tuple[Part, ...]
    """What every rank has: all pairs of parts of the names, those of the last name running fastest."""
    region: frozenset[fx.Node]
    numbers_saved: float
    """How many numbers of parameters a part has less than the whole."""
    numbers_summed: int
    """How many are summed among parts, for a sample."""


def split_dim(dims: Dims, part: Part) -> int | None:
    """Return which dimension of a tensor is cut, if one is."""
    return next((place for place, dim in enumerate(dims) if part.splits(dim)), None)


def cuts_of(analysis: Analysis, splits: Iterable[Split]) -> dict[str, AttributeCut]:
    """Return how parameters are divided, by attribute; those that are whole on every part are left out.

    It takes the parameters' lengths times the number of parts.
    """
    found: dict[str, AttributeCut] = {}
    for split in splits:
        for attribute, dims in analysis.parameters.items():
            at = split_dim(dims, split.parts[0])
            if at is not None:
                found[attribute] = AttributeCut(at, tuple(part.ranges(dims[at]) for part in split.parts))
    return found


NEARLY = 0.75
"""A split that saves this share of what another saves is preferred to it, if it sums half as many numbers."""


def choose(
    analysis: Analysis,
    count: int,
    earlier_cuts: Mapping[str, AttributeCut] | None = None,
    forbidden: Collection[str] = (),
) -> tuple[Split, ...]:
    """Choose what is split among a number of parts; of the same layer, always the same.

    Args:
        analysis: of the layer.
        count: of parts.
        earlier_cuts: cuts of an earlier choice, which this one repeats.
        forbidden: attributes of parameters that stay whole.

    Raises:
        MismatchError: a parameter cannot be cut as it was recorded.
    """
    recorded = None if earlier_cuts is None else frozenset(earlier_cuts.items())
    key = count, recorded, frozenset(forbidden)
    if key not in analysis.choices:
        analysis.choices[key] = _choose(analysis, count, earlier_cuts, forbidden)
    chosen: tuple[Split, ...] = analysis.choices[key]
    return chosen


def _choose(
    analysis: Analysis, count: int, earlier_cuts: Mapping[str, AttributeCut] | None, forbidden: Collection[str]
) -> tuple[Split, ...]:
    found = [split for split in _candidates(analysis, count) if not _cuts_any(analysis, split, forbidden)]
    if earlier_cuts is not None:
        found = [split for split in found if cuts_of(analysis, [split]).items() <= earlier_cuts.items()]
    else:
        found = [split for split in found if not any(_is_much_cheaper(other, split) for other in found)]
    # Sorting keeps the order of the graph among equals.
    found.sort(key=lambda split: (-split.numbers_saved, split.numbers_summed))
    chosen: list[Split] = []
    for split in found:
        if not any(split.region & other.region for other in chosen):
            chosen.append(split)
    repeated = cuts_of(analysis, chosen) if earlier_cuts else {}
    for attribute, cut in (earlier_cuts or {}).items():
        if repeated.get(attribute) != cut:
            raise MismatchError(f"parameter {attribute} cannot be cut in {count} parts as it was recorded")
    return tuple(chosen)


def _is_much_cheaper(one: Split, other: Split) -> bool:
    """Tell whether a split saves nearly as much as another of the same operators, and sums half of it at most."""
    nearly = one.numbers_saved >= NEARLY * other.numbers_saved
    return nearly and 2 * one.numbers_summed <= other.numbers_summed and not one.region.isdisjoint(other.region)


def _candidates(analysis: Analysis, count: int) -> Iterator[Split]:
    for names, counts in _names_and_counts(analysis, count):
        try:
            yield _split(analysis, names, counts)
        except MismatchError:
            continue


def _cuts_any(analysis: Analysis, split: Split, attributes: Collection[str]) -> bool:
    """Tell whether one of some parameters would be cut."""
    part = split.parts[0]
    dims = (analysis.parameters[each] for each in attributes if each in analysis.parameters)
    return any(split_dim(each, part) is not None for each in dims)


def _names_and_counts(analysis: Analysis, count: int) -> Iterator[tuple[tuple[Name, ...], tuple[int, ...]]]:
    """Yield names, and in how many parts each would be split: single ones first."""
    names = analysis.candidates()
    for name in names:
        if name.size % count == 0 or (name.size > count and _may_be_uneven(analysis, name)):
            yield (name,), (count,)
    for first, second in permutations(names, 2):
        outer = gcd(first.size, count)
        if 1 < outer < count and second.size % (count // outer) == 0:
            yield (first, second), (outer, count // outer)


def _may_be_uneven(analysis: Analysis, name: Name) -> bool:
    """Tell whether a name is all of every dimension that it is in, so that parts differ by one index at most."""
    every = (dim for outputs in analysis.dims.values() for dims in outputs for dim in dims if name in leaves(dim))
    return all(resolve(dim) == (name,) for dim in every)


def _split(analysis: Analysis, names: tuple[Name, ...], counts: tuple[int, ...]) -> Split:
    """Return what splitting names means.

    Raises:
        MismatchError: they cannot be split so.
    """
    region = analysis.region(names)
    parts = tuple(Part(tuple(map(Axis, names, indices, counts))) for indices in product(*map(range, counts)))
    for node in region:
        if node in analysis.calls:
            local_call(analysis.calls[node], parts[0])
    summed = sum(numbers(node) for node in region if analysis.sums(node, names[0]))
    return Split(names, parts, region, _numbers_saved(analysis, parts), summed)


def _numbers_saved(analysis: Analysis, parts: Sequence[Part]) -> float:
    saved = 0.0
    for dims in dict.fromkeys(analysis.parameters.values()):
        if split_dim(dims, parts[0]) is not None:
            lengths = sum(prod(map(part.length, dims)) for part in parts)
            saved += prod(map(size, dims)) - lengths / len(parts)
    return saved


def numbers(node: fx.Node) -> int:
    """Return how many numbers a node gives for a sample."""
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return prod(length for length in value.shape if isinstance(length, int))


_NEARLY_ALL = 0.9
"""A layer splits in a number of parts that divides this share of what the best number of parts divides."""


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
    saved = {count: sum(split.numbers_saved for split in choose(analysis, count)) for count in range(2, most + 1)}
    # How many numbers parts would have saved as much of, had they divided those and no others.
    numbers = {count: each / (1 - 1 / count) for count, each in saved.items()}
    best = max(numbers.values(), default=0)
    return tuple(count for count, found in numbers.items() if best and found >= _NEARLY_ALL * best)


def _obstacle(analysis: Analysis) -> str:
    """Return what keeps most numbers of parameters whole."""
    if not analysis.parameters:
        return "it has no parameters"
    found = written_tensor(analysis.module)
    if found is not None:
        return f"it writes into {found}"
    votes: Counter[str] = Counter()
    for dims in dict.fromkeys(analysis.parameters.values()):
        names = (name for dim in dims for name in leaves(dim))
        reasons = (name.obstacle or "it is not there in every operator that reads it" for name in names)
        votes.update(dict.fromkeys(reasons, prod(map(size, dims))))
    return "; ".join(reason for reason, _ in votes.most_common(3)) or "its parameters are single numbers"


def written_tensor(module: fx.GraphModule) -> str | None:
    """Return the name of a tensor that a graph writes into: a buffer's or input's, if it is one."""
    nodes, writing = list(module.graph.nodes), writing_nodes(module)
    if not writing:
        return None
    storages = Storages(nodes)
    roots = {storages.root(source) for node in writing for source in node.all_input_nodes[:1]}
    named = [node for node in nodes if node.op in ("get_attr", "placeholder") and storages.root(node) in roots]
    return str(named[0].target) if named else f"tensors that are read again ({writing[0].target})"
