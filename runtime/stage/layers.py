"""What a plan says of layers: the tensors that cross between stages, shared parameters, seeds, precision, compiling.

Seeds depend on nothing but how the mini-batch is divided, and are documented in ``docs/howto/verify.md``, so that a
plain loop can set the same in forward hooks. ``torch.compile`` compiles once for all layers of a kind.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from operator import attrgetter
from typing import Any, cast

import torch
import torch._functorch.config
from torch import fx, nn

from autopar.capture.graph import Layer, LayerGraph, TensorSpec
from autopar.capture.layers.evaluation import EvaluationGraph
from autopar.capture.layers.fallback import ListedLayer
from autopar.capture.model.batch import number_of, seed_data
from autopar.capture.model.python_state import ATOMS, attributes_of
from autopar.errors import UsageError, first_line
from autopar.formats.plan import Plan
from autopar.formats.profile import Precision
from autopar.formats.stage import Crossing
from autopar.ranks.failure import PeerLostError


def crossings(tensors: Iterable[TensorSpec], stage_of: Mapping[str, int]) -> tuple[Crossing, ...]:
    """Return what is made in one stage and read in later ones, given the stage of every layer."""
    found = []
    for tensor in tensors:
        if tensor.producer is None:
            continue
        made = stage_of[tensor.producer]
        readers = tuple(sorted({stage_of[name] for name in tensor.consumers} - {made}))
        if readers:
            found.append(
                Crossing(
                    name=tensor.name,
                    producer=made,
                    consumers=readers,
                    bytes_per_sample=tensor.bytes_per_sample,
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    gradient=tensor.gradient,
                )
            )
    return tuple(found)


def check_shares(layers: Iterable[Layer], plan: Plan, *, sync_batch_norm: bool = False) -> None:
    """Refuse shares of fewer or more samples than a layer takes at once; its operators might go on.

    Args:
        layers: of the model, which the plan has.
        plan: its stages have the shares.
        sync_batch_norm: whether batch normalisation is that of all shares together.

    Raises:
        UsageError: names the layer.
    """
    stage_of = {name: index for index, stage in enumerate(plan.stages) for name in stage.layers}
    for layer in layers:
        index = stage_of[layer.name]
        shares = [plan.micro_batch_size] if sync_batch_norm else plan.stages[index].rows
        few, many = min(shares) < layer.least_rows, layer.most_rows is not None and max(shares) > layer.most_rows
        if few or many:
            limit = f"at least {layer.least_rows}" if few else f"at most {layer.most_rows}"
            count = min(shares) if few else max(shares)
            how = "fewer `micro_batches`, or fewer replicas of" if few else "more `micro_batches`, or more replicas of"
            raise UsageError(
                f"stage {index} gives {count} sample{'s' if count > 1 else ''} of a micro-batch at once to layer "
                f"{layer.name}, which takes {limit}; plan with {how} that stage"
            )


def used_by_several(layers: Iterable[Iterable[torch.nn.Parameter]]) -> frozenset[torch.nn.Parameter]:
    """Return the parameters that several layers use, given those of each."""
    uses = Counter(parameter for layer in layers for parameter in set(layer))
    return frozenset(parameter for parameter, count in uses.items() if count > 1)


def seed_of(run_seed: int, layer: str, step: int, micro_batch: int, share: int) -> int:
    """Return the seed set before a random layer runs; counts start at 0.

    The first 8 bytes, big-endian, of the SHA-256 of the numbers and the layer's name joined by ``/``, without the
    highest bit.

    >>> seed_of(0, "blocks.3", step=1, micro_batch=2, share=0)
    2988136112197922945
    """
    return number_of(f"{run_seed}/{layer}/{step}/{micro_batch}/{share}")


def seed_generator(device: torch.device, seed: int) -> None:
    """Seed the device's default generator, and nothing else (``torch.manual_seed`` costs a hundred times more)."""
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def seed_optimizer(device: torch.device, run_seed: int, step: int) -> None:
    """Seed what the optimizer draws from in a step: the generators of :func:`seed_data`, and the device's."""
    seed_data(run_seed, "optimizer", step)
    if device.type == "cuda":
        seed_generator(device, number_of(f"{run_seed}/optimizer/{step}"))


