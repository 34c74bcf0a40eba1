"""Models that are larger than memory: built and captured with shapes for parameters.

Parameters lose their values at the moment they are registered, so that never more than one is held; constants and
buffers that a constructor computes keep theirs. While such a model is captured its parameters are fake tensors that
claim to be on the CPU, so that the graph is the one that a real model would give.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autopar.errors import CaptureError

_BUILDING = threading.Lock()


def is_hollow(module: nn.Module) -> bool:
    """Tell whether parameters of a module have shapes but no values."""
    return any(parameter.device.type == "meta" for parameter in module.parameters())


@contextlib.contextmanager
def hollow_parameters() -> Iterator[None]:
    """Take the values of every parameter that a module registers inside the block."""
    register = nn.Module.register_parameter

    def register_hollow(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if type(parameter) is nn.Parameter and parameter.device.type != "meta":
            _empty(parameter)
        register(module, name, parameter)

    with _BUILDING:
        nn.Module.register_parameter = register_hollow  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]


def _empty(parameter: nn.Parameter) -> None:
    """Make a parameter a shape; whoever holds it sees the same object, so that tied parameters stay tied."""
    shape = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
    shape.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, shape)  # type: ignore[no-untyped-call]


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


class _Unwatched(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors whose own Python code is hidden from a profile function, which it would call a million times."""

    def __torch_dispatch__(self, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        before = sys.getprofile()
        sys.setprofile(None)
        try:
            return super().__torch_dispatch__(*arguments, **named)
        finally:
            sys.setprofile(before)


@contextlib.contextmanager
def faked(model: nn.Module) -> Iterator[FakeTensorMode]:
    """Let a hollow model's parameters pass for tensors on the CPU inside the block, where nothing computes."""
    mode = _Unwatched(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    held = [(module, name, value) for module in model.modules() for name, value in module._parameters.items()]
    fakes = {id(value): faked_parameter(mode, value) for _, _, value in held if value is not None}
    with mode:
        # What torch imports at the first fake computation is imported here, out of sight of a profile function.
        torch.zeros(1, requires_grad=True).view(-1).add(1)
    try:
        for module, name, value in held:
            if value is not None:
                module._parameters[name] = fakes[id(value)]
        yield mode
    finally:
        for module, name, value in held:
            module._parameters[name] = value


@contextlib.contextmanager
def without_fakes(model: nn.Module) -> Iterator[None]:
    """Put back what attributes of modules held before the block where they hold fake tensors at its end."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, held in before:
            for name, value in list(vars(module).items()):
                if isinstance(value, FakeTensor):
                    del module.__dict__[name]
                    if name in held:
                        module.__dict__[name] = held[name]


def faked_parameter(mode: FakeTensorMode, parameter: nn.Parameter) -> nn.Parameter:
    """Return a fake parameter of the same shape that claims to be on the CPU."""
    with mode:
        shape = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="cpu")
        return nn.Parameter(shape, requires_grad=parameter.requires_grad)
