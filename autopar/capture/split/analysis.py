"""Which dimensions of a layer's tensors are one and the same, and which of them can be split.

    x = F.gelu(F.linear(x, up))     # the rows of ``up`` are the last dimension of x ...
    return F.linear(x, down)        # ... and the columns of ``down``, which are summed over

Operators are visited in their order. Each has a rule that names the dimensions of what it gives by those of what it is
given, and says which it sums over, and which nobody can split. An operator without a rule reads the whole of what it is
given, and so does the edge of the layer, over which tensors go as a whole: that is blocked. What such an operator
gives, inputs of the layer and buffers are there as a whole, and any part can be taken of them. What is left can be
split: both matrices above by the dimension between them. It takes nearly as many steps as there are dimensions in the
graph.

Before, operators that write into tensors become those that give new ones, where nobody can tell:

    x.add_(y)      # where x is read no more, neither itself nor what shares its memory: x + y

What remains writes as it did, and the layer is not split.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopar.capture.graph import Layer
from autopar.capture.model.effects import Storages
from autopar.capture.split.names import MismatchError, Name, block, carries, is_partial, leaves, resolve
from autopar.capture.split.rules import Dims, OperatorCall, apply_rule
from autopar.capture.split.rules.rule import new_dims


class Analysis:
    """What is known of a layer's dimensions once all operators were visited."""

    def __init__(self, module: fx.GraphModule, parameters: Collection[str]) -> None:
        """Visit the nodes of a graph; ``parameters`` are attributes that may be split."""
        self.module = module
        """The layer's; where it writes into tensors that nobody reads any more, it gives new ones."""
        self.parameters: dict[str, Dims] = {}
        """By attribute; one that has several attributes has the same dimensions in all."""
        self.dims: dict[fx.Node, tuple[Dims, ...]] = {}
        """Of every node that gives tensors, those of each."""
        self.calls: dict[fx.Node, OperatorCall] = {}
        """Of operators with a rule."""
        self.obstacles: dict[fx.Node, str] = {}
        """Why operators are computed whole: they have no rule, or it does not apply."""
        self.sources: set[fx.Node] = set()
        """What is there as a whole: the layer's inputs, buffers, and what operators give that are computed whole."""
        self.values: dict[fx.Node, Any] = {}
        """What nodes give: tensors that may have no values."""
        self.varying: set[fx.Node] = set()
        """What gradients may be asked of."""
        self.writes = any(writing_nodes(each) for each in module.modules() if isinstance(each, fx.GraphModule))
        """Whether the layer, or a graph inside it, writes into tensors."""
        self.choices: dict[object, Any] = {}
        """What :func:`.choice.choose` gave."""
        self._regions: dict[tuple[Name, ...], frozenset[fx.Node] | str] = {}
        """By names; or why there is none."""
        self._attributes = set(parameters)
        self._tensors: dict[int, Dims] = {}
        """By the identity of a tensor that the module holds."""
        for node in module.graph.nodes:
            self._enter(node)
            if self._may_have_gradient(node):
                self.varying.add(node)

    def splits(self, node: fx.Node, name: Name) -> bool:
        """Tell whether splitting a name splits what a node gives, or some of it.

        Raises:
            MismatchError: it would split two dimensions of a tensor.
        """
        # All are asked: each may refuse.
        return any([_split_dims(dims, name) for dims in self.dims.get(node, ())])  # noqa: C419

    def sums(self, node: fx.Node, name: Name) -> bool:
        """Tell whether parts of a name give summands of what a node gives.

        Raises:
            MismatchError: it sums over pieces that are split and others that are not.
        """
        summed = self.calls[node].summed if node in self.calls else []
        if any(is_partial(dim, name) for dim in summed):
            raise MismatchError("only some pieces of what is summed over would be split")
        return any([carries(dim, name) for dim in summed])  # noqa: C419

    def region(self, names: Sequence[Name]) -> frozenset[fx.Node]:
        """Return the operators that are computed in parts where names are split.

        Some give what is the same on every part: a piece that is not split, of a tensor that is. Of its gradient, parts
        have summands, so that all operators are inside up to those that put it together with what is split.

        Raises:
            MismatchError: they cannot be split; or an operator sums over one of several that are split together.
        """
        names = tuple(names)
        if names not in self._regions:
            # It is the same for any number of parts.
            try:
                self._regions[names] = self._find_region(names)
            except MismatchError as error:
                self._regions[names] = str(error)
        found = self._regions[names]
        if isinstance(found, str):
            raise MismatchError(found)
        return found

    def _find_region(self, names: Sequence[Name]) -> frozenset[fx.Node]:
        inside: set[fx.Node] = set()
        alike: set[fx.Node] = set()
        for node in self.dims:
            if node.op != "call_function" or node in self.sources:
                continue
            # All are asked: each may refuse.
            reads_parts = any([self._is_inside(node, name) for name in names])  # noqa: C419
            if reads_parts or not alike.isdisjoint(node.all_input_nodes):
                inside.add(node)
                if node in self.varying and not any(self.splits(node, n) or self.sums(node, n) for n in names):
                    alike.add(node)
        summing = {node for node in inside if any(self.sums(node, name) for name in names)}
        if any(user not in inside or user in summing for node in alike for user in node.users):
            raise MismatchError("what is the same on every part, with summands of its gradient, would leave a region")
        self._check_together(names, inside)
        return frozenset(inside)

    def _check_together(self, names: Sequence[Name], inside: Collection[fx.Node]) -> None:
        if any(len({self.sums(node, name) for name in names}) > 1 for node in inside):
            raise MismatchError("an operator sums over some of the names only")
        for dims in self.parameters.values():
            if sum(any(carries(dim, name) for name in names) for dim in dims) > 1:
                raise MismatchError("two dimensions of a parameter would be cut")

    def _is_inside(self, node: fx.Node, name: Name) -> bool:
        """Tell whether an operator reads or makes parts of a name, each of which is kept or summed over, not both."""
        makes, sums = self.splits(node, name), self.sums(node, name)
        # All are asked: each may refuse.
        reads = [self.splits(source, name) for source in node.all_input_nodes]
        if makes and sums:
            raise MismatchError(f"{node.target} keeps a dimension that it sums over")
        for dim in self.calls[node].single_name_dims if node in self.calls else ():
            if carries(dim, name) and resolve(dim) != (name,):
                raise MismatchError(f"{node.target} counts the indices of a dimension that is more than this")
        return any(reads) or makes or sums

    def candidates(self) -> list[Name]:
        """Return the names in parameters that nothing forbids to split, in the order of the graph."""
        found = (name for dims in self.parameters.values() for dim in dims for name in leaves(dim))
        return [name for name in dict.fromkeys(found) if name.obstacle is None]

    def _enter(self, node: fx.Node) -> None:
        """Name the dimensions of what a node gives."""
        if node.op == "get_attr":
            self._read_attribute(node)
        elif node.op == "output":
            for source in node.all_input_nodes:
                self._block(source, "it crosses the layer's edge")
        else:
            self.values[node] = node.meta.get("val")
            if node.op == "call_function":
                self._call(node)
            else:
                self._name_anew(node)

    def _may_have_gradient(self, node: fx.Node) -> bool:
        """Tell whether a gradient may be asked of a node: of real or complex numbers, made of such or of parameters."""
        if node.op == "get_attr":
            return node.target in self.parameters and bool(self.values[node].requires_grad)
        if not any(each.is_floating_point() or each.is_complex() for each in tensors_of(node.meta.get("val"))):
            return False
        return node.op == "placeholder" or any(source in self.varying for source in node.all_input_nodes)

    def _read_attribute(self, node: fx.Node) -> None:
        value = operator.attrgetter(str(node.target))(self.module)
        self.values[node] = value
        if not isinstance(value, torch.Tensor):
            return
        dims = self._tensors.setdefault(id(value), new_dims(value))
        self.dims[node] = (dims,)
        if node.target in self._attributes:
            self.parameters[str(node.target)] = dims
        else:
            self._add_source(node)

    def _call(self, node: Any) -> None:  # noqa: ANN401
        if not tensors_of(self.values[node]):
            return
        if node.target is operator.getitem:
            source, index = node.args
            if source in self.calls:
                self.dims[node] = (self.dims[source][index],)
            else:
                self._name_anew(node)
            return
        try:
            self.calls[node], self.dims[node] = apply_rule(node, self.dims, self.values)
        except MismatchError as error:
            self.obstacles[node] = str(error)
            for source in node.all_input_nodes:
                self._block(source, f"{node.target}: {error}")
            self._name_anew(node)

    def _name_anew(self, node: fx.Node) -> None:
        tensors = tensors_of(self.values[node])
        if tensors:
            self.dims[node] = tuple(map(new_dims, tensors))
            self._add_source(node)

    def _add_source(self, node: fx.Node) -> None:
        """Note that a tensor is there as a whole; where tensors are written into, parts taken before would be old."""
        self.sources.add(node)
        if self.writes:
            self._block(node, "the layer writes into tensors")

    def _block(self, node: fx.Node, obstacle: str) -> None:
        for dims in self.dims.get(node, ()):
            for dim in dims:
                block(dim, obstacle)