_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_of(precision: Precision, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Return what makes the context that every layer's forward runs in."""
    dtype = _AUTOCAST.get(precision)
    if dtype is None:
        return nullcontext
    return lambda: torch.autocast(device.type, dtype)


def crossing_specs(plan: Plan, graph: LayerGraph | EvaluationGraph) -> list[TensorSpec]:
    """Return the tensors that layers of the model make and others read, of the types that they have in the plan.

    The graph knows the types that the model has without autocast; those with it were found when it was profiled.
    """
    specs = [tensor for tensor in graph.tensors if tensor.producer is not None]
    if plan.precision not in _AUTOCAST:
        return specs
    floating = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, *_AUTOCAST.values())}
    planned = {tensor.name: floating[tensor.dtype] for tensor in plan.tensors if tensor.dtype in floating}
    return [
        replace(spec, dtype=planned.get(spec.name, spec.dtype)) if spec.dtype == torch.float32 else spec
        for spec in specs
    ]


AGAIN = (
    "save(folder), profile and plan again with the model as it is now, and go on with the new plan: "
    "load(folder, accept_changes=True)"
)
"""What to do about a change that no running job follows."""


def check_exchange(layer: Layer, other: Layer) -> None:
    """Check that a layer can compute what another of its name does, with the tensors that it has.

    Raises:
        UsageError: it reads or gives other tensors, or another kind of thing has to be kept; names the layer.
    """
    held = {**layer.parameters, **layer.buffers}.items()
    # What wraps a layer calls it its module.
    read = {(attribute.removeprefix("module."), name) for attribute, name in held}
    if (layer.inputs, layer.outputs) != (other.inputs, other.outputs):
        what = "reads or gives other tensors than before"
    elif not read.issuperset({*other.parameters.items(), *other.buffers.items()}):
        what = "reads other parameters or buffers than before"
    elif other.writes is not None and other.writes != layer.writes:
        what = "writes other buffers, parameters or inputs than before"
    else:
        return
    raise UsageError(f"after what the script has changed, layer {layer.name} {what}; {AGAIN}")


def exchange(layer: Layer, other: Layer) -> Layer:
    """Return a layer whose module computes what another's does; the module, and what it holds, are the same objects.

    What wraps it (where replicas divide parameters) is left as it is.
    """
    mine, given = _computing(layer.module), _computing(other.module)
    if isinstance(mine, fx.GraphModule) and isinstance(given, fx.GraphModule):
        for name, constant in given._buffers.items():
            if name not in other.buffers:
                mine.register_buffer(name, constant)
        for name, part in given._modules.items():
            setattr(mine, name, part)
        mine.graph = given.graph
    else:
        _take_numbers(mine, given)
        # Listed modules may read the model's.
        _take_numbers(cast(ListedLayer, mine).model, cast(ListedLayer, given).model)
    same = {"fingerprint", "random", "writes", "least_rows", "most_rows"}
    return replace(layer, **{name: getattr(other, name) for name in same})


def rewritable(layer: Layer) -> Layer:
    """Return a layer whose graphs may be changed without changing the given one; tensors are the same."""
    module = layer.module
    return replace(layer, module=_copy(module)) if isinstance(module, fx.GraphModule) else layer


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    copied = fx.GraphModule(module, copy.deepcopy(module.graph), class_name="Layer")
    for name, child in module.named_children():
        if isinstance(child, fx.GraphModule):
            setattr(copied, name, _copy(child))
    return copied


