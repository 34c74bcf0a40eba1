"""Dictated: the stages a user writes with ``--stages``, such as ``0-5:2,6-11:1`` or ``wte-h.5:2,h.6-head``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import NamedTuple

from autopar.errors import UsageError

__all__ = ["Dictated", "parse"]


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
            raise UsageError(f"--stages: stage {index} ({layers}) ends before it begins")
        if first > expected:
            missing = names[expected] if first == expected + 1 else f"{names[expected]}..{names[first - 1]}"
            raise UsageError(f"--stages: {missing} is in no stage; stage {index} must begin with layer {expected}")
        if first < expected:
            raise UsageError(
                f"--stages: layer {first} ({names[first]}) is in two stages; "
                f"stage {index} must begin with layer {expected}"
            )
        cuts.append(last + 1)
        widths.append(width)
        expected = last + 1
    if expected < len(names):
        raise UsageError(
            f"--stages: {names[expected]}..{names[-1]} (layers {expected}-{len(names) - 1}) is in no stage"
        )
    return Dictated(tuple(cuts), tuple(widths))


def _split(part: str, index: int) -> tuple[str, int]:
    layers, colon, replicas = part.rpartition(":")
    if not colon:
        layers, replicas = part, "1"
    if not layers or not re.fullmatch(r"[1-9][0-9]{0,5}", replicas):
        raise UsageError(f"--stages: stage {index} is {part!r}; write layers:replicas, such as 0-5:2")
    return layers, int(replicas)


def _range(layers: str, names: Sequence[str], index: int) -> tuple[int, int]:
    single = _position(layers, names)
    if single is not None:
        return single, single
    dashes = [match.start() for match in re.finditer("-", layers)]
    for dash in dashes:
        first, last = _position(layers[:dash], names), _position(layers[dash + 1 :], names)
        if first is not None and last is not None:
            return first, last
    sides = (layers[: dashes[0]], layers[dashes[0] + 1 :]) if dashes else (layers,)
    unknown = next((side for side in sides if _position(side, names) is None), layers)
    if re.fullmatch(r"\d+", unknown):
        raise UsageError(f"--stages: stage {index} names layer {unknown}; the profile has layers 0..{len(names) - 1}")
    near = difflib.get_close_matches(unknown, names, n=3, cutoff=0.0)
    raise UsageError(f"--stages: stage {index}: no layer is called {unknown!r}; nearest: {', '.join(near)}")


def _position(name: str, names: Sequence[str]) -> int | None:
    if re.fullmatch(r"\d{1,9}", name):
        return int(name) if int(name) < len(names) else None
    return names.index(name) if name in names else None
