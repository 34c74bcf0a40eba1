"""Which names of a layer are split, for a number of parts.

A candidate ends inside the layer: every operator that reads it keeps it or sums over it. It is one name, or two where
neither is long enough: of 2 key and value heads with 2 queries each, four ranks have a pair each, and two of them the
same keys. Candidates that leave a part with the fewest numbers of parameters are taken first, then those for which the
fewest numbers are summed among parts, then the first ones in the graph. One is left out if another saves nearly as much
and sums much less: few heads of keys can be split by their width, but then all scores are summed. No operator is in two
regions: a part that had the first halves of two names would know nothing of the first half of one with the second of
the other.

It takes pairs of names times operators; a block has about ten times a hundred.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import permutations
from math import gcd, prod

import torch
from torch import fx

from autopar.capture.split.analysis import Analysis
from autopar.capture.split.cuts import AttributeCut, Split, cuts_of, make_part, split_dim
from autopar.capture.split.names import MismatchError, Name, leaves, resolve, size
from autopar.capture.split.rules import find_rule

__all__ = ["Split", "choose"]

NEARLY = 0.75
"""Of the numbers of parameters that a split saves, which it is not worth to sum twice as many numbers for."""


def choose(
    analysis: Analysis,
    count: int,
    recorded: Mapping[str, AttributeCut] | None = None,
    forbidden: Collection[str] = (),
) -> tuple[Split, ...]:
    """Choose what is split among a number of parts; of the same layer, always the same.

    Args:
        analysis: of the layer.
        count: of parts.
        recorded: cuts of an earlier choice, which this one repeats.
        forbidden: attributes of parameters that stay whole.

    Raises:
        MismatchError: a parameter cannot be cut as it was recorded.
    """
    found = [split for split in _candidates(analysis, count) if not _cuts_any(analysis, split, forbidden)]
    if recorded is not None:
        found = [split for split in found if cuts_of(analysis, [split]).items() <= recorded.items()]
    else:
        found = [split for split in found if not any(_is_much_cheaper(other, split) for other in found)]
    # Sorting keeps the order of the graph among equals.
    found.sort(key=lambda split: (-split.numbers_saved, split.numbers_summed))
    chosen: list[Split] = []
    for split in found:
        if not any(split.region & other.region for other in chosen):
            chosen.append(split)
    if recorded is not None:
        _check_repeated(cuts_of(analysis, chosen), recorded, count)
    return tuple(chosen)


def _is_much_cheaper(one: Split, other: Split) -> bool:
    """Tell whether a split saves nearly as much as another of the same operators, and sums half of it at most."""
    nearly = one.numbers_saved >= NEARLY * other.numbers_saved
    return nearly and 2 * one.numbers_summed <= other.numbers_summed and not one.region.isdisjoint(other.region)


def _candidates(analysis: Analysis, count: int) -> Iterator[Split]:
    for names, counts in _ways(analysis, count):
        try:
            yield _split(analysis, names, counts)
        except MismatchError:
            continue


def _cuts_any(analysis: Analysis, split: Split, attributes: Collection[str]) -> bool:
    """Tell whether one of some parameters would be cut."""
    part = split.part(0)
    dims = (analysis.parameters[each] for each in attributes if each in analysis.parameters)
    return any(split_dim(each, part) is not None for each in dims)


def _check_repeated(cuts: Mapping[str, AttributeCut], recorded: Mapping[str, AttributeCut], count: int) -> None:
    for attribute, cut in recorded.items():
        if cuts.get(attribute) != cut:
            raise MismatchError(f"parameter {attribute} cannot be cut in {count} parts as it was recorded")


def _ways(analysis: Analysis, count: int) -> Iterator[tuple[tuple[Name, ...], tuple[int, ...]]]:
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
    part = make_part(names, counts, 0)
    for node in region:
        rule = find_rule(node.target)
        if rule is not None and rule.local is not None:
            rule.local(analysis.calls[node], part)
    saved = _numbers_saved(analysis, names, counts)
    return Split(names, counts, region, saved, _numbers_summed(analysis, names[0], region))


def _numbers_saved(analysis: Analysis, names: tuple[Name, ...], counts: tuple[int, ...]) -> float:
    parts = [make_part(names, counts, index) for index in range(prod(counts))]
    saved = 0.0
    for dims in dict.fromkeys(analysis.parameters.values()):
        if split_dim(dims, parts[0]) is not None:
            lengths = sum(prod(map(part.length, dims)) for part in parts)
            saved += prod(map(size, dims)) - lengths / len(parts)
    return saved


def _numbers_summed(analysis: Analysis, name: Name, region: frozenset[fx.Node]) -> int:
    """Return how many numbers the operators give, for a sample, that sum over a name."""
    shapes = (_value(node).shape for node in region if analysis.sums(node, name))
    return sum(prod(length for length in shape if isinstance(length, int)) for shape in shapes)


def _value(node: fx.Node) -> torch.Tensor:
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value
