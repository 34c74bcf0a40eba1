"""Shorten: the graph of a captured model for shorter samples, on which checks take little time.

A Transformer that is captured from samples of 1,024 tokens is checked on samples of 16. The model is exported once more
with lengths free. Where that export has the operators of the first in the same order, and its numbers for full samples
are the first one's, the first graph is given the numbers for short samples. So both graphs are the same but for
lengths, and the model allows the short ones, by the guards of the export.

Of every sample the same places are kept: some where samples differ in what is padded or left out, for that is what
losses are divided by, and others evenly spread. Samples that differ so in their numbers still do when they are short.

A check that fails on short samples says nothing: it is made again on whole ones.
"""

from __future__ import annotations

import functools
import gc
import operator
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram

from autopar.capture.graph import LayerGraph
from autopar.capture.layers.build import SegmentedProgram
from autopar.capture.model.batch import named_tensors, rebuild

SHORTEST = 16
"""No length is shortened below this."""
_LONG = 1e9
"""Multiplications of a forward of the example, from which checks are made on fewer samples."""
WORTH = 3e10
"""From which another export takes less time than whole samples."""
_PATCH = 256
"""Pixels of an image for which a parameter is applied once."""
_IMAGE = 4
"""A batch of images has so many dimensions."""
_SLICE, _ALIAS = torch.ops.aten.slice.Tensor, torch.ops.aten.alias.default


class DifferentError(Exception):
    """The two exports are not the same but for lengths; says where."""


def is_long(module: nn.Module, tensors: Mapping[str, torch.Tensor], least: float = _LONG) -> bool:
    """Tell whether a forward of a batch takes so many multiplications, at a rough guess."""
    parameters = sum(parameter.numel() for parameter in module.parameters())
    return parameters * max(map(_places_of, tensors.values())) > least


def _places_of(tensor: torch.Tensor) -> float:
    """Return how often a parameter is applied to a tensor: for every token, for every patch of an image."""
    sizes = sorted(tensor.shape[1:])
    several = sizes[-1] * sizes[-2] / _PATCH if len(sizes) > 2 else 0
    return float(tensor.shape[0] * max(several, *sizes[-1:], 1))


def free_dims(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[int]]:
    """Return the dimensions that may be lengths, by tensor: of tokens and sounds, for images take long to export so."""
    return {
        name: [dim for dim, size in enumerate(tensor.shape) if dim and size >= 2 * SHORTEST]
        for name, tensor in tensors.items()
        if tensor.dim() < _IMAGE
    }


