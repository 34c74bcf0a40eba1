"""Dictated: the stages a user writes with ``--stages``, such as ``0-5:2,6-11:1`` or ``wte-h.5:2,h.6-head``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from autopar.errors import UsageError
from autopar.planner.named import position, unknown


class Dictated(NamedTuple):
    """Where the stages end, and how many replicas each has."""

    cuts: tuple[int, ...]
    widths: tuple[int, ...]


def parse(text: str, names: Sequence[str]) -> Dictated:
    """Read stages as layers:replicas; layers are one layer or first-last, by index or name; replicas default to 1.

    A number is an index, even where a layer is named by a number.

    >>> parse("0-1:2,head", ["wte", "h", "head"])
    Dictated(cuts=(2, 3), widths=(2, 1))

    Raises:
        UsageError: a layer is unknown, given twice or left out, or a number of replicas is none.
    """
    expected = 0
    cuts, widths = [], []
    for index, part in enumerate(text.split(",")):
        layers, width = _split(part.strip(), index)
        first, last = _range(layers, names, index)
        if last < first:
            raise UsageError(f"`stages`: stage {index} ({layers}) ends before it begins")
        if first > expected:
            missing = names[expected] if first == expected + 1 else f"{names[expected]}..{names[first - 1]}"
            raise UsageError(f"`stages`: {missing} is in no stage; stage {index} must begin with layer {expected}")
        if first < expected:
            raise UsageError(
                f"`stages`: layer {first} ({names[first]}) is in two stages; "
                f"stage {index} must begin with layer {expected}"
            )
        cuts.append(last + 1)
        widths.append(width)
        expected = last + 1
    if expected < len(names):
        raise UsageError(
            f"`stages`: {names[expected]}..{names[-1]} (layers {expected}-{len(names) - 1}) is in no stage"
        )
    return Dictated(tuple(cuts), tuple(widths))


def _split(part: str, index: int) -> tuple[str, int]:
    layers, colon, replicas = part.rpartition(":")
    if not colon:
        layers, replicas = part, "1"
    if not layers or not re.fullmatch(r"[1-9][0-9]{0,5}", replicas):
        raise UsageError(f"`stages`: stage {index} is {part!r}; write layers:replicas, such as 0-5:2")
    return layers, int(replicas)


def _range(layers: str, names: Sequence[str], index: int) -> tuple[int, int]:
    single = position(layers, names)
    if single is not None:
        return single, single
    dashes = [match.start() for match in re.finditer("-", layers)]
    for dash in dashes:
        first, last = position(layers[:dash], names), position(layers[dash + 1 :], names)
        if first is not None and last is not None:
            return first, last
    sides = (layers[: dashes[0]], layers[dashes[0] + 1 :]) if dashes else (layers,)
    name = next((side for side in sides if position(side, names) is None), layers)
    raise unknown(f"`stages`: stage {index}", name, names)
