"""Units: the modules whose calls begin layers.

A *unit* is found by walking a node's module path from the root: the first element of a list (``transformer.h.3``), else
the outermost module without such elements in it (``transformer.wte``, ``head``). A module that is its parent's only
child is a wrapper and is walked through.

A unit that holds blocks of its own, as the stages of a Swin or a DenseNet do, is *split* into them, and they are split
likewise: a list (``nn.Sequential`` and its kin) one of whose elements has children, or a module that holds a list whose
elements are all of one class that has children. Blocks run one behind the other: a list whose elements do not need each
other (heads of attention, experts) is not split. Nor is a module in whose list more tensors cross between elements than
enter or leave the module, as beside a residual connection around the list.

Groups of nodes that multiply no matrices are *joined* to their neighbours, where that tells none apart. A dropout
behind the embeddings or the normalisation before the head wins nothing by a place of its own. A group goes to the one
before it if all groups like that one are followed by a group like it; or to the one behind it if all groups like that
one are preceded by a group like it: groups that compute the same still do so. Where both will do, the boundary that
fewer bytes cross is kept. Elements of a ``ModuleList`` or ``Sequential`` are not joined: whoever wrote the list has cut
there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from math import prod
from typing import NamedTuple

import torch
from torch import fx, nn

_Call = tuple[str, str]
"""The path of a module below the model, and which of its calls: empty, or ``@2`` from the second one on."""
_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Units:
    """Finds the unit whose call a node belongs to; ``split`` tells, by path, which units are split."""

    def __init__(self, model: nn.Module, split: Callable[[str], bool]) -> None:
        self._model, self._split = model, split
        self._whole_cache: dict[str, bool] = {}

    def whole(self, node: fx.Node) -> str | None:
        """Return the unit as ``path`` or ``path@2``, as if none was split; none between units."""
        for path, again in calls_around(node):
            if self._is_whole(path):
                return path + again
        return None

    def of(self, node: fx.Node) -> str | None:
        """Return the unit, or the part of one that is split; none between them."""
        within = False
        for path, again in calls_around(node):
            within = within or self._is_whole(path)
            if within and not self._split(path):
                return path + again
        return None

    def all_of(self, nodes: Sequence[fx.Node]) -> list[str | None]:
        """Return :meth:`of` every node; what a split unit does before its first part is the unit's own."""
        found: list[str | None] = []
        for unit, run in groupby(nodes, key=self.whole):
            parts = [self.of(node) for node in run]
            first = next((at for at, part in enumerate(parts) if part is not None), len(parts))
            found += [unit] * first + parts[first:]
        return found

    def _is_whole(self, path: str) -> bool:
        if path not in self._whole_cache:
            self._whole_cache[path] = self._decide(path)
        return self._whole_cache[path]

    def _decide(self, path: str) -> bool:
        module = self._model.get_submodule(path)
        parent, _, last = path.rpartition(".")
        if _has_children(module) and sum(1 for _ in self._model.get_submodule(parent).children()) == 1:
            return False
        # torch keeps a parametrised weight's functions in a list called parametrizations; they are no elements.
        paths = [name.split(".") for name, _ in module.named_modules()]
        return last.isdigit() or not any(part.isdigit() for p in paths if "parametrizations" not in p for part in p)


def calls_around(node: fx.Node) -> Iterator[_Call]:
    """Return the calls of the model's modules that a node runs in, from the outermost on."""
    for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
        inner = path.removeprefix("model.")
        if inner != path:
            again = key.rpartition("@")[2] if "@" in key else "0"
            yield inner, "" if again == "0" else f"@{int(again) + 1}"


def split_as(model: nn.Module, unit_names: Sequence[str]) -> Units:
    """Return units that are split as they were where these are the units of another graph of the model."""
    above = {path.rsplit(".", depth)[0] for path in unit_names for depth in range(1, path.count(".") + 1)}
    return Units(model, above.__contains__)


