"""Joined: groups of nodes that multiply no matrices become parts of their neighbours, where that tells none apart.

A dropout behind the embeddings or the normalisation before the head wins nothing by a place of its own. A group goes to
the one before it if all groups like that one are followed by a group like it; or to the one behind it if all groups
like that one are preceded by a group like it: groups that compute the same still do so. Where both will do, the
boundary that fewer bytes cross is kept. Elements of a ``ModuleList`` or ``Sequential`` are not joined: whoever wrote
the list has cut there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import fx

from autopar.capture.units import crossing, listed

Group = tuple[int, int]
"""First and last-but-one of the nodes of a layer."""
Kind = tuple[int, ...]
_PRODUCTS = {
    "linear",
    "bilinear",
    "embedding",
    "matmul",
    "mm",
    "bmm",
    "mv",
    "addmm",
    "addmv",
    "baddbmm",
    "einsum",
    "dot",
}
_PRODUCTS |= {"tensordot", "scaled_dot_product_attention", "lstm", "gru", "rnn_tanh", "rnn_relu"}


class _Part(NamedTuple):
    """One group, or several that were joined."""

    low: int
    high: int
    kind: Kind
    """Equal for those that compute the same: the kinds of the groups in it."""
    light: bool

    def with_next(self, other: _Part) -> _Part:
        """Return the two as one."""
        return _Part(self.low, other.high, self.kind + other.kind, self.light and other.light)


def joined(
    owned: Sequence[fx.Node],
    groups: Sequence[Group],
    units: Sequence[str | None],
    parameters: Collection[str],
    kept: Collection[int] = (),
) -> list[Group]:
    """Return groups with the light ones joined to others.

    Args:
        owned: the nodes of all groups, in order.
        groups: cuts of them.
        units: the named module whose call a node belongs to, by node.
        parameters: names of the placeholders that are parameters.
        kept: the nodes at which a group begins that is not joined to the one before it.
    """
    kinds: dict[tuple[object, ...], int] = {}
    parts = []
    for low, high in groups:
        signature = tuple(_signature(node) for node in owned[low:high])
        light = not any(map(listed, units[low:high]))
        light = light and not any(_multiplies(node, parameters) for node in owned[low:high])
        parts.append(_Part(low, high, (kinds.setdefault(signature, len(kinds)),), light))
    crossed_bytes = crossing(owned, _sample_bytes)
    while (shorter := _joined_once(parts, crossed_bytes, kept)) is not None:
        parts = shorter
    return [(part.low, part.high) for part in parts]


def _joined_once(parts: Sequence[_Part], crossed_bytes: Sequence[int], kept: Collection[int]) -> list[_Part] | None:
    """Join the first light kind that can be joined, wherever it can; none if none can."""
    for kind in dict.fromkeys(part.kind for part in parts if part.light):
        places = [at for at, part in enumerate(parts[1:]) if part.low not in kept]
        before = _whole(parts, [(parts[at].kind, at) for at in places if parts[at + 1].kind == kind])
        behind = _whole(parts, [(parts[at + 1].kind, at) for at in places if parts[at].kind == kind])
        dearer = [each for each in before if all(_dearer(parts[at + 1], crossed_bytes) >= 0 for at in each)]
        cheaper = [each for each in behind if all(_dearer(parts[at], crossed_bytes) < 0 for at in each)]
        chosen = dearer or cheaper or before or behind
        if chosen:
            return _merged(parts, {at for each in chosen for at in each})
    return None


def _whole(parts: Sequence[_Part], found: Sequence[tuple[Kind, int]]) -> list[list[int]]:
    """Return the places of a kind where they are as many as parts of that kind: what may be joined, wherever it is."""
    every = Counter(part.kind for part in parts)
    places: dict[Kind, list[int]] = {}
    for kind, at in found:
        places.setdefault(kind, []).append(at)
    return [places[kind] for kind in places if len(places[kind]) == every[kind]]


def _dearer(part: _Part, crossed_bytes: Sequence[int]) -> int:
    """Return by how many bytes the boundary before a group is dearer than the one behind it."""
    return crossed_bytes[part.low] - crossed_bytes[part.high]


def _merged(parts: Sequence[_Part], places: Collection[int]) -> list[_Part]:
    """Join every part at one of the places with the next one."""
    found: list[_Part] = []
    for at, part in enumerate(parts):
        if at - 1 in places:
            part = found.pop().with_next(part)
        found.append(part)
    return found


def _multiplies(node: fx.Node, parameters: Collection[str]) -> bool:
    """Tell whether a node is a product, or reads a matrix, table or filter."""
    if not isinstance(node.target, torch._ops.OpOverload):
        # A sub-graph may hold anything; what picks an output of an operator does nothing.
        return getattr(node.target, "__name__", "") != "getitem"
    name = node.target._schema.name.removeprefix("aten::")
    if name in _PRODUCTS or name.startswith("conv"):
        return True
    read = (each.meta.get("val") for each in node.all_input_nodes if each.name in parameters)
    return any(isinstance(value, torch.Tensor) and value.dim() > 1 for value in read)


def _signature(node: fx.Node) -> tuple[object, ...]:
    """Return what a node computes, up to which nodes it reads: operator, constants, shapes and types."""
    read = tuple(_shape(each.meta.get("val")) for each in node.all_input_nodes)
    constants = str(fx.map_arg((node.args, dict(node.kwargs)), lambda _: "%"))
    return str(node.target), constants, read, _shape(node.meta.get("val"))


def _shape(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(map(str, value.shape))} {value.dtype}"
    return type(value).__name__


def _sample_bytes(value: torch.Tensor) -> int:
    return prod(size for size in value.shape if type(size) is int) * value.dtype.itemsize
