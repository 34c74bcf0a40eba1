"""A backward in two halves: the gradients of given leaves first, and those of parameters later.

The first half runs the operators that lie between the roots and the leaves. Where one of them also leads to parameters
(a matrix product to its weight), it makes its other gradients only, and what arrived at it is kept; the second half
runs it again for the rest, and what lies between it and the parameters. So no gradient is made twice, as two calls of
``torch.autograd.grad`` would make most of them, and sums are taken in a whole backward's order: gradients are equal bit
for bit. A parameter to which several such operators lead (one that is used twice) gets its gradient in the first half,
since its sum would be taken in another order; the second half only adds it to what is there. The split is that of Qi et
al., "Zero Bubble Pipeline Parallelism", 2023.

The same walk through the graphs of autograd tells over which tensors between layers a gradient flows back: those that
lead from the loss to something trained. For that, layers run forward on fake tensors, and nothing is computed. A
parameter that the loss does not lead back to has no gradient in plain training, and none here: an optimizer with weight
decay would shrink it for a gradient of zero. Listed modules may decide from micro-batch to micro-batch; their gradient
messages say which tensors have none.

Why: docs/design/decisions.md, "Capture: A backward is split where operators part".
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autopar.capture.graph import Layer, LayerGraph, TensorSpec
from autopar.capture.model.effects import reachable
from autopar.capture.model.meta import faked_parameter
from autopar.capture.model.terms import starts_of


class _Frontier(NamedTuple):
    """The parameters of an autograd graph, by what leads to them from the operators between its roots and the leaves.

    A parameter belongs to one such operator or root, if nothing else leads to it nor to another parameter by the same
    way; all others are shared. A parameter is where the graph ends.
    """

    operator_parameters: dict[Node, list[GradientEdge]]
    """Operators between roots and leaves, and the parameters that belong to them."""
    outer: list[int]
    """Indices of roots to which parameters belong, and that lead to nothing else."""
    shared_parameters: list[GradientEdge]
    reaches_leaf: bool
    """Whether any leaf can be reached."""


def _frontier_of(roots: Sequence[GradientEdge], leaves: Iterable[Node]) -> _Frontier:
    """Walk the graph behind some roots, and find where it parts."""
    edges = _walk(edge.node for edge in roots)
    inside = _leading(edges, leaves)
    if not inside:
        return _Frontier({}, list(range(len(roots))), [], reaches_leaf=False)
    paths: list[tuple[Node | int, dict[Node, None]]] = [
        (index, _ends(edges, root.node)) for index, root in enumerate(roots) if root.node not in inside
    ]
    for node in edges:
        if node in inside:
            leaving = dict.fromkeys(after for after in edges[node] if after not in inside)
            paths += [(node, _ends(edges, after)) for after in leaving]
    shared = _shared_parameters(paths)
    deferred: dict[Node, dict[Node, None]] = defaultdict(dict)
    outer = []
    for source, parameters in paths:
        if not parameters.keys() & shared.keys():
            if isinstance(source, int):
                outer.append(source)
            else:
                deferred[source].update(parameters)
    operators = {node: [GradientEdge(end, 0) for end in ends] for node, ends in deferred.items()}
    return _Frontier(operators, outer, [GradientEdge(end, 0) for end in shared], reaches_leaf=True)


def _walk(roots: Iterable[Node]) -> dict[Node, list[Node]]:
    """Return every operator behind some, each with those right behind it."""
    found: dict[Node, list[Node]] = {}

    def following(node: Node) -> list[Node]:
        found[node] = [after for after, _ in node.next_functions if after is not None]
        return found[node]

    reachable(roots, following)
    return found


def _leading(edges: Mapping[Node, list[Node]], leaves: Iterable[Node]) -> dict[Node, None]:
    """Return the operators from which a leaf can be reached, leaves included."""
    before: dict[Node, list[Node]] = defaultdict(list)
    for node, following in edges.items():
        for after in following:
            before[after].append(node)
    return reachable((leaf for leaf in leaves if leaf in edges), before.__getitem__)


def _ends(edges: Mapping[Node, list[Node]], start: Node) -> dict[Node, None]:
    """Return where the graph ends behind an operator, in order."""
    return {node: None for node in reachable([start], edges.__getitem__) if not edges[node]}


def _shared_parameters(paths: Sequence[tuple[Node | int, dict[Node, None]]]) -> dict[Node, None]:
    """Return the parameters to which several sources lead, and all to which paths to those lead as well, in order."""
    sources: dict[Node, set[Node | int]] = defaultdict(set)
    for source, parameters in paths:
        for parameter in parameters:
            sources[parameter].add(source)
    found = dict.fromkeys(parameter for parameter, leading in sources.items() if len(leading) > 1)
    size = 0
    while len(found) > size:
        size = len(found)
        for _, parameters in paths:
            if not parameters.keys().isdisjoint(found):
                found.update(parameters)
    return found


_Start = tuple[GradientEdge, torch.Tensor]
"""Where a backward starts, and with which gradient."""


class SplitBackward:
    """The backward of one forward, in halves.

    >>> layer, x = torch.nn.Linear(2, 1, bias=False), torch.ones(3, 2, requires_grad=True)
    >>> halves = SplitBackward()
    >>> with halves.recording():
    ...     y = layer(x)
    >>> (gradient,) = halves.input([get_gradient_edge(y)], [torch.ones_like(y)], [x])
    >>> gradient is not None, layer.weight.grad
    (True, None)
    >>> halves.weight()
    >>> layer.weight.grad
    tensor([[3., 3.]])
    """

    def __init__(self) -> None:
        self._saved_tensors = _SavedTensors()
        self._starts: list[_Start] = []
        self._again: list[_DeferredOperator] = []

    def recording(self) -> AbstractContextManager[object]:
        """Return the context to run the forward in, so that what only the first half needs is freed after it."""
        return saved_tensors_hooks(self._saved_tensors.pack, self._saved_tensors.unpack)

    def input(
        self, roots: Sequence[GradientEdge], gradients: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Run the first half.

        Args:
            roots: what the backward starts from.
            gradients: theirs.
            leaves: tensors without history. Where none can be reached nothing runs: the second half is all.

        Returns:
            The leaves' gradients, none where the backward does not reach them; ``.grad`` is left alone.
        """
        frontier = _frontier_of(roots, [get_gradient_edge(leaf).node for leaf in leaves])
        self._starts = [(roots[index], gradients[index]) for index in frontier.outer]
        if not frontier.reaches_leaf:
            return [None] * len(leaves)
        operators = [
            _DeferredOperator(node, parameters, self._again, self._saved_tensors)
            for node, parameters in frontier.operator_parameters.items()
        ]
        wanted = [*map(get_gradient_edge, leaves), *frontier.shared_parameters]
        try:
            found = torch.autograd.grad(roots, wanted, gradients, retain_graph=bool(operators), allow_unused=True)
        finally:
            for operator in operators:
                operator.unwatch()
        self._saved_tensors.free_unneeded()
        sums = zip(frontier.shared_parameters, found[len(leaves) :], strict=True)
        self._starts += [(edge, gradient) for edge, gradient in sums if gradient is not None]
        return list(found[: len(leaves)])

    def weight(self) -> None:
        """Run the second half: parameters' gradients are made, or added to those that are there, each once."""
        # In the order of the first half; each is let go as soon as it is done.
        operators, self._again = self._again[::-1], []
        while operators:
            operators.pop().run()
        starts, self._starts = self._starts, []
        if starts:
            torch.autograd.backward([edge for edge, _ in starts], [gradient for _, gradient in starts])
        self._saved_tensors.free_all()

    def discard(self) -> None:
        """Let go of everything instead of running what is left: autograd alone would hold it for ever."""
        self._again, self._starts = [], []
        self._saved_tensors.free_all()

    def pending(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that are kept between the halves; parameters that the second reads are among them."""
        yield from self._saved_tensors.remaining_tensors()
        yield from (gradient for _, gradient in self._starts)
        for operator in self._again:
            yield from (gradient for gradient in operator.grad_outputs if gradient is not None)


class _PackedTensor:
    """A tensor that a forward saved, until it is let go."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.read = self.read_again = False


class _SavedTensors:
    """What a forward saved. What the first half reads is not needed after it, but by operators that will run again."""

    def __init__(self) -> None:
        self._boxes: list[_PackedTensor] = []
        self._reading: dict[int, tuple[Node | None, list[_PackedTensor]]] = {}
        """By thread, the operator that runs, and what it has read: some read it twice."""
        self.running: set[int] = set()
        """Threads on which such an operator runs: autograd has one for every device."""

    def pack(self, tensor: torch.Tensor) -> _PackedTensor:
        box = _PackedTensor(tensor)
        self._boxes.append(box)
        return box

    def unpack(self, box: _PackedTensor) -> torch.Tensor:
        thread = threading.get_ident()
        box.read = True
        if self.running and thread in self.running:
            box.read_again = True
        else:
            self._note(thread, box)
        assert box.tensor is not None
        return box.tensor

    def _note(self, thread: int, box: _PackedTensor) -> None:
        """Note what an operator reads that will not run again, and let go of what the one before it has read."""
        node = torch._C._current_autograd_node()
        before, boxes = self._reading.get(thread, (None, []))
        if node is not before:
            for each in boxes:
                each.tensor = None
            boxes = []
            self._reading[thread] = node, boxes
        boxes.append(box)

    def free_unneeded(self) -> None:
        """Free what the second half does not need."""
        for box in self._boxes:
            if box.read and not box.read_again:
                box.tensor = None
        self._boxes = [box for box in self._boxes if box.tensor is not None]
        self._reading.clear()

    def free_all(self) -> None:
        """Free the rest: autograd holds the boxes for as long as any operator behind them lives."""
        self._reading.clear()
        while self._boxes:
            self._boxes.pop().tensor = None

    def remaining_tensors(self) -> Iterator[torch.Tensor]:
        return (box.tensor for box in self._boxes if box.tensor is not None)


class _DeferredOperator:
    """An operator that runs in both halves, each time for other gradients."""

    def __init__(
        self, node: Node, parameters: Sequence[GradientEdge], ran: list[_DeferredOperator], saved_tensors: _SavedTensors
    ) -> None:
        """Watch for its first run, when it enters itself into ``ran``; its second makes the parameters' gradients."""
        self._node, self._parameters = node, parameters
        self.grad_outputs: tuple[torch.Tensor | None, ...] = ()
        """The gradients that it ran with."""
        running = saved_tensors.running

        def begin(gradients: tuple[torch.Tensor | None, ...]) -> None:
            running.add(threading.get_ident())
            ran.append(self)
            self.grad_outputs = gradients

        def end(grad_inputs: object, grad_outputs: object) -> None:
            running.discard(threading.get_ident())

        self._watching = [node.register_prehook(begin), node.register_hook(end)]

    def unwatch(self) -> None:
        while self._watching:
            self._watching.pop().remove()

    def run(self) -> None:
        """Run it for the parameters' gradients."""
        arrived = self.grad_outputs
        starts = [(GradientEdge(self._node, at), each) for at, each in enumerate(arrived) if each is not None]
        if not starts:
            return
        # Hooks on tensors have had their say in the first half: what arrived then stands.
        hook = self._node.register_prehook(lambda _: arrived)
        try:
            torch.autograd.backward(
                [edge for edge, _ in starts], [gradient for _, gradient in starts], inputs=self._parameters
            )
        finally:
            hook.remove()


class _Reach(NamedTuple):
    """Whether an output of a layer requires a gradient, and the inputs that its backward leads to."""

    requires_grad: bool
    inputs: frozenset[int]


def gradient_flow(graph: LayerGraph) -> dict[str, bool]:
    """Return for every output of a layer whether a gradient flows back from its readers.

    That a tensor requires a gradient does not tell: what reads it may detach it, or lead to no loss.
    """
    specs = {tensor.name: tensor for tensor in graph.tensors}
    required = dict.fromkeys(graph.inputs, False)
    seen: dict[tuple[str, tuple[bool, ...]], tuple[_Reach, ...]] = {}
    reaches: list[tuple[Layer, dict[str, _Reach]]] = []
    for layer in graph.layers:
        flags = tuple(required[name] for name in layer.inputs)
        key = layer.fingerprint, flags
        if key not in seen:
            seen[key] = _reaches(layer, flags, [specs[name] for name in layer.inputs])
        own = dict(zip(layer.outputs, seen[key], strict=True))
        reaches.append((layer, own))
        required |= {name: reach.requires_grad for name, reach in own.items()}
    flows = set(starts_of(graph.outputs))
    for layer, own in reversed(reaches):
        flows |= {layer.inputs[index] for name in flows & own.keys() for index in own[name].inputs}
    return {name: name in flows for layer, _ in reaches for name in layer.outputs}


def _reaches(layer: Layer, flags: tuple[bool, ...], specs: Sequence[TensorSpec]) -> tuple[_Reach, ...]:
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    tensors: dict[str, Any] = {name: faked_parameter(mode, value) for name, value in layer.module.named_parameters()}
    tensors |= {name: mode.from_tensor(layer.module.get_buffer(name), static_shapes=True) for name in layer.buffers}
    with mode:
        empty = [torch.empty(spec.shape(2), dtype=spec.dtype) for spec in specs]
        inputs = [tensor.requires_grad_(flag) for tensor, flag in zip(empty, flags, strict=True)]
        outputs = torch.func.functional_call(layer.module, tensors, (2, *inputs))
    leaves = {get_gradient_edge(leaf).node: index for index, leaf in enumerate(inputs) if flags[index]}
    found = []
    for output in outputs:
        known = _walk([get_gradient_edge(output).node]) if output.requires_grad else {}
        found.append(_Reach(bool(output.requires_grad), frozenset(at for leaf, at in leaves.items() if leaf in known)))
    return tuple(found)