def split_units(model: nn.Module, nodes: Sequence[fx.Node]) -> Units:
    """Return units of which those that hold blocks are split; ``nodes`` are those that layers are made of, in order."""
    calls: dict[_Call, list[int]] = {}
    for at, node in enumerate(nodes):
        for call in calls_around(node):
            calls.setdefault(call, []).append(at)
    found = {path: _blocks(path, model.get_submodule(path)) for path in dict.fromkeys(path for path, _ in calls)}
    counts = _crossing(nodes)
    whole = {path for (path, _), at in calls.items() if not _in_sequence(nodes, at, found[path], counts)}
    return Units(model, {path for path, blocks in found.items() if blocks.lists and path not in whole}.__contains__)


class _Blocks(NamedTuple):
    """The lists of blocks that a module holds, as paths; and whether it is no list itself."""

    lists: tuple[frozenset[str], ...]
    inner: bool


def _blocks(path: str, module: nn.Module) -> _Blocks:
    if isinstance(module, _LISTS):
        elements = dict(module.named_children())
        several = len(elements) > 1 and any(map(_has_children, elements.values()))
        return _Blocks((frozenset(f"{path}.{name}" for name in elements),) if several else (), inner=False)
    lists = []
    for name, each in _lists_in(module, path):
        elements = dict(each.named_children())
        kinds = {type(element) for element in elements.values()}
        if len(elements) > 1 and len(kinds) == 1 and all(map(_has_children, elements.values())):
            lists.append(frozenset(f"{name}.{key}" for key in elements))
    return _Blocks(tuple(lists), inner=True)


