"""Sequence parallelism: outside regions, every part has a slice of the sequence of what the regions read and give.

    x = x + attention(norm(x))      # norm and sum on slices; norm(x) is gathered, what attention gives reduce-scattered

A second walk over an analysed layer whose splits were chosen. Regions are opaque: what they read does not count, as it
is gathered for them, and what leaves them has new names. The layer's inputs may come in slices. Every reader of other
tensors that are there as a whole (parameters, buffers, what is computed whole) may take another slice of them, or all,
so that each has names of its own. Operators that neither read parameters nor what came in are left whole.

A name that slices are of must be kept by every operator that reads or makes it. One that does not is computed whole, of
gathered tensors, and the walk begins anew, with the operator opaque too. Whether one keeps a name is asked of its rule
once more at the end, of new names that are joined as those in the layer are. It takes a walk for every set of operators
that are found out not to; most layers have none. (Korthikanti et al. 2022, section 4.2.2.)
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import fx

from autopar.capture.split.analysis import Analysis, tensors_of, writing_nodes
from autopar.capture.split.choice import Split
from autopar.capture.split.names import Dim, MismatchError, Name, carries, leaves, resolve, size, unite
from autopar.capture.split.rules import Axis, Dims, OperatorCall, Part, apply_rule, local_call
from autopar.capture.split.rules.rule import COUNTS_ROWS, ROWS, broadcast, new_dim, plain_size

_Reads = Mapping[fx.Node, tuple[Dims, ...]]
"""The dimensions of what an operator is given, as it reads them."""


class SlicePlace(NamedTuple):
    """Where a tensor has a name that slices are of."""

    dim: int
    name: Name
    period: int | None
    """After how many indices those of a slice come again, if other names are outside of it."""


@dataclass(frozen=True, eq=False)
class SequenceSplit:
    """What is computed in slices outside regions."""

    names: frozenset[Name]
    places: Mapping[fx.Node, SlicePlace]
    """Of nodes that give slices."""
    calls: Mapping[fx.Node, OperatorCall]
    """Of operators outside regions that are computed in slices."""
    call_names: Mapping[fx.Node, Name]
    """Of those, whose slices."""
    reads: Mapping[fx.Node, _Reads]
    """How those, and operators that end a region, read what they are given."""

    def slice_of(self, reader: fx.Node, source: fx.Node) -> SlicePlace | None:
        """Return the slice that a reader takes of what is there as a whole, if it does not need all."""
        found = self.reads[reader].get(source, ())
        return _find_place(found[0], self.names) if len(found) == 1 else None


NOTHING = SequenceSplit(frozenset(), {}, {}, {}, {})
"""Where all tensors outside regions are whole."""


def _find_place(dims: Dims, names: Collection[Name]) -> SlicePlace | None:
    """Return where a tensor has one of some names.

    Raises:
        MismatchError: it has several, or one of them twice, or in pieces of a dimension.
    """
    found: list[SlicePlace] = []
    for at, dim in enumerate(dims):
        product = resolve(dim)
        for place, name in enumerate(product):
            if name in names:
                found.append(SlicePlace(at, name, size(product[place:]) if place else None))
            elif any(carries(piece, each) for piece in name.pieces or () for each in names):
                raise MismatchError("some indices of a dimension would be in slices")
    if len(found) > 1:
        raise MismatchError("two dimensions of a tensor would be in slices")
    return found[0] if found else None


def split_sequence(
    analysis: Analysis,
    splits: Sequence[Split],
    count: int,
    inputs: Mapping[fx.Node, int],
    outputs: Iterable[tuple[fx.Node, int]],
) -> SequenceSplit:
    """Find what can be computed in slices.

    Args:
        analysis: of the layer.
        splits: those that were chosen.
        count: of parts.
        inputs: those that come in slices, with the dimension.
        outputs: nodes that are to give slices, with the dimension; they remain whole where that cannot be.
    """
    seeds = [*inputs.items(), *outputs]
    whole: set[fx.Node] = set()
    while True:
        walk = _SequenceWalk(analysis, splits, inputs, whole)
        names = frozenset(name for node, dim in seeds for name in walk.names_at(node, dim, count))
        opaque = walk.stopped | {node for node in walk.dims if not walk.keeps(node, names, count)}
        if not opaque:
            return walk.result(names)
        whole |= opaque


class _SequenceWalk:
    """What the operators outside regions make of names, if some of them are computed whole."""

    def __init__(
        self,
        analysis: Analysis,
        splits: Sequence[Split],
        inputs: Collection[fx.Node],
        whole: Collection[fx.Node],
    ) -> None:
        self._regions = {node: split.parts[0] for split in splits for node in split.region}
        self._analysis, self._whole = analysis, whole
        self.dims: dict[fx.Node, tuple[Dims, ...]] = {}
        """Of inputs that come in slices, and of what operators give that may be computed in slices."""
        self.calls: dict[fx.Node, OperatorCall] = {}
        self.reads: dict[fx.Node, _Reads] = {}
        self._inputs: dict[fx.Node, tuple[Dims, ...]] = {}
        """Of inputs that come as a whole."""
        self.stopped: set[fx.Node] = set()
        """Operators that have no rule, or whose rule does not apply."""
        derived = _derived_nodes(analysis)
        for node in analysis.module.graph.nodes:
            if node in derived:
                self._enter(node, inputs)

    def _enter(self, node: fx.Node, inputs: Collection[fx.Node]) -> None:
        if node in self._whole:
            return
        if node.op == "placeholder" and node in inputs:
            self.dims[node] = (_fresh_dims(self._analysis.values[node]),)
        elif node.op == "call_function" and node in self._regions:
            if self._leaves_region(node):
                self._name(node, {node: (_fresh_dims(self._analysis.values[node]),)}, self._then_args(node))
        elif node.op == "call_function" and node.target is operator.getitem:
            source, index = node.args
            if source in self.calls and isinstance(source, fx.Node) and isinstance(index, int):
                self.dims[node] = (self.dims[source][index],)
        elif node.op == "call_function":
            self._name(node, {}, node.all_input_nodes)

    def _leaves_region(self, node: fx.Node) -> bool:
        """Tell whether an operator sums over a name, and whether slices of the sum can be taken."""
        part = self._regions[node]
        if not any(self._analysis.sums(node, axis.name) for axis in part.axes):
            return False
        local = local_call(self._analysis.calls[node], part)
        return local.then is None or local.then_broadcasts

    def _then_args(self, node: fx.Node) -> list[fx.Node]:
        then_args = local_call(self._analysis.calls[node], self._regions[node]).then_args
        return [each for each in then_args if isinstance(each, fx.Node)]

    def _name(self, node: fx.Node, own: _Reads, sources: Iterable[fx.Node]) -> None:
        """Name the dimensions of what an operator gives, by those that it reads."""
        try:
            reads = {**own, **{source: self._read(source) for source in sources}}
            call, dims = self._output_dims(node, reads)
        except MismatchError:
            self.stopped.add(node)
            return
        # Rules ask for the dimensions of what an operator gives, too.
        reads.setdefault(node, dims)
        self.reads[node], self.dims[node] = reads, dims
        if call is not None:
            self.calls[node] = call

    def _read(self, source: fx.Node) -> tuple[Dims, ...]:
        if source in self.dims:
            return self.dims[source]
        fresh = tuple(map(_fresh_dims, tensors_of(self._analysis.values[source])))
        if source.op == "placeholder" and source in self._analysis.varying and source not in self._whole:
            return self._inputs.setdefault(source, fresh)
        return fresh

    def _output_dims(self, node: fx.Node, reads: _Reads) -> tuple[OperatorCall | None, tuple[Dims, ...]]:
        """Return the dimensions of what an operator gives, or of a region's sum with what is added to it."""
        if node in self._regions:
            return None, (broadcast(dims for outputs in reads.values() for dims in outputs),)
        return apply_rule(node, reads, self._analysis.values)

    def names_at(self, node: fx.Node, dim: int, count: int) -> Iterator[Name]:
        """Yield the outermost name of a dimension, if parts divide it evenly."""
        if node not in self.dims or len(self.dims[node]) != 1:
            return
        for name in resolve(self.dims[node][0][dim])[:1]:
            if name.size % ROWS and name.size % count == 0:
                yield name

    def keeps(self, node: fx.Node, names: Collection[Name], count: int) -> bool:
        """Tell whether slices of what an operator reads give slices of what it gives; nothing it does not slice."""
        reads = self.reads.get(node, {})
        try:
            used = {name for name in names if any(_has(dims, name) for dims in self._dims_around(node))}
            for dims in self._dims_around(node):
                _find_place(dims, names)
            return all(node not in self.reads or self._keeps_name(node, name, reads, count) for name in used)
        except MismatchError:
            return False

    def _dims_around(self, node: fx.Node) -> Iterator[Dims]:
        for outputs in (self.dims[node], *self.reads.get(node, {}).values()):
            yield from outputs

    def _keeps_name(self, node: fx.Node, name: Name, reads: _Reads, count: int) -> bool:
        """Ask an operator's rule, of copies of all names."""
        copies = _NameCopies(name)
        own = {source: tuple(map(copies.dims, outputs)) for source, outputs in reads.items()}
        expected = tuple(map(copies.dims, self.dims[node]))
        call, found = self._output_dims(node, own)
        for dims, others in zip(found, expected, strict=True):
            for dim, other in zip(dims, others, strict=True):
                unite(dim, other)
        sliced = resolve((copies.name,))
        if len(sliced) != 1 or sliced[0].obstacle or sliced[0].pieces is not None:
            return False
        if call is not None:
            if any(_has((dim,), sliced[0]) for dim in call.summed):
                return False
            local_call(call, Part((Axis(sliced[0], 0, count),)))
        return all(_find_place(dims, sliced) for dims in found)

    def result(self, names: frozenset[Name]) -> SequenceSplit:
        """Return what is computed in slices of some names."""
        found = {node: _find_place(outputs[0], names) for node, outputs in self.dims.items()}
        places = {node: place for node, place in found.items() if place is not None}
        calls = {node: call for node, call in self.calls.items() if node in places}
        single = {node: place for node, place in places.items() if len(self.dims[node]) == 1}
        return SequenceSplit(names, single, calls, {node: places[node].name for node in calls}, self.reads)


