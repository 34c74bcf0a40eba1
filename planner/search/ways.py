"""Ways: how a stage may be run and on how many devices; widths that run alike are one way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autopar.formats.plan import turns
from autopar.planner.candidate import Family
from autopar.planner.costs.model import CostModel
from autopar.planner.search.choices import Choice, Fineness
from autopar.planner.share_limits import limits_met

EXACT_LAYERS, FEW_EXACT, MOST_EXACT = 4, 8, 16
"""Of widths, those that so many layers have on average are told apart in any case, within limits."""


class Way(NamedTuple):
    """A choice, and a range of widths that it is made with."""

    kind: int
    number: int
    """Of the choice, among those for the kind of device."""
    choice: Choice
    width: int
    """The least; the plans that the search tries have this many."""
    widths: tuple[int, ...]
    """Those of the range that differ in what a replica does, ascending."""
    variant: int = 0
    """Which of the ways of taking so many devices."""


def ways_of(
    costs: CostModel, family: Family, kind: int, choices: Sequence[Choice], most: int | None = None
) -> list[Way]:
    """Return every way to run a stage on a kind of device, whatever its layers.

    Where not all widths are told apart, but ``most``, a way stands for all whose busiest replicas have as much to do:
    more devices than the fewest of them gain next to nothing. Of more than these, neighbouring ones are taken together.
    """
    count = costs.kind_of.count(kind)
    rows, micro_batches = family.micro_batch_size, family.micro_batches
    found: list[Way] = []
    for number, choice in enumerate(choices):
        asked = choice.widths(micro_batches, rows, costs.divisible)
        widths = range(asked.start, min(asked.stop - 1, count) + 1)
        classes = _classes(costs, family, choice, widths, most)
        found += [Way(kind, number, choice, together[0], together) for together in classes]
    return found


def _classes(
    costs: CostModel, family: Family, choice: Choice, widths: range, most: int | None
) -> list[tuple[int, ...]]:
    division = choice.division
    if most is None:
        return [(width,) for width in widths]
    alike: dict[tuple[float, int, tuple[bool, ...]], list[int]] = {}
    for width in widths:
        rows = family.micro_batch_size / width if costs.divisible else -(-family.micro_batch_size // width)
        busiest = rows if division == "split" else len(turns(division, width, 0, family.micro_batches))
        # One replica makes its first gradients itself; several add to buffers. On more devices less of a shard is held.
        held = width if choice.shard != "none" or width == 1 else 0
        limits = limits_met(costs, costs.shares(family.micro_batch_size, width, division))
        alike.setdefault((busiest, held, limits), []).append(width)
    classes = [(each[0], each[-1], key[2]) for key, each in alike.items()]
    exact = min(MOST_EXACT, max(FEW_EXACT, EXACT_LAYERS * len(costs.devices) // costs.layer_count))
    merged: list[list[int]] = []
    kept: tuple[bool, ...] = ()
    ratio = (widths[-1] / max(1, widths[0])) ** (1 / most) if len(widths) > 0 else 1.0
    for low, high, limits in classes:
        if merged and limits == kept and len(classes) > most and low > exact and high <= merged[-1][0] * ratio:
            merged[-1] += [low, high]
        else:
            merged.append([low, high])
            kept = limits
    return [tuple(sorted(set(each))) for each in merged]


def lengths_of(longest: int, fineness: Fineness | None = None) -> list[int]:
    """Return the numbers of layers of stages that are told apart, ascending from 1; without ``fineness``, all.

    >>> lengths_of(40, Fineness())[20:]
    [21, 22, 23, 24, 27, 31, 35, 40]
    """
    if fineness is None:
        return list(range(1, longest + 1))
    found = list(range(1, min(longest, fineness.lengths) + 1))
    while (after := int(found[-1] * fineness.growth) + 1) <= longest:
        found.append(after)
    return found
