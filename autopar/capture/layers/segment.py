"""Cut an exported graph into layers at legal boundaries.

A layer begins at the call of a *unit*, a named module such as a block (``units.py``). What runs between units (residual
additions, the loss) belongs to the layer before it, but for joins of independent branches (``branches.py``). Modules
outside of lists that multiply no matrices are joined to others. A unit that holds blocks is split behind that, so that
no boundary goes.

Some values are *free*: they depend on inputs only or on parameters only, draw no random numbers and write nothing
that outlives them (masks, positions, expanded tokens). They are computed again in every layer that reads them, so
they neither cross boundaries nor form layers. All other nodes are *owned* by one layer.

A boundary is legal where it separates none of these:

1. an operator with several outputs and the outputs picked from it;
2. the maker of a storage, everything that reads it, and the operator that writes it in place;
3. users of a buffer (or parameter, or input) that some operator writes;
4. the maker of a value and its last reader, where that value is not a tensor with the batch as exactly one dimension.

A layer that joins modules is named after the first one and the others that read parameters: ``model.norm+lm_head``. Of
more than three, the first and the last are named: ``stem+...+last``. A second call of a module is ``path@2``. Each of
the named ones stands for the layer in ``stages``, ``pin`` and ``forbid_cut``. Plans that an earlier autopar made still
run: those that name the first module only, or a whole stage of blocks. A parameter that several layers read to compute
a free value is tied.

Groups of nodes that multiply no matrices are *joined* to their neighbours, where that tells none apart. A dropout
behind the embeddings or the normalisation before the head wins nothing by a place of its own. A group goes to the one
before it if all groups like that one are followed by a group like it; or to the one behind it if all groups like that
one are preceded by a group like it: groups that compute the same still do so. Where both will do, the boundary that
fewer bytes cross is kept. Elements of a ``ModuleList`` or ``Sequential`` are not joined: whoever wrote the list has cut
there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from autopar.capture.layers.branches import put_off_joins
from autopar.capture.layers.units import Units, crossing, split_units
from autopar.capture.model.effects import Storages, draws_random_numbers, reachable, tensor_arguments, written_arguments
from autopar.errors import CaptureError
from autopar.formats.profile import Joins

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
    crossed_bytes = crossing(
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


_ASSERTIONS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range")
_MOST_OTHERS = 2
"""Modules that a layer is named after beside its first one."""


@dataclass(frozen=True)
class GraphInputs:
    """What the placeholders of an exported graph are."""

    parameters: Mapping[str, str]
    """From placeholder to the parameter's name."""
    buffers: Mapping[str, str]
    constants: Mapping[str, str]
    tensors: Mapping[str, str]
    """From placeholder to the name of the batch's tensor."""
    symbol: str
    """The symbol of the batch dimension."""
    least: int = 1
    """The fewest samples that the graph is right for."""
    most: int | None = None
    """The most; none: any number."""


@dataclass(frozen=True)
class LayerNodes:
    """One layer, as names of nodes."""

    name: str
    modules: tuple[str, ...]
    """Units whose calls it holds, the one that it begins with first."""
    nodes: tuple[str, ...]
    """All nodes it computes, free ones included, in graph order."""
    owned_nodes: frozenset[str]
    random: bool


def is_size(node: fx.Node, symbol: str) -> bool:
    """Tell whether a node is an integer computed from the batch size: every layer computes those from ``rows``."""
    value: Any = node.meta.get("val")
    return type(value) is torch.SymInt and {str(free) for free in value.node.expr.free_symbols} <= {symbol}


def batch_dim(value: object, symbol: str) -> int | None:
    """Return the only dimension of a tensor that is the batch; none if there is no such, or others depend on it."""
    if not isinstance(value, torch.Tensor):
        return None
    sizes: list[Any] = list(value.shape)
    varying = [(index, size) for index, size in enumerate(sizes) if type(size) is torch.SymInt]
    if len(varying) != 1 or str(varying[0][1].node.expr) != symbol:
        return None
    return varying[0][0]