def wrap(layer: Layer, wrapper: nn.Module) -> Layer:
    """Return a layer whose module is now in another, which calls it its ``module``."""
    held = (layer.parameters, layer.buffers)
    parameters, buffers = ({f"module.{attribute}": name for attribute, name in each.items()} for each in held)
    return replace(layer, module=wrapper, parameters=parameters, buffers=buffers)


def _computing(module: nn.Module) -> nn.Module:
    """Return the captured graph, or the listed module, that a layer's module is or wraps."""
    while not isinstance(module, (fx.GraphModule, ListedLayer)):
        module = module.get_submodule("module")
    return module


def _take_numbers(mine: nn.Module, given: nn.Module) -> None:
    """Give a module the modes, numbers and plain tensors of another that is built like it."""
    for path, part in given.named_modules():
        held = mine.get_submodule(path)
        held.training = part.training
        found = {name: value for name, value in attributes_of(part).items() if name in vars(part) and _is_number(value)}
        vars(held).update(found)


def _is_number(value: object) -> bool:
    """Tell whether a value is a number, a text, a plain tensor, or made of such."""
    if isinstance(value, dict):
        return all(map(_is_number, value.values()))
    if isinstance(value, (list, tuple, set)):
        return all(map(_is_number, value))
    return isinstance(value, (*ATOMS, torch.Tensor)) and not isinstance(value, nn.Parameter)


Code = Callable[..., Sequence[torch.Tensor]]


class _CompiledLayer(nn.Module):
    """A layer's module, run by compiled code until that is found not to compile."""

    def __init__(self, layer: nn.Module, code: Code, tensor_names: Sequence[str]) -> None:
        """Take the module, the code, and the names of the module's tensors that are arguments of the code."""
        super().__init__()
        self.module = layer
        self._tensor_names = tuple(tensor_names)
        # In a list, so that modules and parameters of the code are not taken for this layer's.
        self._code: list[Code] = [code]

    def fall_back(self) -> None:
        """Run as it is from now on."""
        self._code.clear()

    def forward(self, rows: int, *inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        """Run the layer."""
        if not self._code:
            outputs: Sequence[torch.Tensor] = self.module(rows, *inputs)
            return outputs
        return self._code[0](rows, *inputs, *(attrgetter(name)(self.module) for name in self._tensor_names))


def compile_layers(layers: Mapping[int, Sequence[Layer]]) -> dict[int, list[Layer]]:
    """Return a rank's layers, by stage, that compile when they first run.

    Layers of a kind run the same code, of which their tensors are arguments; listed ones each have their own. Random
    numbers are drawn as uncompiled layers draw them.
    """
    # Here and not above: it takes a second to import.
    import torch._inductor.config

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
        return wrap(layer, _CompiledLayer(module, codes[kind], held))
    return wrap(layer, _CompiledLayer(module, torch.compile(module, dynamic=False), ()))


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
    read: Iterable[TensorSpec],
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[object]],
) -> list[str]:
    """Run a stage's layers once, on zeros, so that they compile forward and backward; one that does not runs as it is.

    Args:
        layers: the stage's, of compiled modules.
        rows: samples in a share.
        read: what the stage is given.
        device: where it computes.
        autocast: makes the context that forwards run in.

    Returns:
        Warnings, each of a layer that does not compile. Buffers are left as they were.
    """
    values, warnings = {spec.name: _zeros(spec, rows, device) for spec in read}, list[str]()
    with _preserve_buffers(layers), torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
        for layer in layers:
            inputs = [values[name] for name in layer.inputs]
            if layer.random:
                seed_generator(device, 0)
            with autocast():
                outputs = _run_or_fall_back(layer, rows, inputs, warnings)
            values.update(zip(layer.outputs, outputs, strict=True))
    return warnings


def _zeros(spec: TensorSpec, rows: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(spec.shape(rows), dtype=spec.dtype, device=device).requires_grad_(spec.gradient)


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
        warnings.append(f"layer {layer.name} is not compiled: {type(error).__name__}: {first_line(error)[:200]}")
        outputs = module(rows, *inputs)
    return outputs
