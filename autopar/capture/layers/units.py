"""Units: the named modules at whose calls layers begin.

A *unit* is found by walking a node's module path from the root: the first element of a list (``transformer.h.3``), else
the outermost module without such elements in it (``transformer.wte``, ``head``). A module that is its parent's only
child is a wrapper and is walked through.

A unit that holds blocks of its own, as the stages of a Swin or a DenseNet do, is *split* into them, and they are split
likewise: a list (``nn.Sequential`` and its kin) one of whose elements has children, or a module that holds a list whose
elements are all of one class that has children. Blocks run one behind the other: a list whose elements do not need each
other (heads of attention, experts) is not split. Nor is a module in whose list more tensors cross between elements than
enter or leave the module, as beside a residual connection around the list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
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
        self.readers: Mapping[fx.Node, fx.Node] = {}
        """Nodes of other calls, which those between calls belong to."""

    def whole(self, node: fx.Node) -> str | None:
        """Return the unit as ``path`` or ``path@2``, as if none was split; none between units."""
        for path, again in self._calls(node):
            if self._is_whole(path):
                return path + again
        return None

    def of(self, node: fx.Node) -> str | None:
        """Return the unit, or the part of one that is split; none between them."""
        within = False
        for path, again in self._calls(node):
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

    def _calls(self, node: fx.Node) -> Iterator[_Call]:
        return calls_around(self.readers.get(node, node))

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


def split_units(model: nn.Module, nodes: Sequence[fx.Node]) -> Units:
    """Return units of which those that hold blocks are split; ``nodes`` are those that layers are made of, in order."""
    calls: dict[_Call, list[int]] = {}
    for at, node in enumerate(nodes):
        for call in calls_around(node):
            calls.setdefault(call, []).append(at)
    found = {path: _blocks(path, model.get_submodule(path)) for path in dict.fromkeys(path for path, _ in calls)}
    counts = crossing(nodes)
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


def crossing(nodes: Sequence[fx.Node], size: Callable[[torch.Tensor], int] = lambda value: 1) -> list[int]:
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
