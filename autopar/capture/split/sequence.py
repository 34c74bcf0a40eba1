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

Which inputs and outputs come and go in slices, and which of them are worth it:

    sequence_dims(block, 2)                           # {"embedding": 1, "block_0": 1}
    find_edges(module, block, {"embedding": 1}, 2)    # its input comes in two slices of dimension 1, one on each part

Of every input and output that a gradient may be asked of, it is the outermost dimension that parts divide evenly, but
not the number of rows, nor a dimension of a parameter. What regions alone read comes in slices only if it is read there
with parameters, by operators that could do without the rest, as the sequence is by matrices. Masks and tables of angles
are read in many layers, and are whole, and so are images that are convolved.

It has to be worth it. A tensor that is gathered for a region, and its gradient reduce-scattered, costs as much as the
sum of its gradient, and so does what leaves one. Gathering for operators that are computed whole comes on top: at most
as many numbers may be gathered for them as one tensor has that comes or goes in slices.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.capture.graph import Layer
from autopar.capture.split.analysis import Analysis, analyse, tensors_of, writing_nodes
from autopar.capture.split.choice import AttributeCut, Split, choose, numbers
from autopar.capture.split.names import Dim, MismatchError, Name, carries, leaves, resolve, size, unite
from autopar.capture.split.rules import Axis, Dims, LocalCall, OperatorCall, Part, apply_rule, local_call
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
            local = self._leaves_region(node)
            if local is not None:
                added = [each for each in local.then_args if isinstance(each, fx.Node)]
                self._name(node, {node: (_fresh_dims(self._analysis.values[node]),)}, added)
        elif node.op == "call_function" and node.target is operator.getitem:
            source, index = node.args
            if source in self.calls and isinstance(source, fx.Node) and isinstance(index, int):
                self.dims[node] = (self.dims[source][index],)
        elif node.op == "call_function":
            self._name(node, {}, node.all_input_nodes)

    def _leaves_region(self, node: fx.Node) -> LocalCall | None:
        """Return what a part calls for an operator that sums over a name, if slices of the sum can be taken."""
        part = self._regions[node]
        if not any(self._analysis.sums(node, axis.name) for axis in part.axes):
            return None
        local = local_call(self._analysis.calls[node], part)
        return local if local.then is None or local.then_broadcasts else None

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


@dataclass(frozen=True)
class Edges:
    """What comes and goes in slices, with the dimension that they are of."""

    inputs: Mapping[fx.Node, int] = field(default_factory=dict)
    outputs: Mapping[int, int] = field(default_factory=dict)
    """By place among the outputs."""

    def output_nodes(self, module: fx.GraphModule) -> Iterator[tuple[fx.Node, int]]:
        """Yield the nodes that give slices, with the dimension."""
        found = output_nodes(module)
        for place, dim in self.outputs.items():
            yield found[place], dim


NO_EDGES = Edges()
"""Where all tensors cross as a whole."""


def output_nodes(module: fx.GraphModule) -> list[fx.Node]:
    """Return what a layer gives."""
    output: Any = module.graph.output_node()
    return list(output.args[0])


def find_edges(module: fx.GraphModule, layer: Layer, sequence: Mapping[str, int], count: int) -> Edges:
    """Return what crosses the edge of a layer's module in slices.

    Args:
        module: the layer's, as it was analysed.
        layer: names its inputs and outputs.
        sequence: those that are in slices, by name, with the dimension.
        count: of slices.

    Raises:
        MismatchError: the layer has no such tensor, or slices of it would not be even.
    """
    if not sequence:
        return NO_EDGES
    inputs = dict(zip(layer.inputs, list(module.graph.find_nodes(op="placeholder"))[1:], strict=True))
    outputs = output_nodes(module)
    for name, dim in sequence.items():
        nodes = [inputs[name]] if name in inputs else []
        nodes += [node for each, node in zip(layer.outputs, outputs, strict=True) if each == name]
        if not nodes:
            raise MismatchError(f"tensor {name} is no input or output of the layer")
        if not all(_has_even_slices(node, dim, count) for node in nodes):
            raise MismatchError(f"dimension {dim} of tensor {name} has no {count} even slices")
    return Edges(
        {inputs[name]: dim for name, dim in sequence.items() if name in inputs},
        {place: sequence[name] for place, name in enumerate(layer.outputs) if name in sequence},
    )


