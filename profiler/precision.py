"""Precision: what layers compute in, as a context that their forwards run in."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from autopar.errors import UsageError
from autopar.formats.profile import Precision

Computing = Callable[[], AbstractContextManager[object]]
"""Makes the context that one forward runs in; a backward runs outside of it, in the types of its forward."""

_KINDS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def as_it_is() -> AbstractContextManager[object]:
    """Compute in the types that the tensors have."""
    return contextlib.nullcontext()


def computing(precision: Precision, device: torch.device) -> Computing:
    """Return what forwards run in: autocast for ``bf16`` and ``fp16``, else nothing.

    Raises:
        UsageError: autocast of this device does not take the type.
    """
    if precision not in _KINDS:
        return as_it_is
    kind = _KINDS[precision]
    if not _takes(device, kind):
        name = str(kind).removeprefix("torch.")
        raise UsageError(f"`precision={precision!r}`: autocast on {device.type} does not compute in {name} here")
    return lambda: torch.autocast(device.type, kind)


def _takes(device: torch.device, kind: torch.dtype) -> bool:
    square = torch.ones(2, 2, device=device)
    with contextlib.suppress(RuntimeError), warnings.catch_warnings():
        # What autocast does not take, it leaves as it is, with a warning.
        warnings.simplefilter("ignore")
        with torch.autocast(device.type, kind):
            return torch.mm(square, square).dtype == kind
    return False
