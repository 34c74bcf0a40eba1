"""Plain values: settings of optimizers and schedulers as JSON, and back, exactly."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from pydantic import JsonValue

MOST_NUMBERS = 1024
"""Of a tensor among settings; a larger one is no setting."""


class NotPlainError(Exception):
    """A value is not made of numbers, texts, lists, dicts and small tensors."""


def to_plain(value: object) -> JsonValue:
    """Return a value as JSON.

    >>> to_plain({"lr": 0.1, "betas": (0.9, math.inf)})
    {'lr': 0.1, 'betas': {'tuple': [0.9, {'float': 'inf'}]}}

    Raises:
        NotPlainError: it has none.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, torch.Tensor) and value.numel() <= MOST_NUMBERS and not value.is_complex():
        return {"tensor": to_plain(value.tolist()), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, tuple) and type(value) is tuple:
        return {"tuple": [to_plain(each) for each in value]}
    if isinstance(value, list):
        return [to_plain(each) for each in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {str(key): to_plain(each) for key, each in value.items()}
    raise NotPlainError(f"{type(value).__name__} is no plain value")


def from_plain(value: JsonValue) -> object:
    """Return what :func:`to_plain` was given.

    >>> from_plain(to_plain({"betas": (0.9, -math.inf), "lr": torch.tensor(0.5)}))
    {'betas': (0.9, -inf), 'lr': tensor(0.5000)}

    Raises:
        NotPlainError: it is not such a value.
    """
    if isinstance(value, list):
        return [from_plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"float"}:
        return float(str(value["float"]))
    if value.keys() == {"tuple"}:
        return tuple(from_plain(each) for each in _list(value["tuple"]))
    if value.keys() == {"tensor", "dtype"}:
        dtype = getattr(torch, str(value["dtype"]), None)
        if not isinstance(dtype, torch.dtype):
            raise NotPlainError(f"torch has no type {value['dtype']!r}")
        return torch.tensor(from_plain(value["tensor"]), dtype=dtype)
    return {key: from_plain(each) for key, each in value.items()}


def _list(value: JsonValue) -> list[JsonValue]:
    if not isinstance(value, list):
        raise NotPlainError("a tuple is not given as a list")
    return value


def plain_items(values: Mapping[str, object]) -> dict[str, JsonValue]:
    """Return those of some named values that have a JSON; the others are code, and stay where they are."""
    found: dict[str, JsonValue] = {}
    for name, value in values.items():
        try:
            found[str(name)] = to_plain(value)
        except NotPlainError:
            continue
    return found