def segment(graph: fx.Graph, inputs: GraphInputs, model: nn.Module, joins: Joins = "reader") -> tuple[LayerNodes, ...]:
    """Cut a graph into the layers described above, or as was done where joins belonged to what runs before them."""
    nodes = _LiveNodes(graph, inputs)
    _refuse_lost_writes(nodes)
    finder, count = split_units(model, nodes.owned_nodes), len(nodes.owned_nodes)
    if joins == "reader":
        nodes.put_off_joins(finder)
    forbidden, whole = _forbidden(nodes), [finder.whole(node) for node in nodes.owned_nodes]
    put_off = {at for at, node in enumerate(nodes.owned_nodes) if node in finder.readers}
    groups = join_groups(nodes.owned_nodes, _merge(count, _starts(whole), forbidden), whole, inputs.parameters, put_off)
    kept, units = {low for low, _ in groups}, finder.all_of(nodes.owned_nodes)
    starts = kept.union(set(_starts(units)) - set(_starts(whole)))
    groups = join_groups(
        nodes.owned_nodes, _merge(count, sorted(starts), forbidden), units, inputs.parameters, kept | put_off
    )
    return tuple(_describe(nodes, groups, units, finder))


def segment_like(
    graph: fx.Graph, inputs: GraphInputs, model: nn.Module, layers: Sequence[Sequence[str]]
) -> tuple[LayerNodes, ...]:
    """Cut another graph of the same model where the calls of its layers' modules begin.

    ``layers`` are the modules of every layer, as :class:`LayerNodes` has them; segments go by the layers' names, and
    layers of which the graph has nothing are left out.

    Raises:
        CaptureError: a boundary is not legal in this graph; names the layer behind it.
    """
    names = [unit for modules in layers for unit in modules]
    # Units are split as they were where these are the units of the other graph.
    above = {path.rsplit(".", depth)[0] for path in names for depth in range(1, path.count(".") + 1)}
    nodes, finder = _LiveNodes(graph, inputs), Units(model, above.__contains__)
    nodes.put_off_joins(finder)
    units = finder.all_of(nodes.owned_nodes)
    place: dict[str | None, int] = {
        unit: index for index, modules in reversed(list(enumerate(layers))) for unit in modules
    }
    numbers = list(accumulate((place.get(unit, 0) for unit in units), max))
    count = len(numbers)
    edges = [0, *(at for at in range(1, count) if numbers[at] != numbers[at - 1]), count]
    for low, high in _forbidden(nodes):
        crossed = [edge for edge in edges if low < edge <= high]
        if crossed:
            name = layers[numbers[crossed[0]]][0]
            raise CaptureError(f"the model cannot be cut before {name} in evaluation as it is in training")
    groups = [(low, high) for low, high in pairwise(edges) if low < high]
    found = _describe(nodes, groups, units, finder)
    return tuple(replace(part, name=layers[numbers[low]][0]) for (low, _), part in zip(groups, found, strict=True))


def _refuse_lost_writes(nodes: _LiveNodes) -> None:
    """Check that what outlives a forward and is written in it is a buffer (or parameter, or input).

    Raises:
        CaptureError: it is another tensor that a module holds; names it.
    """
    # A constant that the forward makes is detached in place, which writes no value.
    writers = [node for node in nodes.writes if node.target is not torch.ops.aten.detach_.default]
    for root in {nodes.storages.root(target) for node in writers for target in nodes.writes[node]}:
        members = [member.name for member in nodes.members[root]]
        constants = [nodes.inputs.constants[name] for name in members if name in nodes.inputs.constants]
        if constants:
            raise CaptureError(
                f"the tensor {constants[0].removeprefix('model.')} of the model is written in place and is no buffer; "
                "register it as one (self.register_buffer)"
            )


