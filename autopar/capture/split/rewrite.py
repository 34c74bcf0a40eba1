"""The part of a layer that one rank of a team computes: its operators on what it has of every tensor.

Parameters are cut by indices; operators that are given sizes get the part's. Every tensor that enters a region has one
``enter`` for all who read it there, and every operator that sums over what is split has one ``leave``, after which its
bias is added. Operators outside are as they were, or compute slices of the sequence: ``sequence.py`` says which. Then,
a slice is gathered for a region, or for operators that are computed whole, once for all of either kind. It takes one
walk over the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from autopar.capture.graph import Layer
from autopar.capture.split.analysis import Analysis, analyse
from autopar.capture.split.autocast import products_of
from autopar.capture.split.choice import AttributeCut, Split, choose, cuts_of
from autopar.capture.split.names import MismatchError, is_partial, split_places
from autopar.capture.split.rules import Axis, LocalCall, Part, local_call, ranges, take_ranges
from autopar.capture.split.sequence import (
    NO_EDGES,
    NOTHING,
    Edges,
    SequenceSplit,
    SlicePlace,
    find_edges,
    split_sequence,
    writes_slices,
)
from autopar.capture.split.sums import Enter, Leave, Move, Summand, Sums
from autopar.formats.cuts import ParameterCut

_ENTER, _LEAVE = "enter", "leave"
_MOVES = {
    "gather": ("gather", "reduce_scatter"),
    "reduce_scatter": ("reduce_scatter", "gather"),
    "gather_alike": ("gather", "take"),
    "take": ("take", "gather"),
}
"""What moves slices of the sequence, forwards and backwards."""


@dataclass(frozen=True, eq=False)
class LayerPart:
    """A layer's module for one part, with parameters of its own."""

    module: fx.GraphModule
    cuts: Mapping[str, AttributeCut]
    """How parameters are divided, by attribute; others are whole."""
    summands: Mapping[str, tuple[Summand, ...]] = field(default_factory=dict)
    """Of parameters whose gradients are to be added up yet, by attribute, one sum after the other. Those of all others
    are complete on every part."""

    @property
    def summing_parts(self) -> frozenset[tuple[int, ...]]:
        """The sets of parts over which it sums, or whoever runs it."""
        calls = [node for node in self.module.graph.nodes if node.op == "call_module"]
        sums = {node.args[1] for node in calls if node.target in (_ENTER, _LEAVE)}
        sums |= {each.parts for found in self.summands.values() for each in found}
        return frozenset(sums | {getattr(self.module, node.target).parts for node in calls if node.target in _MOVES})


def split_layer(
    layer: Layer,
    sums: Sums,
    index: int,
    count: int,
    earlier_cuts: Mapping[str, AttributeCut] | None = None,
    sequence: Mapping[str, int] | None = None,
    deferred_sums: Collection[str] = (),
    analysis: Analysis | None = None,
) -> LayerPart:
    """Return a layer's part of so many.

    Args:
        layer: as captured.
        sums: the sums among parts: each part's forwards and backwards call them in the same order.
        index: which part, from 0.
        count: how many parts there are.
        earlier_cuts: cuts of an earlier choice, which this one repeats.
        sequence: inputs and outputs that come and go in slices, by name, with the dimension: part 0 has the first
            slice. Others are whole; if all are, so is everything outside regions.
        deferred_sums: attributes of parameters whose gradients need not be complete after every backward.
        analysis: of the layer, if it is there.

    Raises:
        MismatchError: a parameter cannot be cut as it was recorded, or an input or output is not divided evenly.
    """
    # Values of indices are asked for, also where a layer is split to be run on fake tensors.
    with unset_fake_temporarily():
        analysis = analysis or analyse(layer)
        edges = find_edges(analysis.module, layer, sequence or {}, count)
        return rewrite(analysis, choose(analysis, count, earlier_cuts), sums, index, count, edges, deferred_sums)


