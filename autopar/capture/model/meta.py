"""Models that are larger than memory: built and captured with shapes for parameters.

Parameters lose their values at the moment they are registered, so that never more than one is held; constants and
buffers that a constructor computes keep theirs. A constructor that reads a parameter's value (``.item()``,
``.tolist()``) is refused with its line, and so is a buffer that is computed from parameters. While such a model is
captured its parameters are fake tensors that claim to be on the CPU, so that the graph is the one that a real model
would give. Gradients are not compared then. A layer that is measured is given random weights for that time: normal with
deviation 0.02, normalisations' weights one, biases zero.

Listed modules are run on fake tensors, which compute nothing, for what they return. Where shapes do not tell, since
values decide what a module runs, that module alone is given random weights, and run on random numbers.

A rank gives its layers their weights here, and fits their graphs to its device.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves, tree_map_only

from autopar.capture.graph import Layer
from autopar.capture.model.effects import OperatorMode, draws, general_masks, give_back_profiler
from autopar.errors import CaptureError, FileError

_BUILDING = threading.Lock()


def is_on_meta(module: nn.Module) -> bool:
    """Tell whether parameters of a module have shapes but no values."""
    return any(parameter.device.type == "meta" for parameter in module.parameters())


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Take the values of every parameter that a module registers inside the block."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if type(parameter) is nn.Parameter and parameter.device.type != "meta":
            # Whoever holds it sees the same object, so that tied parameters stay tied.
            shape = _as_parameter(torch.empty_like(parameter, device="meta"), parameter)
            shape.__dict__.update(parameter.__dict__)
            torch.utils.swap_tensors(parameter, shape)  # type: ignore[no-untyped-call]
        register(module, name, parameter)

    draws_nothing = _WithoutDraws()
    with _BUILDING, draws_nothing, patch.object(nn.Module, "register_parameter", register_on_meta):
        yield


class _WithoutDraws(OperatorMode):  # type: ignore[no-untyped-call]
    """Draws nothing into tensors without values, for which torch would import its compiler: a second."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Torch would import it to keep it off.
        return False

    def run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        if operator._schema.name in _DRAWS and args[0].device.type == "meta":
            return args[0]
        return super().run(operator, args, kwargs)


_DRAWS = {
    f"aten::{name}_"
    for name in ("normal", "uniform", "random", "bernoulli", "exponential", "log_normal", "cauchy", "geometric")
}


def refuse_lost_buffers(model: nn.Module) -> None:
    """Check that all buffers kept their values.

    Raises:
        CaptureError: one was computed from parameters; names it.
    """
    for name, buffer in model.named_buffers():
        if buffer.device.type == "meta":
            raise CaptureError(
                f"the buffer {name} is computed from parameters, which have no values in a model that is larger than "
                "memory; compute it of other values in the constructor"
            )


class _UnprofiledFakeTensorMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors whose own Python code is hidden from a profile function, which it would call a million times."""

    def __torch_dispatch__(self, *arguments: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        before = sys.getprofile()
        sys.setprofile(None)
        try:
            return super().__torch_dispatch__(*arguments, **kwargs)
        finally:
            give_back_profiler(before)


@contextlib.contextmanager
def fake_parameters(model: nn.Module) -> Iterator[FakeTensorMode]:
    """Let parameters on the meta device pass for tensors on the CPU inside the block, where nothing computes."""
    mode = _UnprofiledFakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with mode:
        # What torch imports at the first fake computation is imported here, out of sight of a profile function.
        torch.zeros(1, requires_grad=True).view(-1).add(1)
    with _replaced_parameters(model, lambda name, parameter: faked_parameter(mode, parameter)):
        yield mode


@contextlib.contextmanager
def _replaced_parameters(model: nn.Module, replacement: Callable[[str, nn.Parameter], nn.Parameter]) -> Iterator[None]:
    """Put others in the place of a model's parameters inside the block, of tied ones the same."""
    registered = [
        (module, name, value)
        for module in model.modules()
        for name, value in module._parameters.items()
        if value is not None
    ]
    made: dict[int, nn.Parameter] = {}
    try:
        for module, name, value in registered:
            if id(value) not in made:
                made[id(value)] = replacement(name, value)
            module._parameters[name] = made[id(value)]
        yield
    finally:
        for module, name, value in registered:
            module._parameters[name] = value


