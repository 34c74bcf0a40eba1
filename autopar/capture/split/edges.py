"""Which inputs and outputs of a layer come and go in slices of the sequence, and which of them are worth it.

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

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.capture.graph import Layer
from autopar.capture.split.analysis import Analysis, analyse
from autopar.capture.split.choice import AttributeCut, Split, choose, numbers
from autopar.capture.split.names import MismatchError, Name, leaves
from autopar.capture.split.sequence import SequenceSplit, reads_slices, split_sequence, writes_slices


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


def _input_nodes(module: fx.GraphModule) -> list[fx.Node]:
    """Return a layer's inputs, behind the number of rows."""
    return [node for node in module.graph.nodes if node.op == "placeholder"][1:]


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
    inputs = dict(zip(layer.inputs, _input_nodes(module), strict=True))
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


def sequence_dims(layer: Layer, count: int, earlier_cuts: Mapping[str, AttributeCut] | None = None) -> dict[str, int]:
    """Return the dimensions along which a layer can take and give tensors in slices, by name; none if not worth it.

    Args:
        layer: as captured.
        count: of parts, and of slices.
        earlier_cuts: cuts of an earlier choice of how its parameters are split.

    Raises:
        MismatchError: a parameter cannot be cut as it was recorded.
    """
    analysis = analyse(layer)
    return choose_slices(analysis, choose(analysis, count, earlier_cuts), layer.inputs, layer.outputs, count)


def choose_slices(
    analysis: Analysis, splits: Sequence[Split], inputs: Sequence[str], outputs: Sequence[str], count: int
) -> dict[str, int]:
    """Do so for an analysed layer whose splits were chosen, with names for its inputs and outputs."""
    if writes_slices(analysis):
        return {}
    regions = {node for split in splits for node in split.region}
    seeds = list(_seeds(analysis, regions, inputs, outputs, count))
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
    analysis: Analysis, regions: Collection[fx.Node], inputs: Sequence[str], outputs: Sequence[str], count: int
) -> Iterator[tuple[str, fx.Node, int]]:
    parameter_names = dict.fromkeys(
        name for dims in analysis.parameters.values() for dim in dims for name in leaves(dim)
    )
    crossing = [*zip(inputs, _input_nodes(analysis.module), strict=True)]
    crossing += zip(outputs, output_nodes(analysis.module), strict=True)
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