@dataclass(frozen=True, eq=False)
class Shortening:
    """Which lengths of samples are free, and what they are shortened to."""

    program: ExportedProgram
    """With lengths free."""
    dims: Mapping[str, Mapping[int, sympy.Symbol]]
    """By tensor of a batch and dimension."""
    full: Mapping[sympy.Symbol, int]
    short: Mapping[sympy.Symbol, int]
    graph: LayerGraph | None = None
    """The captured model for short samples."""

    def tensors(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors of whole samples at the places that are kept."""
        found = dict(tensors)
        for symbol, length in self.short.items():
            sliced = [(name, dim) for name, dims in self.dims.items() for dim, each in dims.items() if each == symbol]
            if any(found[name].shape[dim] != self.full[symbol] for name, dim in sliced):
                raise DifferentError("samples are of other lengths")
            kept = _places([found[name].movedim(dim, 1) for name, dim in sliced if found[name].dim() == 2], length)
            for name, dim in sliced:
                places = kept if kept is not None else _spread(self.full[symbol], length)
                found[name] = found[name].index_select(dim, places)
        return found

    def batch(self, batch: object) -> object:
        """Return a batch of whole samples at the places that are kept."""
        return rebuild(batch, self.tensors(named_tensors(batch)))

    def shorten(self, segmented_program: SegmentedProgram) -> SegmentedProgram:
        """Return a program, exported from whole samples and cut into layers, for short ones.

        Raises:
            DifferentError: the program is not the one with free lengths.
        """
        program = segmented_program.program
        _same_constants(program, self.program)
        numbers = _Numbers(segmented_program.inputs.symbol, self.full, self.short, _environment(program))
        pairs = _Rewriting(numbers, nested=False)
        module = pairs.rewrite(program.graph_module, self.program.graph_module)
        found = ExportedProgram(
            root=module,
            graph=module.graph,
            graph_signature=program.graph_signature,
            state_dict=program.state_dict,
            range_constraints=program.range_constraints,
            module_call_graph=program.module_call_graph,
            constants=program.constants,
            verifiers=program.verifiers,
        )
        users = {name: {user.name for user in node.users} for name, node in pairs.slices.items()}
        segments = tuple(
            replace(part, nodes=(*part.nodes, *_read_slices(set(part.nodes), users)))
            for part in segmented_program.segments
        )
        return replace(segmented_program, program=found, segments=segments)


def _read_slices(nodes: set[str], users: Mapping[str, set[str]]) -> list[str]:
    """Return the slices that some nodes read, and those that these read."""
    found: list[str] = []
    for name, readers in reversed(list(users.items())):
        if readers & {*nodes, *found}:
            found.append(name)
    return found


def for_lengths(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return an example to export with lengths free: three quarters of the places of whole samples.

    So a mask for the longest samples is sliced, and lengths are not taken for the numbers that they happen to equal.
    """
    found = dict(tensors)
    for name, dims in free_dims(tensors).items():
        for dim in dims:
            length = found[name].shape[dim]
            found[name] = found[name].index_select(dim, _spread(length, length * 3 // 4))
    return found


@contextmanager
def emptied_caches() -> Iterator[None]:
    """Empty every ``functools.lru_cache`` at the end of the block that kept something new in it, but torch's own."""
    caches = [each for each in gc.get_objects() if type(each) is functools._lru_cache_wrapper]
    kept = [each for each in caches if str(each.__module__).partition(".")[0] not in ("torch", "sympy", "autopar")]
    before = [(each, each.cache_info().misses) for each in kept]
    try:
        yield
    finally:
        for cache, misses in before:
            if cache.cache_info().misses > misses:
                cache.cache_clear()


def shortening_of(program: ExportedProgram, tensors: Mapping[str, torch.Tensor]) -> Shortening | None:
    """Return how samples can be shortened; none if no shorter ones are within the guards.

    Args:
        program: exported from :func:`for_lengths`.
        tensors: of whole samples.
    """
    environment = _environment(program)
    inputs = [node for node in program.graph.nodes if node.op == "placeholder"][-len(tensors) :]
    rows = inputs[0].meta["val"].shape[0].node.expr
    dims: dict[str, dict[int, sympy.Symbol]] = {}
    full: dict[sympy.Symbol, int] = {}
    for (name, tensor), node in zip(tensors.items(), inputs, strict=True):
        for dim, size in enumerate(node.meta["val"].shape):
            symbol = size.node.expr if isinstance(size, torch.SymInt) else None
            if dim and isinstance(symbol, sympy.Symbol) and symbol != rows:
                dims.setdefault(name, {})[dim] = symbol
                full[symbol] = int(tensor.shape[dim])
    short = _shortest(environment, program, full, {rows: len(next(iter(tensors.values())))})
    return None if short is None else Shortening(program, dims, full, short)


def _environment(program: ExportedProgram) -> Any:  # noqa: ANN401
    values = (node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder")
    return next(value.fake_mode.shape_env for value in values if isinstance(value, FakeTensor))


def _shortest(
    environment: Any,  # noqa: ANN401
    program: ExportedProgram,
    full: Mapping[sympy.Symbol, int],
    rows: Mapping[sympy.Symbol, int],
) -> dict[sympy.Symbol, int] | None:
    """Return the shortest lengths that the guards allow, all shortened by the same power of two."""
    guards = [environment.replace(guard.expr) for guard in environment.guards]
    for power in range(max(full.values(), default=1).bit_length() - 1, 0, -1):
        short = {symbol: max(SHORTEST, length >> power) for symbol, length in full.items()}
        limits = [(short[symbol], program.range_constraints.get(symbol)) for symbol in short]
        within = all(limit is None or limit.lower <= length <= limit.upper for length, limit in limits)
        if within and all(guard.subs({**rows, **short}) == True for guard in guards):  # noqa: E712
            return short
    return None


def _places(tensors: Sequence[torch.Tensor], count: int) -> torch.Tensor | None:
    """Return so many places of some tensors of rows; None of no tensors.

    Rows of which one holds more that is padded or left out than others do so at these places, too.

    Raises:
        DifferentError: no such places were found.
    """
    if not tensors:
        return None
    marks = [mark for tensor in tensors for mark in _marks(tensor) if len(set(mark.sum(1).tolist())) > 1]
    each = count // max(1, 2 * len(marks))
    chosen: dict[int, None] = {}
    for mark in marks:
        most, least = mark[mark.sum(1).argmax()], mark[mark.sum(1).argmin()]
        unlike = (most & ~least).nonzero()[:, 0]
        chosen.update(dict.fromkeys(unlike[_spread(len(unlike), min(len(unlike), each))].tolist()))
    length = tensors[0].shape[1]
    chosen.update(dict.fromkeys([*_spread(length, count).tolist(), *range(length)]))
    places = torch.tensor(sorted(list(chosen)[:count]))
    if any(len(set(mark[:, places].sum(1).tolist())) == 1 for mark in marks):
        raise DifferentError("short samples do not differ as whole ones do")
    return places


def _marks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield of every place of rows whether it is left out, padded at an end, or zero."""
    yield tensor == -100
    yield (tensor == tensor[:, -1:]).flip(1).cumprod(1).flip(1).bool()
    yield (tensor == tensor[:, :1]).cumprod(1).bool()
    yield tensor == 0


def _spread(length: int, count: int) -> torch.Tensor:
    return torch.arange(count) * length // max(1, count)


def _same_constants(one: ExportedProgram, other: ExportedProgram) -> None:
    for name, value in one.constants.items():
        found = other.constants.get(name)
        if isinstance(value, torch.Tensor) and not (
            isinstance(found, torch.Tensor) and value.shape == found.shape and torch.equal(value, found)
        ):
            raise DifferentError(f"the constant {name}")


@dataclass(frozen=True, eq=False)
class _Numbers:
    """What sizes are in the three graphs: with free lengths, and with those of whole and of short samples."""

    rows: str
    """The symbol of the number of samples in the graph of whole samples."""
    full: Mapping[sympy.Symbol, int]
    short: Mapping[sympy.Symbol, int]
    environment: Any
    """Of the graph of whole samples."""

    def of(self, value: object) -> Any:  # noqa: ANN401
        """Return a number, or a node that computes one, as an expression; None of anything else."""
        if isinstance(value, fx.Node):
            value = value.meta.get("val")
        if isinstance(value, torch.SymInt):
            return value.node.shape_env.replace(value.node.expr)
        return sympy.Integer(value) if type(value) is int else None

    def at(self, expression: Any, lengths: Mapping[sympy.Symbol, int]) -> Any:  # noqa: ANN401
        """Return what an expression is for some lengths: an integer, or one over the number of samples."""
        found = expression.subs(lengths)
        free = found.free_symbols
        if len(free) > 1:
            raise DifferentError(f"the size {expression}")
        rows = next(symbol for symbol in self.environment.var_to_range if str(symbol) == self.rows)
        return found.subs(dict.fromkeys(free, rows))


@dataclass(eq=False)
class _Rewriting:
    """Copies a graph, node by node beside another that is the same with free lengths."""

    numbers: _Numbers
    nested: bool
    """Whether the graph is called by another."""
    graph: fx.Graph = field(default_factory=fx.Graph)
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)
    same: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """From nodes of the graph with free lengths to copies."""
    slices: dict[str, fx.Node] = field(default_factory=dict)
    """That the graph of whole samples goes without, since they slice nothing off."""
    sources: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Of copies that are the same values for whole samples."""
    modules: dict[str, Any] = field(default_factory=dict)

    def rewrite(self, full: fx.GraphModule, free: fx.GraphModule) -> fx.GraphModule:
        """Return the first, with the numbers of short samples.

        Raises:
            DifferentError: the graphs differ.
        """
        others = deque(node for node in free.graph.nodes if not self._is_size(node))
        for node in full.graph.nodes:
            if self._is_size(node):
                self.copies[node] = self.graph.node_copy(node, self.copies.__getitem__)
                continue
            while others and self._is_idle_slice(others[0]) and not self._is_like(node, others[0]):
                self._insert(others.popleft())
            if node.target is _ALIAS and not (others and others[0].target is _ALIAS):
                # What a slice of everything becomes.
                self.copies[node] = self.graph.node_copy(node, self.copies.__getitem__)
                self.sources[self.copies[node]] = self.copies[_first(node)]
            elif others:
                self._copy(node, others.popleft(), full, free)
            else:
                raise DifferentError("one has more operators")
        if any(not self._is_idle_slice(node) for node in others):
            raise DifferentError("one has more operators")
        return fx.GraphModule(self.modules, self.graph)

    def _is_size(self, node: fx.Node) -> bool:
        name = str(node.target).rpartition(".")[0].rpartition(".")[2]
        asserts = name in ("_assert_scalar", "sym_constrain_range_for_size")
        is_number = isinstance(node.meta.get("val"), (torch.SymInt, torch.SymBool, int))
        return node.op != "output" and (is_number or asserts)

    def _is_idle_slice(self, node: fx.Node) -> bool:
        """Tell whether a node slices nothing off whole samples."""
        return node.target is _SLICE and self._shape(node) == self._shape(node.args[0])

    def _is_like(self, node: fx.Node, other: fx.Node) -> bool:
        """Tell whether a node is the same slice."""
        source: Any = node.args[0] if node.target is _SLICE else None
        return source is not None and self._are_same(self.copies[source], self.same[_first(other)])

    def _are_same(self, one: fx.Node, other: fx.Node) -> bool:
        """Tell whether two copies are the same values for whole samples."""

        def source(node: fx.Node) -> fx.Node:
            while node in self.sources:
                node = self.sources[node]
            return node

        return source(one) is source(other)

    def _insert(self, other: fx.Node) -> None:
        """Copy a slice that the graph of whole samples goes without."""
        source = self.same[_first(other)]
        bounds = [self._number(each) for each in _arguments(other)[1:]]
        if bounds[1:] == [0, sys.maxsize, 1]:
            self.same[other] = source
            return
        if not all(isinstance(bound, int) for bound in bounds):
            raise DifferentError(f"the slice {other}")
        copy = self.graph.call_function(_SLICE, (source, *bounds))
        copy.meta = dict(source.meta)
        self.slices[copy.name] = self.same[other] = copy
        self.sources[copy] = source

    def _shape(self, node: Any) -> object:  # noqa: ANN401
        """Return the shapes of what a node gives for whole samples."""
        value = node.meta.get("val")
        values = value if isinstance(value, (tuple, list)) else [value]
        return [
            ([self.numbers.at(self.numbers.of(size), self.numbers.full) for size in each.shape], each.dtype)
            if isinstance(each, torch.Tensor)
            else None
            for each in values
        ]

    def _copy(self, node: fx.Node, other: fx.Node, full: fx.GraphModule, free: fx.GraphModule) -> None:
        alike = node.op == other.op and (node.op in ("placeholder", "get_attr") or node.target == other.target)
        if not alike or self._shape(node) != self._shape(other):
            raise DifferentError(f"{node.format_node()} and {other.format_node()}")
        if node.op == "get_attr":
            self._attribute(node, other, full, free)
        calls = isinstance(node.target, torch._ops.HigherOrderOperator)
        try:
            args = self._pair(_arguments(node), _arguments(other), calls=calls)
            kwargs = self._pair(node.kwargs, other.kwargs, calls=calls)
        except DifferentError as error:
            raise DifferentError(f"{node.format_node()} and {other.format_node()}: {error}") from error
        copy = self.graph.node_copy(node, self.copies.__getitem__)
        copy.args, copy.kwargs = args, kwargs
        self.copies[node] = self.same[other] = copy
        if node.target is _ALIAS:
            self.sources[copy] = self.copies[_first(node)]

    def _attribute(self, node: fx.Node, other: fx.Node, full: fx.GraphModule, free: fx.GraphModule) -> None:
        one, two = (operator.attrgetter(str(each.target))(module) for module, each in ((full, node), (free, other)))
        if isinstance(one, fx.GraphModule) and isinstance(two, fx.GraphModule):
            self.modules[str(node.target)] = _Rewriting(self.numbers, nested=True).rewrite(one, two)
        else:
            raise DifferentError(f"the attribute {node.target}")

    def _pair(self, one: Any, other: Any, *, calls: bool = False) -> Any:  # noqa: ANN401
        """Return an argument with the numbers of short samples, of what it is in both graphs."""
        if self.numbers.of(one) is not None or self.numbers.of(other) is not None:
            return self._number(other, one)
        if isinstance(one, fx.Node) and isinstance(other, fx.Node):
            if self._are_same(self.copies[one], self.same[other]):
                return self.same[other]
            raise DifferentError(f"{one} and {other}")
        if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
            return self._pair_items(one, other, calls=calls)
        if isinstance(one, Mapping) and isinstance(other, Mapping) and one.keys() == other.keys():
            return {key: self._pair(value, other[key]) for key, value in one.items()}
        if type(one) is not type(other) or one != other:
            raise DifferentError(f"{one} and {other}")
        return one

    def _pair_items(self, one: Sequence[Any], other: Sequence[Any], *, calls: bool) -> Any:  # noqa: ANN401
        if calls:
            # A called graph is given the sizes that it reads.
            others = (each for each in other if not (isinstance(each, fx.Node) and self._is_size(each)))
            found = [
                self.copies[each]
                if isinstance(each, fx.Node) and self._is_size(each)
                else self._pair(each, next(others, None), calls=True)
                for each in one
            ]
            if next(others, None) is not None:
                raise DifferentError("a called graph")
        elif len(one) != len(other):
            raise DifferentError(f"{one} and {other}")
        else:
            found = [self._pair(*each) for each in zip(one, other, strict=True)]
        return found if isinstance(one, list) else tuple(found)

    def _number(self, other: object, one: object = None) -> Any:  # noqa: ANN401
        """Return a number for short samples; it has to be that of whole ones if one is given."""
        expression = self.numbers.of(other)
        if expression is None:
            raise DifferentError(f"{one} and {other}")
        if one is not None and self.numbers.at(expression, self.numbers.full) != self.numbers.of(one):
            raise DifferentError(f"{one} and {other}")
        found = self.numbers.at(expression, self.numbers.short)
        if found.is_Integer:
            return int(found)
        if isinstance(one, fx.Node) and self.numbers.of(one) == found:
            return self.copies[one]
        if self.nested:
            raise DifferentError(f"the size {expression} within a called graph")
        node = self.graph.call_function(torch.ops.aten.sym_size.int, ())
        node.meta["val"] = self.numbers.environment.create_symintnode(found, hint=None)
        return node


def _first(node: fx.Node) -> fx.Node:
    found: Any = node.args[0]
    return found  # type: ignore[no-any-return]


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    """Return a node's arguments; of a slice all, defaults included."""
    if node.target is not _SLICE:
        return node.args
    given: tuple[Any, ...] = (*node.args, *(0, None, None, 1)[len(node.args) - 1 :])
    source, dim, start, stop, step = given
    return source, dim, 0 if start is None else start, sys.maxsize if stop is None else stop, step
