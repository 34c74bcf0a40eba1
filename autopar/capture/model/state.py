"""Leave a model as it was: parameters, buffers and the random state, whatever its forward writes; or copy it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from autopar.capture.model.effects import OperatorMode, written_values
from autopar.capture.model.python_state import Path, tensors_reached
from autopar.errors import CaptureError


@contextlib.contextmanager
def preserve_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the model's buffers and the random state at the end of the block.

    Raises:
        CaptureError: a buffer has another size by then; names it.
    """
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    state = torch.get_rng_state()
    changed: list[str] = []
    try:
        yield
    finally:
        torch.set_rng_state(state)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                before = buffers.get(name, buffer)
                if before.shape != buffer.shape:
                    changed.append(f"{name} changes its size from {tuple(before.shape)} to {tuple(buffer.shape)}")
                    buffer.resize_(before.shape)
                if before is not buffer:
                    buffer.copy_(before)
    if changed:
        raise CaptureError(
            f"the buffer {changed[0]} in a forward, and ranks hold buffers of one size; register it in the size that "
            "it gets, or let model() run one forward of the module before it returns it"
        )


@contextlib.contextmanager
def preserve_parameters(model: nn.Module) -> Iterator[None]:
    """Restore the values of parameters that operators inside the block write; only those are copied.

    >>> layer = nn.Linear(1, 1)
    >>> before = layer.weight.item()
    >>> with preserve_parameters(layer):
    ...     layer.weight.data.add_(1.0).item() == before
    False
    >>> layer.weight.item() == before
    True
    """
    log = WriteLog(model.parameters())
    try:
        with log:
            yield
    finally:
        with torch.no_grad():
            for parameter, value in log.previous_values:
                parameter.copy_(value)


@contextlib.contextmanager
def preserve_modes(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put modules back into training or evaluation mode, each into its own, at the end of the block."""
    modes = [(module, module.training) for module in modules]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


class WriteLog(OperatorMode):  # type: ignore[no-untyped-call]
    """Notes which of some tensors operators write while it is active, under whatever alias."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._unwritten: dict[int, list[torch.Tensor]] = {}
        for tensor in filter(_has_memory, tensors):
            self._unwritten.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
        self.previous_values: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Tensors whose memory was written, each with a copy of its values before."""

    def run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        for tensor in tree_leaves(written_values(operator, args, kwargs)):
            if isinstance(tensor, torch.Tensor) and _has_memory(tensor):
                for each in self._unwritten.pop(tensor.untyped_storage()._cdata, ()):
                    self.previous_values.append((each, each.detach().clone()))
        return super().run(operator, args, kwargs)


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "meta" and tensor.layout is torch.strided


M = TypeVar("M", bound=nn.Module)


def deep_copy(model: M, *, sharing: bool = False) -> M:
    """Return a deep copy; what autograd has computed is copied without how.

    With ``sharing``, tensors that are neither parameters nor buffers are the model's own: who writes them writes both.

    >>> import warnings
    >>> from torch.nn.utils import weight_norm
    >>> with warnings.catch_warnings(action="ignore"):
    ...     layer = weight_norm(nn.Linear(2, 3))
    >>> deep_copy(layer).weight.shape
    torch.Size([3, 2])
    """
    computed = {id(tensor): tensor for _, tensor in tensors_reached({Path(""): model}) if tensor.grad_fn is not None}
    memo = {key: tensor.detach().clone() for key, tensor in computed.items()}
    if sharing:
        reached = (tensor for _, tensor in tensors_reached({Path(""): model}))
        memo |= {id(tensor): tensor for tensor in reached if id(tensor) not in computed}
    return copy.deepcopy(model, memo)