def _lists_in(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Return the lists in a module that are in no other list, by their paths."""
    for name, child in module.named_children():
        if isinstance(child, _LISTS):
            yield f"{path}.{name}", child
        elif name != "parametrizations":
            yield from _lists_in(child, f"{path}.{name}")


def _has_children(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _in_sequence(nodes: Sequence[fx.Node], places: Sequence[int], blocks: _Blocks, counts: Sequence[int]) -> bool:
    """Tell whether the blocks in one call of a module run one behind the other; see the top of this file."""
    most = max(counts[places[0]], counts[places[-1] + 1])
    for elements in blocks.lists:
        runs: list[tuple[_Call, list[int]]] = []
        for at in places:
            call = next((call for call in calls_around(nodes[at]) if call[0] in elements), None)
            if call is not None and (not runs or runs[-1][0] != call):
                runs.append((call, []))
            if call is not None:
                runs[-1][1].append(at)
        if len({call for call, _ in runs}) < len(runs):
            return False
        for (_, before), (_, after) in pairwise(runs):
            if not _needs(nodes, before, after) or (blocks.inner and counts[after[0]] > most):
                return False
    return True


def _needs(nodes: Sequence[fx.Node], before: Sequence[int], after: Sequence[int]) -> bool:
    """Tell whether something of a run of nodes follows from what an earlier run made."""
    reached = {nodes[at] for at in before}
    for at in range(before[-1] + 1, after[-1] + 1):
        if not reached.isdisjoint(nodes[at].all_input_nodes):
            reached.add(nodes[at])
    return any(nodes[at] in reached for at in after)


def _crossing(nodes: Sequence[fx.Node], size: Callable[[torch.Tensor], int] = lambda value: 1) -> list[int]:
    """Return how many tensors, or of which size, cross the boundary before every node, and behind the last one."""
    place = {node: at for at, node in enumerate(nodes)}
    change = [0] * (len(nodes) + 2)
    for node, made in place.items():
        last = max((place[user] for user in node.users if user in place), default=made)
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and last > made:
            change[made + 1] += size(value)
            change[last + 1] -= size(value)
    return list(accumulate(change))


_Group = tuple[int, int]
"""First and last-but-one of the nodes of a layer."""
_Kind = tuple[int, ...]
_PRODUCTS = {"linear", "bilinear", "embedding", "matmul", "mm", "bmm", "mv", "addmm", "addmv", "baddbmm", "einsum"}
_PRODUCTS |= {"dot", "tensordot", "scaled_dot_product_attention", "lstm", "gru", "rnn_tanh", "rnn_relu"}


class _UnitGroup(NamedTuple):
    """One group, or several that were joined."""

    low: int
    high: int
    kind: _Kind
    """Equal for those that compute the same: the kinds of the groups in it."""
    light: bool


def join_groups(
    nodes: Sequence[fx.Node],
    groups: Sequence[_Group],
    units: Sequence[str | None],
    parameters: Collection[str],
    fixed_starts: Collection[int] = (),
) -> list[_Group]:
    """Return groups with the light ones joined to others.

    ``nodes`` are those of all groups, in order, ``units`` the modules whose calls they belong to, ``parameters`` names
    of placeholders. A group that begins at one of ``fixed_starts`` is not joined to the one before it.
    """
    kinds: dict[tuple[object, ...], int] = {}
    parts = []
    for low, high in groups:
        signature = tuple(_signature(node) for node in nodes[low:high])
        # The elements of lists of modules are called by numbers.
        paths = (unit.partition("@")[0] for unit in units[low:high] if unit is not None)
        light = not any(path.rpartition(".")[2].isdigit() for path in paths)
        light = light and not any(_multiplies(node, parameters) for node in nodes[low:high])
        parts.append(_UnitGroup(low, high, (kinds.setdefault(signature, len(kinds)),), light))
    crossed_bytes = _crossing(
        nodes, lambda value: prod(size for size in value.shape if type(size) is int) * value.dtype.itemsize
    )
    while (shorter := _join_once(parts, crossed_bytes, fixed_starts)) is not None:
        parts = shorter
    return [(part.low, part.high) for part in parts]


def _join_once(
    parts: Sequence[_UnitGroup], crossed_bytes: Sequence[int], fixed_starts: Collection[int]
) -> list[_UnitGroup] | None:
    """Join the first light kind that can be joined, wherever it can; none if none can."""
    for kind in dict.fromkeys(part.kind for part in parts if part.light):
        places = [at for at, part in enumerate(parts[1:]) if part.low not in fixed_starts]
        before = _whole(parts, [(parts[at].kind, at) for at in places if parts[at + 1].kind == kind])
        behind = _whole(parts, [(parts[at + 1].kind, at) for at in places if parts[at].kind == kind])
        dearer = [each for each in before if all(_dearer(parts[at + 1], crossed_bytes) >= 0 for at in each)]
        cheaper = [each for each in behind if all(_dearer(parts[at], crossed_bytes) < 0 for at in each)]
        chosen = dearer or cheaper or before or behind
        if chosen:
            return _merge_parts(parts, {at for each in chosen for at in each})
    return None


def _whole(parts: Sequence[_UnitGroup], candidates: Sequence[tuple[_Kind, int]]) -> list[list[int]]:
    """Return the places of a kind where they are as many as parts of that kind: what may be joined, wherever it is."""
    every = Counter(part.kind for part in parts)
    places: dict[_Kind, list[int]] = {}
    for kind, at in candidates:
        places.setdefault(kind, []).append(at)
    return [places[kind] for kind in places if len(places[kind]) == every[kind]]


def _dearer(part: _UnitGroup, crossed_bytes: Sequence[int]) -> int:
    """Return by how many bytes the boundary before a group is dearer than the one behind it."""
    return crossed_bytes[part.low] - crossed_bytes[part.high]


def _merge_parts(parts: Sequence[_UnitGroup], places: Collection[int]) -> list[_UnitGroup]:
    """Join every part at one of the places with the next one."""
    found: list[_UnitGroup] = []
    for at, part in enumerate(parts):
        if at - 1 in places:
            before = found.pop()
            part = _UnitGroup(before.low, part.high, before.kind + part.kind, before.light and part.light)
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