class _NameCopies:
    """Copies of names with what was found out about them; the name that is asked about has no pieces, nor obstacles."""

    def __init__(self, name: Name) -> None:
        self.name = Name(name.size)
        self._made = {name: self.name}

    def dims(self, dims: Dims) -> Dims:
        """Return the copies of a tensor's dimensions."""
        return tuple(map(self._dim, dims))

    def _dim(self, dim: Dim) -> Dim:
        return tuple(self._copy(name) for name in resolve(dim))

    def _copy(self, name: Name) -> Name:
        if name not in self._made:
            self._made[name] = made = Name(name.size)
            made.pieces = None if name.pieces is None else tuple(map(self._dim, name.pieces))
        return self._made[name]


def _has(dims: Dims, name: Name) -> bool:
    """Tell whether a tensor has a name, in pieces or not; of one that has pieces, some count, too."""
    own = {name, *leaves((name,))}
    return any(each is name or each in own for dim in dims for each in (*resolve(dim), *leaves(dim)))


def reads_slices(analysis: Analysis, reader: fx.Node, source: fx.Node, dim: int) -> bool:
    """Tell whether an operator could be given slices of a dimension and give slices, whatever else is in its layer."""
    values = analysis.values
    reads = {node: tuple(map(_fresh_dims, tensors_of(values[node]))) for node in reader.all_input_nodes}
    try:
        call, dims = apply_rule(reader, reads, values)
    except MismatchError:
        return False
    names = resolve(reads[source][0][dim])
    free = len(names) == 1 and names[0].obstacle is None and not any(_has((each,), names[0]) for each in call.summed)
    return free and all(_has(each, names[0]) for each in dims)


