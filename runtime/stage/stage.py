"""Stage: consecutive layers on one rank, run forward and backward one micro-batch at a time.

In come tensors and, later, gradients; out come outputs and gradients of inputs. The layers form segments, which are run
backward together; a layer that is recomputed is a segment of its own. It keeps its inputs only, and runs forward again
before its backward (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016). The first run is one with
gradients, whose graph saves nothing, so that operators are chosen as in the second. The second sees what the first saw:
buffers and model inputs that a forward writes are kept as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple, cast

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks

from autopar.capture.graph import Layer, TensorSpec
from autopar.capture.layers.split_backward import SplitBackward
from autopar.errors import AutoparError, TrainingError, cause_of
from autopar.ranks.failure import PeerLostError, is_of_connection
from autopar.runtime.stage.layers import exchange


class WrittenTensors(NamedTuple):
    """What a layer is about to write, as it was before its first run."""

    inputs: dict[str, torch.Tensor]
    """By name."""
    buffers: dict[str, torch.Tensor]
    """By attribute of the layer's module."""


def _refuse_unpacking(nothing: None) -> torch.Tensor:
    raise AssertionError("a layer that is recomputed has not been")


def _call_layer(layer: Layer, rows: int, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Run a layer's module.

    Buffers and parameters that it writes are copies meanwhile, and are given the copies' values at the end: what the
    backward of this micro-batch saved of them stays as it is when the next one's forward writes them.
    """
    held = {}
    if layer.writes is not None:
        parameters = _first_attributes(layer.parameters, layer.writes.parameters)
        held = _written_buffers(layer) | {each: layer.module.get_parameter(each) for each in parameters}
    result: Sequence[torch.Tensor]
    if not held:
        result = layer.module(rows, *inputs)
        return result
    # A parameter's copy hands its gradient on to the parameter. What the module assigns anew is in the dict, too.
    copies = {attribute: tensor.clone() for attribute, tensor in held.items()}
    result = torch.func.functional_call(layer.module, copies, (rows, *inputs))
    with torch.no_grad():
        for attribute, tensor in held.items():
            tensor.copy_(copies[attribute])
    return result


def _call_layer_again(
    layer: Layer, rows: int, inputs: Sequence[torch.Tensor], before: WrittenTensors
) -> Sequence[torch.Tensor]:
    """Run a layer's module once more; what it updates in place, as batch statistics, is updated once only."""
    module, arguments = layer.module, (rows, *inputs)
    written = before.buffers
    copies = {name: buffer.clone() for name, buffer in module.named_buffers() if name not in written} | written
    result: Sequence[torch.Tensor]
    result = torch.func.functional_call(module, copies, arguments) if copies else module(*arguments)
    return result


def _written_buffers(layer: Layer) -> dict[str, torch.Tensor]:
    names = () if layer.writes is None else layer.writes.buffers
    return {each: layer.module.get_buffer(each) for each in _first_attributes(layer.buffers, names)}


def _first_attributes(attributes: Mapping[str, str], names: Sequence[str]) -> list[str]:
    """Return one attribute of each of the names: others that hold the same tensor follow it."""
    if not names:
        return []
    by_name = {name: attribute for attribute, name in reversed(list(attributes.items()))}
    return [by_name[name] for name in names]


Watch = Callable[[str, Callable[[], Sequence[torch.Tensor]], bool], Sequence[torch.Tensor]]
"""Called with a layer's name, what runs it forward, and whether that is once more; returns what running returns."""


class Segment:
    """Consecutive layers, and the names of the tensors that enter and leave them."""

    def __init__(
        self,
        layers: Sequence[Layer],
        needed_names: Collection[str],
        autocast: Callable[[], AbstractContextManager[object]],
        *,
        is_recomputed: bool,
    ) -> None:
        """Work out what flows.

        Args:
            layers: in order.
            needed_names: names that later segments, other stages or the loss need.
            autocast: makes the context that a forward runs in.
            is_recomputed: whether they keep their inputs only.
        """
        self.is_recomputed = is_recomputed
        self._layers, self._autocast = list(layers), autocast
        made = [name for layer in layers for name in layer.outputs]
        read = [name for layer in layers for name in layer.inputs]
        self.inputs = tuple(dict.fromkeys(name for name in read if name not in made))
        self.outputs = tuple(name for name in made if name in needed_names)
        self.done = tuple(name for name in self.inputs if name not in needed_names)
        """Names of the inputs that nobody needs after it."""
        self._drop = self._last_uses()
        self.watch: Watch | None = None

    def before(self, values: Mapping[str, torch.Tensor]) -> WrittenTensors:
        """Return copies of what the one layer of a recomputed segment will write, for its second run."""
        (layer,) = self._layers
        names = () if layer.writes is None else layer.writes.inputs
        copies = {attribute: buffer.detach().clone() for attribute, buffer in _written_buffers(layer).items()}
        return WrittenTensors({name: values[name].clone() for name in names}, copies)

    def run(
        self,
        rows: int,
        values: Mapping[str, torch.Tensor],
        seed: Callable[[str], None],
        again: WrittenTensors | None = None,
    ) -> dict[str, torch.Tensor]:
        """Run forward, the first time or once more, on what :meth:`before` kept; return the outputs.

        Raises:
            TrainingError: a layer failed; names it.
        """
        known = dict(values)
        for layer, drop in zip(self._layers, self._drop, strict=True):
            if layer.random:
                seed(layer.name)
            inputs = [known[name] for name in layer.inputs]
            try:
                outputs = self._run(layer, rows, inputs, again)
            except (AutoparError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                # Replicas that divide parameters gather them as layers run.
                kind = PeerLostError if is_of_connection(error) else TrainingError
                raise kind(f"layer {layer.name}: {cause_of(error)}") from error
            known.update(zip(layer.outputs, outputs, strict=True))
            del inputs, outputs
            for name in drop:
                del known[name]
        return {name: known[name] for name in self.outputs}

    def _run(
        self, layer: Layer, rows: int, inputs: Sequence[torch.Tensor], again: WrittenTensors | None
    ) -> Sequence[torch.Tensor]:
        def run() -> Sequence[torch.Tensor]:
            with self._autocast():
                return (
                    _call_layer(layer, rows, inputs) if again is None else _call_layer_again(layer, rows, inputs, again)
                )

        return run() if self.watch is None else self.watch(layer.name, run, again is not None)

    def _last_uses(self) -> list[list[str]]:
        """For every layer, the names that no later layer reads and nobody else wants: they are let go after it."""
        drops: list[list[str]] = []
        alive = set(self.inputs)
        for index, layer in enumerate(self._layers):
            alive |= set(layer.outputs)
            later = {name for after in self._layers[index + 1 :] for name in after.inputs}
            gone = sorted(alive - later - set(self.outputs))
            drops.append(gone)
            alive -= set(gone)
        return drops


def _segments_of(
    layers: Sequence[Layer],
    needed_names: Collection[str],
    autocast: Callable[[], AbstractContextManager[object]],
    recompute: Collection[str],
) -> list[Segment]:
    """Divide a stage's layers: every recomputed one by itself, and those between together.

    ``needed_names`` are the names that other stages or the loss need.
    """
    parts: list[tuple[list[Layer], bool]] = []
    for layer in layers:
        again = layer.name in recompute
        if again or not parts or parts[-1][1]:
            parts.append(([], again))
        parts[-1][0].append(layer)
    found: list[Segment] = []
    needed = set(needed_names)
    for part, again in reversed(parts):
        found.append(Segment(part, needed, autocast, is_recomputed=again))
        needed |= set(found[-1].inputs)
    return found[::-1]


class Pass:
    """One forward of a segment, and its backward, whole or in halves.

    What enters and what leaves are tensors without history. The backward takes the ``.grad`` that later segments have
    left in the outputs, and what it is given by other stages; it adds to that of the inputs.
    """

    def __init__(
        self,
        segment: Segment,
        rows: int,
        values: Mapping[str, torch.Tensor],
        seed: Callable[[str], None],
        *,
        split: bool,
    ) -> None:
        """Take what the forward needs.

        Args:
            segment: whose it is.
            rows: samples in the share.
            values: what it reads, and maybe more.
            seed: called with the name of every layer that draws random numbers, just before it runs.
            split: whether the backward comes in halves.
        """
        self._segment, self._rows, self._seed = segment, rows, seed
        self._inputs = {name: values[name] for name in segment.inputs}
        self._outputs: dict[str, torch.Tensor] = {}
        self._edges: dict[str, GradientEdge] | None = None
        self._halves = SplitBackward() if split else None
        self._before: WrittenTensors | None = None

    def forward(self) -> dict[str, torch.Tensor]:
        """Run forward; return what it makes."""
        inputs, recomputed = self._inputs, self._segment.is_recomputed
        if recomputed:
            self._before = self._segment.before(inputs)
            self._inputs = {**inputs, **self._before.inputs}
        # What is recomputed saves nothing for a backward.
        with saved_tensors_hooks(lambda tensor: None, _refuse_unpacking) if recomputed else self._recording():
            made = self._segment.run(self._rows, inputs, self._seed)
        if not recomputed:
            self._keep(made)
        self._outputs = {name: each.detach().requires_grad_(each.requires_grad) for name, each in made.items()}
        return self._outputs

    @property
    def nodes(self) -> list[Node]:
        """Where its backward begins; none before it is recomputed."""
        return [edge.node for edge in (self._edges or {}).values()]

    def recompute(self) -> None:
        """Run a segment that keeps its inputs only forward again, unless that is done."""
        if self._edges is None:
            before, self._before = self._before, None
            with self._recording():
                self._keep(self._segment.run(self._rows, self._inputs, self._seed, again=before))

    def backward(self, output_gradients: Mapping[str, torch.Tensor]) -> None:
        """Run the backward; ``output_gradients`` are gradients of outputs."""
        edges, gradients = self._begin(output_gradients)
        if edges:
            torch.autograd.backward(edges, gradients)

    def backward_input(self, output_gradients: Mapping[str, torch.Tensor]) -> None:
        """Run the half of the backward that makes the inputs' gradients."""
        assert self._halves is not None
        edges, gradients = self._begin(output_gradients)
        leaves = list(self._inputs.values())
        for leaf, gradient in zip(leaves, self._halves.input(edges, gradients, leaves), strict=True):
            if gradient is not None:
                leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
        self._inputs.clear()

    def backward_weight(self) -> None:
        """Run the other half, which makes the parameters' gradients."""
        assert self._halves is not None
        self._halves.weight()

    def _recording(self) -> AbstractContextManager[object]:
        return nullcontext() if self._halves is None else self._halves.recording()

    def _keep(self, outputs: Mapping[str, torch.Tensor]) -> None:
        """Keep of a forward what its backward needs."""
        self._edges = {name: _edge(each) for name, each in outputs.items() if each.requires_grad}
        self._inputs = {name: each for name, each in self._inputs.items() if each.requires_grad}

    def _begin(self, output_gradients: Mapping[str, torch.Tensor]) -> tuple[list[GradientEdge], list[torch.Tensor]]:
        """Return where the backward starts and with which gradients, and let go of the outputs.

        They are not held while the forward makes them once more.
        """
        outputs, self._outputs = self._outputs, {}
        arrived = {name: (output_gradients.get(name), _pop_gradient(each)) for name, each in outputs.items()}
        types = {name: each.dtype for name, each in outputs.items()}
        del outputs
        self.recompute()
        edges, gradients = [], []
        for name, edge in (self._edges or {}).items():
            for each in arrived[name]:
                if each is not None:
                    edges.append(edge)
                    gradients.append(each.to(types[name]))
        self._edges = {}
        return edges, gradients


def _pop_gradient(leaf: torch.Tensor) -> torch.Tensor | None:
    """Return a leaf's gradient, and let go of it: the graph of a half that is to come holds the leaf."""
    gradient, leaf.grad = leaf.grad, None
    return gradient


def _edge(tensor: torch.Tensor) -> GradientEdge:
    """Return where a tensor's gradient goes; for one that torch's own operators made, without torch's detours.

    A function in Python does not keep its own history, for which torch finds a way.
    """
    node = tensor.grad_fn
    if node is None or isinstance(cast(object, node), BackwardCFunction):
        return get_gradient_edge(tensor)
    return GradientEdge(node, tensor.output_nr)


class Stage:
    """The layers of one stage, and the names of the tensors that enter and leave it."""

    def __init__(
        self,
        layers: Sequence[Layer],
        tensors: Sequence[TensorSpec],
        model_inputs: Sequence[str],
        loss: Sequence[str],
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
        recompute: Sequence[str] = (),
    ) -> None:
        """Work out what flows.

        Args:
            layers: the stage's, in order, with parameters in place.
            tensors: every crossing tensor of the model.
            model_inputs: names of the model's inputs.
            loss: names of the loss outputs.
            autocast: makes the context that forwards run in.
            recompute: layers that run forward again before their backward.
        """
        self.layers = list(layers)
        mine = {layer.name for layer in layers}
        made = {name for layer in layers for name in layer.outputs}
        read = {name for layer in layers for name in layer.inputs}
        self.inputs = tuple(name for name in model_inputs if name in read)
        self.received_specs = tuple(
            spec for spec in tensors if spec.name in read - made and spec.name not in model_inputs
        )
        self.sent_specs = tuple(spec for spec in tensors if spec.name in made and not mine.issuperset(spec.consumers))
        self.loss = tuple(name for name in loss if name in made)
        wanted = {*(spec.name for spec in self.sent_specs), *self.loss}
        self._cut = partial(_segments_of, needed_names=wanted, autocast=autocast, recompute=recompute)
        self._segments = self._cut(layers)
        self._shapes: dict[int, list[tuple[str, torch.dtype, tuple[int, ...]]]] = {}

    def forward(
        self, rows: int, values: Mapping[str, torch.Tensor], seed: Callable[[str], None], *, split: bool = False
    ) -> tuple[dict[str, torch.Tensor], list[Pass]]:
        """Run the layers on one share of a micro-batch.

        Args:
            rows: samples in the share.
            values: the model inputs and received tensors that the layers read; those whose gradient goes back are
                leaves.
            seed: called with the name of every layer that draws random numbers, just before it runs.
            split: whether the backward comes in two halves.

        Returns:
            The tensors that are sent and the loss outputs; and what the backward needs, by segment.

        Raises:
            TrainingError: a layer failed; names it.
        """
        known, passes = dict(values), list[Pass]()
        for segment in self._segments:
            passes.append(Pass(segment, rows, known, seed, split=split))
            known.update(passes[-1].forward())
            for name in segment.done:
                del known[name]
        return known, passes

    def watch(self, watch: Watch | None) -> None:
        """Have layers run by ``watch`` from now on, or again by themselves."""
        for segment in self._segments:
            segment.watch = watch

    def sendable(self, rows: int, outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what is sent of a share's outputs, in the types that receivers expect.

        Raises:
            TrainingError: a tensor has another shape than they expect; names it.
        """
        sent = {}
        if rows not in self._shapes:
            self._shapes[rows] = [(spec.name, spec.dtype, spec.shape(rows)) for spec in self.sent_specs]
        for name, dtype, expected in self._shapes[rows]:
            tensor = outputs[name]
            if tensor.shape != expected:
                raise TrainingError(
                    f"tensor {name} has shape {tuple(tensor.shape)}, the plan sends {expected}; shapes must not change "
                    "between steps"
                )
            # Under autocast, a device may have made another type than was profiled.
            sent[name] = tensor.detach() if tensor.dtype is dtype else tensor.detach().to(dtype)
        return sent

    def exchange(self, layers: Sequence[Layer]) -> None:
        """Compute what other layers of the same names and tensors do, with what this stage's layers hold."""
        self.layers = [exchange(mine, other) for mine, other in zip(self.layers, layers, strict=True)]
        self._segments = self._cut(self.layers)

    def lend(self, layers: Sequence[Layer]) -> list[Layer]:
        """Return layers of another mode, to which this stage lends its parameters while they run.

        They hold the stage's parameters already; see :meth:`lending`.
        """
        return list(layers)

    def lending(self) -> AbstractContextManager[None]:
        """Return the context that lent layers run in, entered by all replicas together."""
        return nullcontext()


class InFlightMicroBatch:
    """What a stage's forward of one micro-batch leaves for its backward."""

    def __init__(
        self,
        stage: Stage,
        passes: Sequence[Pass],
        received_tensors: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor],
        weights: Mapping[str, float],
    ) -> None:
        """Keep what the backward starts from and ends at.

        Args:
            stage: whose forward it was.
            passes: its segments'.
            received_tensors: those that it began with; where a gradient goes back, they are leaves.
            outputs: what it made.
            weights: the gradients of the loss outputs that the backward starts from, by name.
        """
        self._ahead, self._behind = list(passes), list[Pass]()
        self._leaves = {spec.name: received_tensors[spec.name] for spec in stage.received_specs if spec.gradient}
        self.awaited_names = [
            spec.name for spec in stage.sent_specs if spec.gradient and outputs[spec.name].requires_grad
        ]
        """Names of the tensors whose gradients the backward needs."""
        self._losses = {name: (outputs[name], weight) for name, weight in weights.items()}

    def recompute(self) -> None:
        """Run the last segment forward again, if it is to be: while the gradients are awaited, it costs no time."""
        self._ahead[-1].recompute()

    def backward(
        self, gradients: Sequence[torch.Tensor | None], *, half: bool = False
    ) -> dict[str, torch.Tensor | None]:
        """Run backward, or the half that others wait for, from the gradients of ``awaited_names``.

        Returns:
            The gradients of what was received, by name, None where the backward did not come to one.
        """
        losses = {name: torch.full_like(each, weight) for name, (each, weight) in self._losses.items()}
        sent = zip(self.awaited_names, gradients, strict=True)
        given = {**{name: each for name, each in sent if each is not None}, **losses}
        while self._ahead:
            each = self._ahead.pop()
            if half:
                self._behind.append(each)
                each.backward_input(given)
            else:
                each.backward(given)
        leaves, self._leaves = self._leaves, {}
        return {name: _pop_gradient(leaf) for name, leaf in leaves.items()}

    def backward_weight(self) -> None:
        """Run the other half, which makes the parameters' gradients."""
        for each in self._behind:
            each.backward_weight()
