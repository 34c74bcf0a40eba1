"""Compiled layers: ``torch.compile``, once for all layers of a kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
from torch import fx, nn

from autopar.capture.graph import Layer
from autopar.ranks.failure import PeerLostError

Code = Callable[..., Sequence[torch.Tensor]]


class CompiledLayer(nn.Module):
    """A layer's module, run by compiled code until that is found not to compile."""

    def __init__(self, layer: nn.Module, code: Code, tensor_names: Sequence[str]) -> None:
        """Take the module, the code, and the names of the module's tensors that are arguments of the code."""
        super().__init__()
        self.layer = layer
        self._tensor_names = tuple(tensor_names)
        # In a list, so that modules and parameters of the code are not taken for this layer's.
        self._code: list[Code] = [code]

    @property
    def compiles(self) -> bool:
        """Whether the layer is run by compiled code."""
        return bool(self._code)

    def fall_back(self) -> None:
        """Run as it is from now on."""
        self._code.clear()

    def forward(self, rows: int, *inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        """Run the layer."""
        if not self._code:
            outputs: Sequence[torch.Tensor] = self.layer(rows, *inputs)
            return outputs
        return self._code[0](rows, *inputs, *(attrgetter(name)(self.layer) for name in self._tensor_names))


def compile_layers(layers: Mapping[int, Sequence[Layer]]) -> dict[int, list[Layer]]:
    """Return a rank's layers, by stage, that compile when they first run.

    Layers of a kind run the same code, of which their tensors are arguments; listed ones each have their own. Random
    numbers are drawn as uncompiled layers draw them.
    """
    torch._inductor.config.fallback_random = True
    codes: dict[object, Code] = {}
    return {index: [_compile_layer(layer, codes) for layer in each] for index, each in layers.items()}


def _compile_layer(layer: Layer, codes: dict[object, Code]) -> Layer:
    module = layer.module
    if isinstance(module, fx.GraphModule):
        reads = [str(node.target) for node in _tensor_nodes(module)]
        held = list(dict.fromkeys(reads))
        kind = (layer.fingerprint, tuple(held.index(name) for name in reads))
        if kind not in codes:
            codes[kind] = torch.compile(_lift_tensors(module, held), dynamic=False)
        wrapped = CompiledLayer(module, codes[kind], held)
    else:
        wrapped = CompiledLayer(module, torch.compile(module, dynamic=False), ())
    return replace(
        layer,
        module=wrapped,
        parameters={f"layer.{attribute}": name for attribute, name in layer.parameters.items()},
        buffers={f"layer.{attribute}": name for attribute, name in layer.buffers.items()},
    )


def _tensor_nodes(module: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes that read tensors of a layer's module."""
    nodes = [node for node in module.graph.nodes if node.op == "get_attr"]
    return [node for node in nodes if isinstance(attrgetter(str(node.target))(module), torch.Tensor)]


def _lift_tensors(module: fx.GraphModule, tensor_names: Sequence[str]) -> fx.GraphModule:
    """Return a layer's graph with the tensors that it holds as further arguments."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            copies[node] = graph.placeholder(str(node.target))
    arguments = {name: graph.placeholder(f"held_{index}") for index, name in enumerate(tensor_names)}
    copies |= {node: arguments[str(node.target)] for node in _tensor_nodes(module)}
    for node in module.graph.nodes:
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(module, graph, class_name="Layer")


def warm_up(
    layers: Sequence[Layer],
    rows: int,
    values: dict[str, torch.Tensor],
    seed: Callable[[str], None],
    autocast: Callable[[], AbstractContextManager[object]],
) -> list[str]:
    """Run a stage's layers once, so that they compile forward and backward; one that does not is run as it is.

    Args:
        layers: the stage's, of compiled modules.
        rows: samples in a share.
        values: of the shapes and types that the stage is given; changed.
        seed: called with the name of every layer that draws random numbers, just before it runs.
        autocast: makes the context that forwards run in.

    Returns:
        Warnings, each of a layer that does not compile. Buffers are left as they were.
    """
    warnings: list[str] = []
    with _preserve_buffers(layers), torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
        for layer in layers:
            inputs = [values[name] for name in layer.inputs]
            if layer.random:
                seed(layer.name)
            with autocast():
                outputs = _run_or_fall_back(layer, rows, inputs, warnings)
            values.update(zip(layer.outputs, outputs, strict=True))
    return warnings


@contextmanager
def _preserve_buffers(layers: Sequence[Layer]) -> Iterator[None]:
    """Put the layers' buffers back as they were at the end of the block."""
    buffers = [buffer for layer in layers for buffer in layer.module.buffers()]
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)


def _run_or_fall_back(
    layer: Layer, rows: int, inputs: Sequence[torch.Tensor], warnings: list[str]
) -> Sequence[torch.Tensor]:
    module: Any = layer.module
    try:
        outputs: Sequence[torch.Tensor] = module(rows, *inputs)
    except (PeerLostError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        module.fall_back()
        warnings.append(f"layer {layer.name} is not compiled: {type(error).__name__}: {_first_line(error)}")
        outputs = module(rows, *inputs)
    return outputs


def _first_line(error: BaseException) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), "(no message)")[:200]