def _derived_nodes(analysis: Analysis) -> set[fx.Node]:
    """Return the tensors that are parameters or inputs with fractions, or made of such."""
    found: set[fx.Node] = set()
    for node in analysis.module.graph.nodes:
        made = node in analysis.varying or not found.isdisjoint(node.all_input_nodes)
        if made and tensors_of(analysis.values.get(node)):
            found.add(node)
    return found


def writes_slices(analysis: Analysis) -> bool:
    """Tell whether a layer writes into what may be in slices; of the rest, every reader takes its own."""
    if not analysis.writes:
        return False
    derived, writing = _derived_nodes(analysis), writing_nodes(analysis.module)
    inner = any(isinstance(each, fx.GraphModule) for each in analysis.module.children())
    return inner or any(not derived.isdisjoint((node, *node.all_input_nodes)) for node in writing)


def _fresh_dims(value: torch.Tensor) -> Dims:
    """Return new dimensions of a tensor; where one is rows times a number, it is a product of both."""
    return tuple(map(_fresh_dim, value.shape))


def _fresh_dim(length: int | torch.SymInt) -> Dim:
    times, rest = divmod(plain_size(length), ROWS)
    if rest or times < 2:
        return new_dim(plain_size(length), None if isinstance(length, int) else COUNTS_ROWS)
    return (*new_dim(ROWS), Name(times))
