"""Neutral: a model runs so that the rows of a batch meet in its loss only, and nothing is drawn or moved.

Random numbers are replaced by their means (dropout leaves everything as it is), buffers stay as they are, and batch
normalisation uses its running statistics.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from autopar.capture.model.effects import OperatorMode, storage_of, written_values
from autopar.capture.model.state import preserve_modes

_SMALLER = (torch.float16, torch.bfloat16, torch.float32)
_MEANS: dict[str, Callable[..., float | torch.Tensor]] = {
    **dict.fromkeys(("rand", "rand_like"), lambda *_, **__: 0.5),
    **dict.fromkeys(("randn", "randn_like", "randint", "randint_like", "random_"), lambda *_, **__: 0.0),
    "uniform_": lambda value, low=0.0, high=1.0, **_: (low + high) / 2,
    "normal_": lambda value, mean=0.0, *_, **__: mean,
    "bernoulli_": lambda value, p=0.5, **_: p,
    "exponential_": lambda value, rate=1.0, **_: 1 / rate,
}
"""Of what operators draw, by their arguments."""


@contextlib.contextmanager
def neutral(model: nn.Module, *, double: bool) -> Iterator[None]:
    """Compute so inside the block; ``double`` makes float64 of all that the code asks in less precision."""
    norms = [part for part in model.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    with preserve_modes(norms):
        for part in norms:
            part.eval()
        with _Neutral({storage_of(buffer) for buffer in model.buffers()}, double):
            yield


class _Neutral(OperatorMode):  # type: ignore[no-untyped-call]
    def __init__(self, buffers: set[int], double: bool) -> None:
        super().__init__()
        self._buffers, self._double = buffers, double

    def run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        out = [value for value in written_values(operator, args, kwargs) if isinstance(value, torch.Tensor)]
        if out and all(storage_of(tensor) in self._buffers for tensor in out):
            return out[0] if len(out) == 1 else tuple(out)
        written = out[0] if out else None
        if self._double:
            args, kwargs = self._to_double(args, out), {**self._to_double(kwargs, out)}
            if kwargs.get("dtype") in _SMALLER:
                kwargs["dtype"] = torch.float64
        mean = _MEANS.get(operator.overloadpacket.__name__)
        if mean is None:
            return super().run(operator, args, kwargs)
        value = mean(*args, **{name: item for name, item in kwargs.items() if name in ("p", "mean")})
        if written is not None:
            return written.copy_(value) if isinstance(value, torch.Tensor) else written.fill_(value)
        return super().run(operator, args, kwargs).fill_(value)

    def _to_double(self, arguments: Any, written_tensors: list[torch.Tensor]) -> Any:  # noqa: ANN401
        def double(value: torch.Tensor) -> torch.Tensor:
            smaller = value.dtype in _SMALLER and not any(value is each for each in written_tensors)
            return value.double() if smaller else value

        return tree_map_only(torch.Tensor, double, arguments)