class _LiveNodes:
    """The live nodes of a graph, told apart into free and owned ones."""

    def __init__(self, graph: fx.Graph, inputs: GraphInputs) -> None:
        self.inputs = inputs
        self.output = graph.output_node()
        self.storages = Storages(graph.nodes)
        calls = [node for node in graph.nodes if self._computes(node)]
        self.writes = {node: written_arguments(node) for node in calls}
        self.random = {node for node in calls if draws_random_numbers(node)}
        self.members: dict[fx.Node, list[fx.Node]] = {}
        for node in graph.nodes:
            self.members.setdefault(self.storages.root(node), []).append(node)
        self.written_roots = {self.storages.root(target) for targets in self.writes.values() for target in targets}
        live = self._live(calls)
        self.live = [node for node in calls if node in live]
        self.free = self._free(self.live)
        self.owned_nodes = [node for node in self.live if node not in self.free]
        self.index = {node: index for index, node in enumerate(self.owned_nodes)}

    def put_off_joins(self, finder: Units) -> None:
        """Order owned nodes so that joins of independent branches belong to the calls that read them."""

        def crosses(node: fx.Node) -> bool:
            return batch_dim(node.meta.get("val"), self.inputs.symbol) is not None

        fixed = self.random | {
            node
            for node in self.owned_nodes
            if not self.written_roots.isdisjoint(map(self.storages.root, (node, *self.reads(node))))
        }
        units = finder.all_of(self.owned_nodes)
        self.owned_nodes, finder.readers = put_off_joins(self.owned_nodes, units, self.reads, crosses, fixed)
        self.index = {node: index for index, node in enumerate(self.owned_nodes)}

    def _computes(self, node: fx.Node) -> bool:
        if node.op != "call_function" or is_size(node, self.inputs.symbol):
            return False
        return not any(part in str(node.target) for part in _ASSERTIONS)

    def reads(self, node: fx.Node) -> list[fx.Node]:
        """Return the arguments that are not sizes."""
        return [argument for argument in tensor_arguments(node) if not is_size(argument, self.inputs.symbol)]

    def written_aliases(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes that share memory with a node, if someone writes that memory."""
        root = self.storages.root(node)
        return self.members[root] if root in self.written_roots else []

    def _live(self, calls: Sequence[fx.Node]) -> set[fx.Node]:
        """Return what the output, or what is written or drawn, is computed from, and these themselves."""
        wanted = (*self.output.all_input_nodes, *self.random, *(node for node in calls if self.writes[node]))
        known = set(calls)
        return set(reachable(wanted, lambda node: self.reads(node) if node in known else ()))

    def _free(self, live: Sequence[fx.Node]) -> set[fx.Node]:
        from_inputs = self._reachable_nodes(live, self.inputs.tensors)
        from_parameters = self._reachable_nodes(live, self.inputs.parameters)
        known = set(live)
        free = known - self.random - (from_inputs & from_parameters)

        def is_allowed(other: fx.Node) -> bool:
            if other.op == "placeholder":
                return not self.written_aliases(other)
            return other in free or other not in known

        while bad := {
            node for node in free if not all(map(is_allowed, (*self.reads(node), *self.written_aliases(node))))
        }:
            free -= bad
        return free

    def _reachable_nodes(self, live: Sequence[fx.Node], sources: Mapping[str, str]) -> set[fx.Node]:
        reached: set[fx.Node] = set()
        for node in live:
            touched = (*self.reads(node), *(mate for mate in self.written_aliases(node) if mate in reached))
            if any(other.name in sources if other.op == "placeholder" else other in reached for other in touched):
                reached.add(node)
        return reached


def _starts(units: Sequence[str | None]) -> list[int]:
    named = [(index, unit) for index, unit in enumerate(units) if unit is not None]
    return [index for (_, before), (index, unit) in pairwise(named) if unit != before]


def _forbidden(nodes: _LiveNodes) -> list[tuple[int, int]]:
    """Return pairs of owned nodes that no boundary may separate."""
    pairs = []
    for root in nodes.written_roots:
        pinned = any(member.op == "placeholder" for member in nodes.members[root])
        touching = nodes.members[root] + [node for node, targets in nodes.writes.items() if _hits(nodes, targets, root)]
        if pinned:
            touching += [user for member in nodes.members[root] for user in member.users]
        places = [nodes.index[node] for node in touching if node in nodes.index]
        writers = [nodes.index[node] for node in nodes.owned_nodes if _hits(nodes, nodes.writes[node], root)]
        if places:
            pairs.append((min(places), max(places) if pinned or not writers else max(writers)))
    for node, place in nodes.index.items():
        readers = [nodes.index[user] for user in node.users if user in nodes.index]
        if nodes.output in node.users:
            readers.append(len(nodes.owned_nodes) - 1)
        if readers and batch_dim(node.meta.get("val"), nodes.inputs.symbol) is None:
            pairs.append((place, max(readers)))
    return pairs


def _hits(nodes: _LiveNodes, targets: Sequence[fx.Node], root: fx.Node) -> bool:
    return any(nodes.storages.root(target) is root for target in targets)


def _merge(count: int, starts: Sequence[int], forbidden: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the first and last-but-one owned node of every layer."""
    illegal = [False] * (count + 1)
    for low, high in forbidden:
        illegal[low + 1 : high + 1] = [True] * (high - low)
    edges = [0, *(start for start in starts if not illegal[start]), count]
    return [(low, high) for low, high in pairwise(edges) if low < high]


def _describe(
    nodes: _LiveNodes, groups: Sequence[tuple[int, int]], units: Sequence[str | None], finder: Units
) -> Iterator[LayerNodes]:
    taken = {unit for unit in units if unit is not None}
    order = {node: index for index, node in enumerate(nodes.live)}
    for number, (low, high) in enumerate(groups):
        owned = nodes.owned_nodes[low:high]
        outputs = nodes.output.all_input_nodes if number == len(groups) - 1 else []
        added = _closure(nodes, owned, outputs)
        everything = sorted((*owned, *added), key=order.__getitem__)
        modules = dict.fromkeys(unit for unit in units[low:high] if unit is not None)
        holding = {unit for unit, node in zip(units[low:high], owned, strict=True) if _reads_parameter(nodes, node)}
        for node in everything:
            # A free node that reads parameters is listed where it is first computed, unless its module has a layer.
            unit = finder.of(node) if node in added and _reads_parameter(nodes, node) else None
            if unit is not None and unit not in taken:
                taken.add(unit)
                modules[unit] = None
        called = tuple(modules) or ("model",)
        yield LayerNodes(
            name=_layer_name(called[0], [unit for unit in called[1:] if unit in holding]),
            modules=called,
            nodes=tuple(node.name for node in everything),
            owned_nodes=frozenset(node.name for node in owned),
            random=any(node in nodes.random for node in owned),
        )


def _layer_name(first: str, others: Sequence[str]) -> str:
    """Return the name of a layer that joins modules: the first one, and the others that read parameters.

    >>> _layer_name("norm", ["head"]), _layer_name("conv1", ["bn1", "conv2", "bn2"])
    ('norm+head', 'conv1+...+bn2')
    """
    shown = others if len(others) <= _MOST_OTHERS else ["...", others[-1]]
    return "+".join((first, *shown))


def _reads_parameter(nodes: _LiveNodes, node: fx.Node) -> bool:
    return any(argument.name in nodes.inputs.parameters for argument in nodes.reads(node))


def _closure(nodes: _LiveNodes, owned_nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> Mapping[fx.Node, None]:
    """Return the free nodes that a layer needs: arguments of arguments, and whatever writes into their memory."""
    starts = [*(argument for node in owned_nodes for argument in nodes.reads(node)), *outputs]
    return reachable(
        nodes.free.intersection(starts),
        lambda node: nodes.free.intersection((*nodes.reads(node), *nodes.written_aliases(node))),
    )