def split_as_recorded(
    layer: Layer,
    sums: Sums,
    index: int,
    count: int,
    cuts: Mapping[str, ParameterCut],
    sequence: Mapping[str, int],
    deferred_names: Collection[str] = (),
    analysis: Analysis | None = None,
) -> LayerPart:
    """Return a layer's part of so many, cut as a profile or a plan says; see :func:`split_layer`.

    Args:
        layer: as captured.
        sums: the sums among parts.
        index: which part.
        count: how many there are.
        cuts: of parameters, by the model's own names; of others than the layer's, too.
        sequence: dimensions of tensors that come and go in slices, by name; likewise.
        deferred_names: names of parameters whose gradients need not be complete after every backward.
        analysis: of the layer, if it is there.

    Raises:
        MismatchError: it cannot be cut so.
    """
    named = layer.parameters.items()
    recorded = {attribute: AttributeCut(cuts[name].dim, cuts[name].parts) for attribute, name in named if name in cuts}
    crossing = {name: dim for name, dim in sequence.items() if name in (*layer.inputs, *layer.outputs)}
    later = [attribute for attribute, name in named if name in deferred_names]
    return split_layer(layer, sums, index, count, recorded, crossing, later, analysis)


def rewrite(
    analysis: Analysis,
    splits: Sequence[Split],
    sums: Sums,
    index: int,
    count: int = 1,
    edges: Edges = NO_EDGES,
    deferred_sums: Collection[str] = (),
) -> LayerPart:
    """Return a part of an analysed layer.

    Args:
        analysis: of the layer.
        splits: what :func:`choose` gives.
        sums: the sums among parts.
        index: which part.
        count: how many parts have slices.
        edges: what comes and goes in slices.
        deferred_sums: see :func:`split_layer`.
    """
    sequence = NOTHING
    if edges != NO_EDGES:
        if writes_slices(analysis):
            raise MismatchError("the layer writes into tensors, and slices of them would not see it")
        sequence = split_sequence(analysis, splits, count, edges.inputs, edges.output_nodes(analysis.module))
    parts = [split.parts[index] for split in splits]
    cuts = cuts_of(analysis, splits)
    regions = {node: part for split, part in zip(splits, parts, strict=True) for node in split.region}
    graph = _Rewrite(analysis, regions, sequence, edges, (index, count)).run()
    summands = {name: found for name in deferred_sums if (found := _defer(graph, name))}
    _count_products(graph)
    attributes: dict[str, Any] = {_ENTER: Enter(sums), _LEAVE: Leave(sums)}
    if sequence is not NOTHING:
        attributes |= {name: Move(sums, index, count, *directions) for name, directions in _MOVES.items()}
    attributes |= _attributes(analysis, cuts, index)
    return LayerPart(fx.GraphModule(attributes, graph), cuts, summands)


def _defer(graph: fx.Graph, attribute: str) -> tuple[Summand, ...]:
    """Take from a graph the sums of a parameter's gradients, and return them in their order.

    None is taken of a parameter that some operators read before it enters: of the gradient that these give, all parts
    have the whole.
    """
    nodes = [node for node in graph.find_nodes(op="get_attr") if node.target == attribute]
    if len(nodes) != 1:
        return ()
    enters: list[fx.Node] = []
    node = nodes[0]
    while len(node.users) == 1 and (user := next(iter(node.users))).target == _ENTER:
        enters.insert(0, user)
        node = user
    for enter in enters:
        enter.replace_all_uses_with(enter.all_input_nodes[0])
        graph.erase_node(enter)
    return tuple(Summand(*enter.args[1:]) for enter in enters)  # type: ignore[arg-type]


def _count_products(graph: fx.Graph) -> None:
    """Say of what enters, but parameters, how often products read it if nothing else does."""
    for node in graph.nodes:
        if node.op == "call_module" and node.target in (_ENTER, "gather", "gather_alike"):
            source = node
            while source.target == _ENTER:
                source = source.args[0]
            if source.op != "get_attr" and (products := products_of(node)):
                node.kwargs = {"products": products}


def _attributes(analysis: Analysis, cuts: Mapping[str, AttributeCut], index: int) -> dict[str, Any]:
    """Return what the graph of a part reads of its module; parameters are copies, and remain one where they were."""
    found: dict[str, Any] = {}
    copies: dict[int, nn.Parameter] = {}
    for node in analysis.module.graph.nodes:
        if node.op != "get_attr":
            continue
        attribute = str(node.target)
        value = analysis.values[node]
        if attribute in analysis.parameters:
            value = copies.setdefault(id(value), _parameter_part(value, cuts.get(attribute), index))
        found[attribute] = value
    return found


def _parameter_part(parameter: nn.Parameter, cut: AttributeCut | None, index: int) -> nn.Parameter:
    value = parameter.detach()
    value = value.clone() if cut is None else value.index_select(cut.dim, cut.indices(index).to(value.device))
    return nn.Parameter(value, requires_grad=parameter.requires_grad)