@contextlib.contextmanager
def without_fakes(model: nn.Module) -> Iterator[None]:
    """Put back what attributes of modules held before the block where they hold fake tensors at its end."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            for name, value in list(vars(module).items()):
                if isinstance(value, FakeTensor):
                    del module.__dict__[name]
                    if name in attributes:
                        module.__dict__[name] = attributes[name]


def faked_parameter(mode: FakeTensorMode, parameter: nn.Parameter) -> nn.Parameter:
    """Return a fake parameter of the same shape that claims to be on the CPU."""
    with mode:
        shape = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="cpu")
        return _as_parameter(shape, parameter)


_CPU = torch.device("cpu")


def materialize(layer: Layer, tensors: Mapping[str, torch.Tensor], device: torch.device = _CPU) -> None:
    """Set a layer's parameters and buffers to the caller's objects, by their names in the model.

    Layers that are given the same ``nn.Parameter`` share it, so a parameter used twice in a stage is one. The tensors
    are expected on ``device``; what the layer makes itself is made there too.

    Raises:
        FileError: one is missing or has another shape.
    """
    for attribute, name in layer.parameters.items():
        value = _find(layer, name, tensors, layer.module.get_parameter(attribute))
        if not isinstance(value, nn.Parameter):
            raise TypeError(f"layer {layer.name}: {name} must be given as an nn.Parameter")
        place(layer.module, attribute, value)
    for attribute, name in layer.buffers.items():
        place(layer.module, attribute, _find(layer, name, tensors, layer.module.get_buffer(attribute)))
    if device.type != "cpu":
        retarget(layer, device)


def _find(layer: Layer, name: str, tensors: Mapping[str, torch.Tensor], template: torch.Tensor) -> torch.Tensor:
    if name not in tensors:
        raise FileError(f"layer {layer.name}: the weights lack {name}")
    if tensors[name].shape != template.shape:
        found, wanted = tuple(tensors[name].shape), tuple(template.shape)
        raise FileError(f"layer {layer.name}: {name} has shape {found} in the weights, the model needs {wanted}")
    return tensors[name]


def place(module: nn.Module, attribute: str, value: torch.Tensor) -> None:
    """Set the parameter or buffer at an attribute path of a module."""
    parent, _, last = attribute.rpartition(".")
    setattr(module.get_submodule(parent), last, value)


_RANDOM_DEVIATION = 0.02
"""Of the weights that stand in for those of a model larger than memory: what most language models start from."""


def materialize_random(layer: Layer, seed: int = 0, device: torch.device = _CPU) -> None:
    """Give the parameters of a layer without values some of the usual scale, drawn from the seed and their names.

    Matrices are normal with deviation 0.02, one-dimensional weights (of normalisations) are one, biases zero: neither
    the model's own initial weights nor good ones to train from, but numbers that a kernel meets in training. Buffers
    keep their values. :func:`release` takes the values away again.
    """
    _replace_parameters(layer, lambda name, shape: _usual_values(shape, name, seed, device))
    for attribute in layer.buffers:
        place(layer.module, attribute, layer.module.get_buffer(attribute).to(device))
    if device.type != "cpu":
        retarget(layer, device)


def _usual_values(shape: torch.Tensor, name: str, seed: int = 0, device: torch.device = _CPU) -> torch.Tensor:
    """Return values for a parameter of the model that has a shape alone; see :func:`materialize_random`."""
    value = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device=device)
    if shape.dim() < 2:
        return value.fill_(1.0 if name.endswith("weight") else 0.0)
    key = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little") >> 1
    return value.normal_(std=_RANDOM_DEVIATION, generator=torch.Generator(device).manual_seed(key))


def release(layer: Layer) -> None:
    """Take the values of a layer's parameters, and their gradients, away again: it becomes on_meta."""
    _replace_parameters(layer, lambda name, value: torch.empty_like(value, device="meta"))


def _replace_parameters(layer: Layer, replacement: Callable[[str, nn.Parameter], torch.Tensor]) -> None:
    """Give the parameters of a layer, by their names in the model, other tensors; a tied one is replaced once."""
    made: dict[str, nn.Parameter] = {}
    for attribute, name in layer.parameters.items():
        value = layer.parameter(attribute)
        if name not in made:
            made[name] = _as_parameter(replacement(name, value), value)
        place(layer.module, attribute, made[name])


def _as_parameter(value: torch.Tensor, like: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=like.requires_grad)