def _split_dims(dims: Dims, name: Name) -> bool:
    found = [carries(dim, name) for dim in dims]
    if sum(found) > 1:
        raise MismatchError("two dimensions of a tensor would be split")
    return any(found)


def analyse(layer: Layer) -> Analysis:
    """Find out which dimensions of a captured layer are one, and which can be split.

    Raises:
        MismatchError: the layer has no operators to read: ``layers(model)`` listed it.
    """
    if not isinstance(layer.module, fx.GraphModule):
        raise MismatchError("the layer is a module as it is, whose operators were not captured")
    return Analysis(without_writes(layer.module), layer.parameters)


def writing_nodes(module: fx.GraphModule) -> list[fx.Node]:
    """Return the operators of a graph that write into tensors."""
    schemas = ((node, getattr(node.target, "_schema", None)) for node in module.graph.nodes)
    return [node for node, schema in schemas if schema is not None and schema.is_mutable]


def tensors_of(value: object) -> list[torch.Tensor]:
    """Return the tensors that a node gives."""
    values = value if isinstance(value, (tuple, list)) else [value]
    return [each for each in values if isinstance(each, torch.Tensor)]


def without_writes(module: fx.GraphModule) -> fx.GraphModule:
    """Return a module whose operators give new tensors instead of writing, as far as that is the same.

    Its attributes are the same ones. It takes the number of operators that write, times those that share memory.
    """
    nodes = list(module.graph.nodes)
    writes = [node for node in nodes if new_operator(node) is not None]
    if not writes:
        return module
    places = {node: place for place, node in enumerate(nodes)}
    storages = Storages(nodes)
    roots = {node: storages.root(node) for node in nodes}
    unseen = {
        node for node in writes if _is_unseen(node, [each for each in nodes if roots[each] is roots[node]], places)
    }
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in nodes:
        made[node] = graph.node_copy(node, made.__getitem__)
        if node in unseen:
            made[node].target = new_operator(node)
    return fx.GraphModule(module, graph)


