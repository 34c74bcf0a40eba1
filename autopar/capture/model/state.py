"""Leave a model as it was: parameters, buffers, modes and random states, whatever its forward writes; or copy it.

What a job draws between two lines of a script is nothing to the script: else its data loader would give out other
samples than in plain training, and every rank others. So the random states that a script's own code draws from are
read, set, and left as they were.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy
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


_TWISTER = "MT19937"
"""NumPy's default generator, unless somebody sets another."""


def generator_states(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the states of torch's, Python's and NumPy's default generators, and of the device's."""
    found = {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    _, words, gauss = random.getstate()
    found["python"] = torch.tensor(words)
    found["python gauss"] = _gauss(gauss)
    state = numpy.random.get_state(legacy=False)
    if state["bit_generator"] == _TWISTER:
        found["numpy"] = torch.tensor([*state["state"]["key"].tolist(), state["state"]["pos"]])
        found["numpy gauss"] = _gauss(state["gauss"] if state["has_gauss"] else None)
    return found


def _gauss(kept: float | None) -> torch.Tensor:
    """Of a pair of normal numbers the second, where it has not been given out."""
    return torch.tensor([] if kept is None else [kept], dtype=torch.float64)


def set_generators(device: torch.device, states: Mapping[str, torch.Tensor]) -> None:
    """Set what :func:`generator_states` has found; some may be missing."""
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    if "python" in states:
        gauss = states.get("python gauss", torch.empty(0)).tolist()
        random.setstate((3, tuple(states["python"].tolist()), gauss[0] if gauss else None))
    if "numpy" in states:
        gauss = states.get("numpy gauss", torch.empty(0)).tolist()
        *key, pos = states["numpy"].tolist()
        found = {"state": {"key": numpy.array(key, dtype=numpy.uint32), "pos": pos}, "bit_generator": _TWISTER}
        numpy.random.set_state({**found, "has_gauss": len(gauss), "gauss": gauss[0] if gauss else 0.0})


@contextmanager
def preserve_generators(device: torch.device) -> Iterator[None]:
    """Leave the generators, at the end of the block, as they were at its beginning."""
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpy_state = numpy.random.get_state(legacy=False)
    cuda_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state, device)
