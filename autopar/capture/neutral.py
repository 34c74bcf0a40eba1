"""Neutral: computing in which rows of a batch meet in the loss only, in float64, so that losses can be compared.

Random numbers are replaced by their means (dropout leaves everything as it is), buffers stay as they are (no average
moves), and batch normalisation uses its running statistics.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

_SMALLER = (torch.float16, torch.bfloat16, torch.float32)
_MEANS: dict[str, Callable[..., float | torch.Tensor]] = {
    "rand": lambda *_, **__: 0.5,
    "rand_like": lambda *_, **__: 0.5,
    "randn": lambda *_, **__: 0.0,
    "randn_like": lambda *_, **__: 0.0,
    "uniform_": lambda value, low=0.0, high=1.0, **_: (low + high) / 2,
    "normal_": lambda value, mean=0.0, *_, **__: mean,
    "bernoulli_": lambda value, p=0.5, **_: p,
    "exponential_": lambda value, rate=1.0, **_: 1 / rate,
    "randint": lambda *_, **__: 0.0,
    "randint_like": lambda *_, **__: 0.0,
    "random_": lambda *_, **__: 0.0,
}
"""Of what operators draw, by their arguments."""


@contextlib.contextmanager
def neutral(model: nn.Module, *, double: bool) -> Iterator[None]:
    """Compute so inside the block; ``double`` makes float64 of all that the code asks in less precision."""
    norms = [part for part in model.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    modes = [part.training for part in norms]
    for part in norms:
        part.eval()
    try:
        with _Neutral({_place(buffer) for buffer in model.buffers()}, double):
            yield
    finally:
        for part, training in zip(norms, modes, strict=True):
            part.training = training


class _Neutral(TorchDispatchMode):
    def __init__(self, buffers: set[int], double: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffers, self._double = buffers, double

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        named = kwargs or {}
        out = _written(func, args, named)
        if out and all(_place(tensor) in self._buffers for tensor in out):
            return out[0] if len(out) == 1 else tuple(out)
        written = out[0] if out else None
        if self._double:
            args, named = self._doubled(args, out), {**self._doubled(named, out)}
            if named.get("dtype") in _SMALLER:
                named["dtype"] = torch.float64
        mean = _MEANS.get(func.overloadpacket.__name__)
        if mean is None:
            return func(*args, **named)
        value = mean(*args, **{name: item for name, item in named.items() if name in ("p", "mean")})
        if written is not None:
            return written.copy_(value) if isinstance(value, torch.Tensor) else written.fill_(value)
        return func(*args, **named).fill_(value)

    def _doubled(self, arguments: Any, written: list[torch.Tensor]) -> Any:  # noqa: ANN401
        def double(value: torch.Tensor) -> torch.Tensor:
            smaller = value.dtype in _SMALLER and not any(value is each for each in written)
            return value.double() if smaller else value

        return tree_map_only(torch.Tensor, double, arguments)


def _written(func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> list[torch.Tensor]:  # noqa: ANN401
    """Return the tensors that an operator writes in place, and returns."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else named.get(argument.name)
            found += [value] if isinstance(value, torch.Tensor) else []
    return found


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)