def new_operator(node: fx.Node) -> Any:  # noqa: ANN401
    """Return the operator that gives what this one writes into its first argument; none if there is none."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.name.endswith("_"):
        return None
    name = target._schema.name.removeprefix("aten::").removesuffix("_")
    found = getattr(getattr(torch.ops.aten, name, None), target._overloadname, None)
    if found is None or found._schema.is_mutable or _options(found) != _options(target) or not _keeps_type(node):
        return None
    return found


def _options(operator: torch._ops.OpOverload) -> list[str]:
    """Return the names of all arguments but the first, which is what is written into."""
    return [argument.name for argument in operator._schema.arguments[1:]]


def _keeps_type(node: fx.Node) -> bool:
    """Tell whether a new tensor would have the type of the one that is written into: others do not widen it."""
    values = [source.meta.get("val") for source in node.all_input_nodes]
    types = [value.dtype for value in values if isinstance(value, torch.Tensor)]
    return bool(types) and types[0].is_floating_point and set(types[1:]) <= {types[0], torch.bool}


def _is_unseen(node: fx.Node, sharing: Iterable[fx.Node], places: Mapping[fx.Node, int]) -> bool:
    """Tell whether nobody reads a tensor after it was written into, but by what the operator gives."""
    before = [each for each in sharing if places[each] < places[node]]
    if any(each.op != "call_function" for each in before):
        return False
    return all(places[user] <= places[node] for each in before for user in each.users)