def retarget(layer: Layer, device: torch.device) -> None:
    """Make what a layer's graph creates, and its constants, live on a device; its regions of autocast are of it, too.

    A region of another type of device than the CPU's, which the code names (``torch.autocast("cuda", ...)``), stays.
    """
    buffers = set(layer.buffers)
    for name, constant in layer.module.named_buffers():
        if name not in buffers:
            place(layer.module, name, constant.to(device))
    for module in layer.module.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                node.args = _replace_devices(node.args, device)
                if node.target is torch.ops.higher_order.wrap_with_autocast and node.args[0] == _CPU.type:
                    node.update_arg(0, device.type)
                node.kwargs = _replace_devices(node.kwargs, device)
            module.recompile()


def _replace_devices(value: Any, device: torch.device) -> Any:  # noqa: ANN401
    return fx.node.map_aggregate(value, lambda item: device if isinstance(item, torch.device) else item)


class MetaRunner:
    """Runs modules whose parameters have no values; see :func:`meta_runner`."""

    def __init__(self, mode: FakeTensorMode, names: Mapping[int, str]) -> None:
        self._mode, self._names = mode, names

    def run(
        self, module: nn.Module, compute: Callable[[tuple[torch.Tensor, ...]], object], inputs: Sequence[torch.Tensor]
    ) -> tuple[object, bool]:
        """Return what ``compute``, which runs ``module`` and no other with parameters, gives; and whether it draws.

        Tensors of the result are fake, those among the inputs may be. Integers that were fake are zeros where values
        decide. What the module raises is what it raises with values.
        """
        # Where it raises, the module is mistaken, which it then is with values too; or values decide.
        with contextlib.suppress(Exception):
            with self._mode, _Draws() as drawn:
                found = compute(tuple(map(self._fake, inputs)))
            made = (each for each in tree_leaves(found) if isinstance(each, torch.Tensor))
            if all(type(size) is int for each in made for size in each.shape):
                return found, drawn.has_draws
        before = torch.get_rng_state()
        with self._with_values(module):
            found = compute(tuple(map(_with_random_values, inputs)))
        return tree_map_only(torch.Tensor, self._fake, found), not torch.equal(before, torch.get_rng_state())

    def observe(self, call: Callable[[Sequence[torch.Tensor]], None], inputs: Sequence[torch.Tensor]) -> None:
        """Run the whole model by ``call`` on fake tensors; what it raises on them is raised."""
        with self._mode:
            call([self._fake(tensor) for tensor in inputs])

    def observe_in_turn(self, call: Callable[[], None], modules: Sequence[nn.Module]) -> None:
        """Run the whole model by ``call`` with values, of which each of ``modules`` has some while it runs."""
        giving: dict[nn.Module, contextlib.ExitStack] = {}

        def give(module: nn.Module, *_: object) -> None:
            giving[module] = contextlib.ExitStack()
            giving[module].enter_context(self._with_values(module))

        handles = [module.register_forward_pre_hook(give, prepend=True) for module in modules]
        handles += [module.register_forward_hook(lambda module, *_: giving.pop(module).close()) for module in modules]
        try:
            # A tape would hold every module's values to the end.
            with torch.no_grad():
                call()
        finally:
            for stack in giving.values():
                stack.close()
            for handle in handles:
                handle.remove()

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        fake = self._mode.from_tensor(tensor.detach(), static_shapes=True)
        return fake.requires_grad_(tensor.requires_grad)

    def _with_values(self, module: nn.Module) -> AbstractContextManager[None]:
        """Give one module's parameters values of the usual scale in the block."""
        return _replaced_parameters(
            module, lambda name, shape: _as_parameter(_usual_values(shape, self._names.get(id(shape), name)), shape)
        )


@contextlib.contextmanager
def meta_runner(model: nn.Module, modules: Sequence[nn.Module] = ()) -> Iterator[MetaRunner]:
    """Let a model's parameters, which other modules may hold too, pass for tensors on the CPU in the block."""
    everything = nn.ModuleList([model, *modules])
    with fake_parameters(everything) as mode, without_fakes(everything), general_masks():
        yield MetaRunner(mode, {id(value): name for name, value in model.named_parameters()})


class _Draws(OperatorMode):  # type: ignore[no-untyped-call]
    """Notes whether an operator draws random numbers: fake ones leave the generator's state alone."""

    has_draws = False

    def run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        self.has_draws |= isinstance(operator, torch._ops.OpOverload) and draws(operator, args, kwargs)
        return super().run(operator, args, kwargs)


def _with_random_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return random numbers, or zeros of an integer type, for a tensor without values; another one as it is."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    value = torch.zeros(tuple(tensor.shape), dtype=tensor.dtype)
    if value.is_floating_point():
        value.normal_(generator=torch.Generator().manual_seed(0))
    return value.requires_grad_(tensor.requires_grad)