class _Rewrite:
    """A walk over a graph that makes the graph of a part."""

    def __init__(
        self,
        analysis: Analysis,
        regions: Mapping[fx.Node, Part],
        sequence: SequenceSplit,
        edges: Edges,
        share: tuple[int, int],
    ) -> None:
        self._analysis, self._regions = analysis, regions
        self._sequence, self._edges, self._share = sequence, edges, share
        self._graph = fx.Graph()
        self._made: dict[fx.Node, fx.Node] = {}
        """What stands for a node of the whole graph: a slice of it, where the sequence is split."""
        self._calls: dict[tuple[str, fx.Node, tuple[Any, ...]], fx.Node] = {}
        """Of modules, by what they are called with."""
        self._taken: dict[tuple[fx.Node, Part], fx.Node] = {}

    def run(self) -> fx.Graph:
        """Return the part's graph."""
        for node in self._analysis.module.graph.nodes:
            self._made[node] = self._make(node)
        self._graph.lint()
        return self._graph

    def _make(self, node: fx.Node) -> fx.Node:
        part = self._regions.get(node)
        if part is not None:
            return self._call(node, part)
        if node in self._sequence.calls:
            return self._call_slice(node)
        if node.op == "output" and self._edges.outputs:
            return self._output(node)
        if node.target is operator.getitem or self._reads_other_size(node):
            return self._graph.node_copy(node, self._made.__getitem__)
        made = self._graph.node_copy(node, self._whole)
        dim = self._edges.inputs.get(node)
        return made if dim is None or node in self._sequence.places else self._move("gather_alike", made, dim)

    def _reads_other_size(self, node: fx.Node) -> bool:
        """Tell whether a node gives a size of a tensor that is not in slices."""
        if node.target is not torch.ops.aten.sym_size.int:
            return False
        source, dim = node.args
        place = self._sequence.places.get(source) if isinstance(source, fx.Node) else None
        assert isinstance(source, fx.Node)
        assert isinstance(dim, int)
        return place is not None and place.dim != dim % len(self._analysis.dims[source][0])

    def _call(self, node: fx.Node, part: Part) -> fx.Node:
        call = self._analysis.calls.get(node)
        local = LocalCall(node.target, node.args, node.kwargs) if call is None else local_call(call, part)
        args, kwargs = fx.map_arg((local.args, dict(local.kwargs)), lambda each: self._inside(each, part))
        made = self._graph.call_function(local.target, args, kwargs)
        if not self._sums(node, part):
            return made
        place = self._sequence.places.get(node)
        if place is None:
            made = self._graph.call_module(_LEAVE, (made, peers(part, part.axes)))
        else:
            made = self._move("reduce_scatter", made, place.dim, place.period)
        if local.then is None:
            return made
        then_args = fx.map_arg(
            local.then_args, lambda each: self._whole(each) if place is None else self._slice(node, each)
        )
        return self._graph.call_function(local.then, (made, *then_args))

    def _sums(self, node: fx.Node, part: Part) -> bool:
        return any(self._analysis.sums(node, axis.name) for axis in part.axes)

    def _call_slice(self, node: fx.Node) -> fx.Node:
        """Compute a slice outside regions."""
        axis = Axis(self._sequence.call_names[node], *self._share)
        local = local_call(self._sequence.calls[node], Part((axis,)))
        args, kwargs = fx.map_arg((local.args, dict(local.kwargs)), lambda each: self._slice(node, each))
        return self._graph.call_function(local.target, args, kwargs)

    def _slice(self, reader: fx.Node, node: fx.Node) -> fx.Node:
        """Return what a reader that computes a slice reads: of a whole tensor, parts have summands of the gradient."""
        if node in self._sequence.places:
            return self._made[node]
        place = self._sequence.slice_of(reader, node)
        if place is not None:
            return (
                self._move("take", self._made[node], place.dim, place.period)
                if self._analysis.writes
                else self._move_once("take", node, place)
            )
        if node not in self._analysis.varying:
            return self._made[node]
        return self._call_once(_ENTER, node, self._made[node], (tuple(range(self._share[1])),))

    def _whole(self, node: fx.Node) -> fx.Node:
        """Return what operators read that every part computes whole, and whose gradients are alike."""
        place = self._sequence.places.get(node)
        return self._made[node] if place is None else self._move_once("gather_alike", node, place)

    def _move_once(self, name: str, node: fx.Node, place: SlicePlace) -> fx.Node:
        return self._call_once(name, node, self._made[node], (place.dim, place.period))

    def _move(self, name: str, tensor: fx.Node, dim: int, period: int | None = None) -> fx.Node:
        return self._graph.call_module(name, (tensor, dim, period))

    def _output(self, node: fx.Node) -> fx.Node:
        (found,) = node.args
        assert isinstance(found, (tuple, list))
        output: fx.Node = self._graph.output(tuple(self._leave_layer(each, place) for place, each in enumerate(found)))
        return output

    def _leave_layer(self, node: Any, place: int) -> Any:  # noqa: ANN401
        """Return a tensor as it goes over the layer's edge."""
        if not isinstance(node, fx.Node):
            return node
        dim = self._edges.outputs.get(place)
        if dim is None:
            return self._whole(node)
        own = self._sequence.places.get(node)
        if own is not None and (own.dim, own.period) == (dim, None):
            return self._made[node]
        return self._move("take", self._whole(node), dim)

    def _inside(self, node: fx.Node, part: Part) -> fx.Node:
        """Return what a region reads for a node: what was made inside, or a tensor from outside, which has entered.

        A parameter that is cut by one of two names has a summand of its gradient for every part of the other.
        """
        if self._regions.get(node) is part and not self._sums(node, part):
            return self._made[node]
        if node in self._analysis.sources:
            return self._taken_part(node, part)
        axes = [axis for axis in part.axes if not self._analysis.splits(node, axis.name)]
        return self._enter_pieces(node, self._enter(node, part, axes), part)

    def _enter(self, node: fx.Node, part: Part, axes: Collection[Axis]) -> fx.Node:
        """Sum the gradient of a tensor over the parts along some axes: one sum for all who read it.

        What is there in slices is gathered, and the sum scattered.
        """
        place = self._sequence.places.get(node)
        if place is not None:
            return self._move_once("gather", node, place)
        if node not in self._analysis.varying or not axes:
            return self._made[node]
        return self._call_once(_ENTER, node, self._made[node], (peers(part, axes),))

    def _enter_pieces(self, node: fx.Node, tensor: fx.Node, part: Part) -> fx.Node:
        """Sum the gradient of those pieces of a parameter that are not split, where others are."""
        if node not in self._analysis.varying:
            return tensor
        for axis in part.axes:
            for place, dim in enumerate(self._analysis.dims[node][0]):
                if is_partial(dim, axis.name):
                    whole = ~split_places(dim, axis.name)[part.positions(dim)]
                    rows = ranges(whole.nonzero().flatten())
                    tensor = self._call_once(_ENTER, node, tensor, (peers(part, [axis]), place, rows))
        return tensor

    def _call_once(self, name: str, node: fx.Node, tensor: fx.Node, args: tuple[Any, ...]) -> fx.Node:
        """Call a module on what stands for a node, once for all who read it so."""
        key = (name, node, args)
        if key not in self._calls:
            self._calls[key] = self._graph.call_module(name, (tensor, *args))
        return self._calls[key]

    def _taken_part(self, node: fx.Node, part: Part) -> fx.Node:
        """Take a part of a tensor that is there as a whole; of the gradient, others have what is zero in this one."""
        if (node, part) not in self._taken:
            taken = self._enter(node, part, part.axes)
            for place, dim in enumerate(self._analysis.dims[node][0]):
                if part.splits(dim):
                    taken = self._graph.call_function(take_ranges, (taken, place, part.ranges(dim)))
            self._taken[node, part] = taken
        return self._taken[node, part]


def peers(part: Part, axes: Collection[Axis]) -> tuple[int, ...]:
    """Return the indices of the parts that differ from a part along some axes only, itself included.

    >>> from autopar.capture.split.names import Name
    >>> first, second = Axis(Name(4), 1, 2), Axis(Name(4), 0, 2)
    >>> peers(Part((first, second)), [first]), peers(Part((first, second)), [second])
    ((0, 2), (2, 3))
    """
    found = [0]
    for axis in part.axes:
        own = range(axis.count) if axis in axes else (axis.index,)
        found = [index * axis.count + each for index in found for each in own]
    return tuple(found)