def _has_even_slices(node: object, dim: int, count: int) -> bool:
    """Tell whether a tensor's dimension is of a length that so many parts divide; the number of rows is none."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor) or not 0 <= dim < value.dim():
        return False
    length = value.shape[dim]
    return isinstance(length, int) and length > 1 and length % count == 0


_Seeds = Sequence[tuple[str, fx.Node, int]]
"""Names of inputs and outputs, their nodes, and the dimension that slices are of."""


def sequence_dims(
    layer: Layer,
    count: int,
    earlier_cuts: Mapping[str, AttributeCut] | None = None,
    analysis: Analysis | None = None,
) -> dict[str, int]:
    """Return the dimensions along which a layer can take and give tensors in slices, by name; none if not worth it.

    Args:
        layer: as captured.
        count: of parts, and of slices.
        earlier_cuts: cuts of an earlier choice of how its parameters are split.
        analysis: of the layer, if it is there.

    Raises:
        MismatchError: a parameter cannot be cut as it was recorded.
    """
    analysis = analysis or analyse(layer)
    splits = choose(analysis, count, earlier_cuts)
    if writes_slices(analysis):
        return {}
    regions = {node for split in splits for node in split.region}
    seeds = list(_seeds(analysis, regions, layer, count))
    while seeds:
        sliced_inputs = {node: dim for _, node, dim in seeds if node.op == "placeholder"}
        found = split_sequence(analysis, splits, count, sliced_inputs, [(node, dim) for _, node, dim in seeds])
        places = {node: (place.dim, place.period) for node, place in found.places.items()}
        kept = [(name, node, dim) for name, node, dim in seeds if places.get(node) == (dim, None)]
        worth = _worth(analysis, regions, found, kept)
        kept = [seed for seed in kept if found.places[seed[1]].name in worth]
        if kept == seeds:
            break
        seeds = kept
    return {name: dim for name, _, dim in seeds}


def _seeds(
    analysis: Analysis, regions: Collection[fx.Node], layer: Layer, count: int
) -> Iterator[tuple[str, fx.Node, int]]:
    parameter_names = dict.fromkeys(
        name for dims in analysis.parameters.values() for dim in dims for name in leaves(dim)
    )
    crossing = [*zip(layer.inputs, list(analysis.module.graph.find_nodes(op="placeholder"))[1:], strict=True)]
    crossing += zip(layer.outputs, output_nodes(analysis.module), strict=True)
    for name, node in crossing:
        dim = _first_dim(analysis, node, parameter_names, count) if node in analysis.varying else None
        if dim is not None and (node.op != "placeholder" or _streams(analysis, regions, node, dim)):
            yield name, node, dim


def _streams(analysis: Analysis, regions: Collection[fx.Node], node: fx.Node, dim: int) -> bool:
    """Tell whether an input is read outside regions, or with parameters, by operators that need no other slices."""
    parameters = {each for each in analysis.dims if each.op == "get_attr" and each.target in analysis.parameters}
    with_parameters = (user for user in node.users if not parameters.isdisjoint(user.all_input_nodes))
    return any(user not in regions for user in node.users) or any(
        reads_slices(analysis, user, node, dim) for user in with_parameters
    )


def _first_dim(analysis: Analysis, node: fx.Node, parameter_names: Collection[Name], count: int) -> int | None:
    """Return the outermost dimension of which there are even slices, and which no parameter has."""
    if len(analysis.dims.get(node, ())) != 1:
        return None
    for place, dim in enumerate(analysis.dims[node][0]):
        if _has_even_slices(node, place, count) and not any(name in parameter_names for name in leaves(dim)):
            return place
    return None


def _worth(analysis: Analysis, regions: AbstractSet[fx.Node], sequence: SequenceSplit, seeds: _Seeds) -> set[Name]:
    """Return the names of which slices save something, and cost little beside what is summed without."""
    gathered, crossing, used = Counter[Name](), Counter[Name](), set(sequence.call_names.values())
    for _, node, _ in seeds:
        name = sequence.places[node].name
        crossing[name] = max(crossing[name], numbers(node))
    for node, place in sequence.places.items():
        if node in regions or not regions.isdisjoint(node.users):
            used.add(place.name)
        if any(user not in regions and user not in sequence.calls and user.op != "output" for user in node.users):
            gathered[place.name] += numbers(node)
    for source, name in _taken_of_whole(analysis, sequence):
        gathered[name] += numbers(source)
    return {name for name in used if gathered[name] <= crossing[name]}


def _taken_of_whole(analysis: Analysis, sequence: SequenceSplit) -> set[tuple[fx.Node, Name]]:
    """Return what is computed whole, with a gradient, and read in slices of a name."""
    pairs = set()
    for reader in sequence.calls:
        for source in reader.all_input_nodes:
            if source.op == "call_function" and source in analysis.varying and source not in sequence.places:
                place = sequence.slice_of(reader, source)
                pairs |= set() if place is None else {(source, place.name)}
    return pairs
