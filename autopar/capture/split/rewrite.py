"""The part of a layer that one rank of a team computes: its operators on what it has of every tensor.

Parameters are cut by indices; operators that are given sizes get the part's. Every tensor that enters a region has one
``enter`` for all who read it there, and every operator that sums over what is split has one ``leave``, after which its
bias is added. Operators outside are as they were. It takes one walk over the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from autopar.capture.graph import Layer
from autopar.capture.split.analysis import Analysis, analyse
from autopar.capture.split.choice import Split, choose
from autopar.capture.split.cuts import ParameterCut, split_dim
from autopar.capture.split.names import is_partial, split_places
from autopar.capture.split.rules import Axis, LocalCall, Part, find_rule, ranges, take_ranges
from autopar.capture.split.sums import Enter, Leave, Sums

_ENTER, _LEAVE = "enter", "leave"


@dataclass(frozen=True, eq=False)
class Cut:
    """What a part has of a parameter."""

    dim: int
    indices: torch.Tensor
    """Along that dimension, ascending."""


@dataclass(frozen=True, eq=False)
class LayerPart:
    """A layer's module for one part, with parameters of its own."""

    module: fx.GraphModule
    cuts: Mapping[str, Cut]
    """Of parameters that are cut, by attribute; others are whole, and have whole gradients on every part."""

    @property
    def summing_parts(self) -> frozenset[tuple[int, ...]]:
        """The sets of parts over which it sums."""
        calls = (node for node in self.module.graph.nodes if node.op == "call_module")
        return frozenset(node.args[1] for node in calls if node.target in (_ENTER, _LEAVE))


def split_layer(
    layer: Layer, sums: Sums, index: int, count: int, recorded: Mapping[str, ParameterCut] | None = None
) -> LayerPart:
    """Return a layer's part of so many.

    Args:
        layer: as captured.
        sums: the sums among parts: each part's forwards and backwards call them in the same order.
        index: which part, from 0.
        count: how many parts there are.
        recorded: cuts of an earlier choice, which this one repeats.

    Raises:
        MismatchError: a parameter cannot be cut as it was recorded.
    """
    # Values of indices are asked for, also where a layer is split to be run on fake tensors.
    with unset_fake_temporarily():
        analysis = analyse(layer)
        return rewrite(analysis, choose(analysis, count, recorded), sums, index)


def rewrite(analysis: Analysis, splits: Sequence[Split], sums: Sums, index: int) -> LayerPart:
    """Return a part of an analysed layer; ``splits`` are what :func:`choose` gives."""
    parts = [split.part(index) for split in splits]
    cuts = {attribute: cut for attribute in analysis.parameters if (cut := _cut(analysis, attribute, parts))}
    regions = {node: part for split, part in zip(splits, parts, strict=True) for node in split.region}
    graph = _Rewrite(analysis, regions).run()
    attributes: dict[str, Any] = {_ENTER: Enter(sums), _LEAVE: Leave(sums)}
    attributes |= _attributes(analysis, cuts)
    return LayerPart(fx.GraphModule(attributes, graph), cuts)


def _cut(analysis: Analysis, attribute: str, parts: Sequence[Part]) -> Cut | None:
    dims = analysis.parameters[attribute]
    for part in parts:
        at = split_dim(dims, part)
        if at is not None:
            return Cut(at, part.positions(dims[at]))
    return None


def _attributes(analysis: Analysis, cuts: Mapping[str, Cut]) -> dict[str, Any]:
    """Return what the graph reads of its module; parameters are copies, and remain one where they were."""
    found: dict[str, Any] = {}
    copies: dict[int, nn.Parameter] = {}
    for node in analysis.module.graph.nodes:
        if node.op != "get_attr":
            continue
        attribute = str(node.target)
        value = operator.attrgetter(attribute)(analysis.module)
        if attribute in analysis.parameters:
            value = copies.setdefault(id(value), _parameter_part(value, cuts.get(attribute)))
        found[attribute] = value
    return found


def _parameter_part(parameter: nn.Parameter, cut: Cut | None) -> nn.Parameter:
    value = parameter.detach()
    value = value.clone() if cut is None else value.index_select(cut.dim, cut.indices.to(value.device))
    return nn.Parameter(value, requires_grad=parameter.requires_grad)


class _Rewrite:
    """A walk over a graph that makes the graph of a part."""

    def __init__(self, analysis: Analysis, regions: Mapping[fx.Node, Part]) -> None:
        self._analysis, self._regions = analysis, regions
        self._graph = fx.Graph()
        self._made: dict[fx.Node, fx.Node] = {}
        """What stands for a node of the whole graph."""
        self._entered: dict[tuple[fx.Node, tuple[Any, ...]], fx.Node] = {}
        self._taken: dict[tuple[fx.Node, Part], fx.Node] = {}

    def run(self) -> fx.Graph:
        """Return the part's graph."""
        for node in self._analysis.module.graph.nodes:
            part = self._regions.get(node)
            if part is None:
                self._made[node] = self._graph.node_copy(node, self._made.__getitem__)
            else:
                self._made[node] = self._call(node, part)
        self._graph.lint()
        return self._graph

    def _call(self, node: fx.Node, part: Part) -> fx.Node:
        local = self._local_call(node, part)
        args, kwargs = fx.map_arg((local.args, dict(local.kwargs)), lambda each: self._inside(each, part))
        made = self._graph.call_function(local.target, args, kwargs)
        if not self._sums(node, part):
            return made
        made = self._graph.call_module(_LEAVE, (made, peers(part, part.axes)))
        if local.then is None:
            return made
        return self._graph.call_function(local.then, (made, *fx.map_arg(local.then_args, self._made.__getitem__)))

    def _sums(self, node: fx.Node, part: Part) -> bool:
        return any(self._analysis.sums(node, axis.name) for axis in part.axes)

    def _local_call(self, node: fx.Node, part: Part) -> LocalCall:
        rule = find_rule(node.target)
        if rule is None or rule.local is None:
            return LocalCall(node.target, node.args, node.kwargs)
        return rule.local(self._analysis.calls[node], part)

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
        """Sum the gradient of a tensor over the parts along some axes: one sum for all who read it."""
        if node not in self._analysis.varying or not axes:
            return self._made[node]
        return self._enter_once(node, self._made[node], (peers(part, axes),))

    def _enter_pieces(self, node: fx.Node, tensor: fx.Node, part: Part) -> fx.Node:
        """Sum the gradient of those pieces of a parameter that are not split, where others are."""
        if node not in self._analysis.varying:
            return tensor
        for axis in part.axes:
            for place, dim in enumerate(self._analysis.dims[node][0]):
                if is_partial(dim, axis.name):
                    whole = ~split_places(dim, axis.name)[part.positions(dim)]
                    rows = ranges(whole.nonzero().flatten())
                    tensor = self._enter_once(node, tensor, (peers(part, [axis]), place, rows))
        return tensor

    def _enter_once(self, node: fx.Node, tensor: fx.Node, args: tuple[Any, ...]) -> fx.Node:
        key = (node, args)
        if key not in self._entered:
            self._entered[key] = self._graph.call_module(_ENTER, (tensor, *args))
        return self._entered[key]

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
