"""Restore: put Python state back as it was, so that training starts where plain training does."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from types import CellType, FunctionType
from typing import Any

import numpy
import torch
from torch import nn

from autopar.capture.reached import attributes_of, globals_of

_NONE = object()


def restorers(value: Any) -> Iterator[Callable[[], None]]:  # noqa: ANN401
    """Yield what puts a single value back as it is now; nothing for iterators, which cannot be put back."""
    if isinstance(value, torch.Tensor):
        if not isinstance(value, nn.Parameter) and not value.is_inference():
            yield _written_back(value)
        return
    if isinstance(value, (list, deque, dict, set, bytearray)):
        yield _refilled(value)
    elif isinstance(value, numpy.ndarray):
        array = value.copy()
        yield lambda: _copied(value, array)
    elif isinstance(value, (torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState)):
        yield _rewound(value)
    elif isinstance(value, CellType):
        yield from _refound(value)
    elif isinstance(value, FunctionType):
        yield from (_reassigned(variables, name) for variables, name in globals_of(value))
    yield _with_attributes(value)


def _written_back(tensor: torch.Tensor) -> Callable[[], None]:
    copied, version = tensor.detach().clone(), tensor._version

    def put_back() -> None:
        if tensor._version != version:
            with torch.no_grad():
                tensor.copy_(copied)

    return put_back


def _copied(array: numpy.ndarray, before: numpy.ndarray) -> None:
    if array.flags.writeable:
        array[...] = before


def _refilled(container: Any) -> Callable[[], None]:  # noqa: ANN401
    before = list(container.items() if isinstance(container, dict) else container)

    def put_back() -> None:
        container.clear()
        (container.update if isinstance(container, (dict, set)) else container.extend)(before)

    return put_back


def _rewound(generator: Any) -> Callable[[], None]:  # noqa: ANN401
    if isinstance(generator, random.Random):
        state = generator.getstate()
        return lambda: generator.setstate(state)
    if isinstance(generator, numpy.random.Generator):
        bits = generator.bit_generator.state
        return lambda: setattr(generator.bit_generator, "state", bits)
    found = generator.get_state()
    return lambda: generator.set_state(found)


def _refound(cell: CellType) -> Iterator[Callable[[], None]]:
    try:
        content = cell.cell_contents
    except ValueError:
        # The variable has no value yet.
        return
    yield lambda: setattr(cell, "cell_contents", content)


def _reassigned(variables: dict[str, Any], name: str) -> Callable[[], None]:
    value = variables[name]
    return lambda: variables.update({name: value})


def _with_attributes(value: Any) -> Callable[[], None]:  # noqa: ANN401
    before = attributes_of(value)

    def put_back() -> None:
        for name, item in attributes_of(value).items():
            if name not in before:
                delattr(value, name)
            elif item is not before[name]:
                _assign(value, name, before[name])
        for name in before.keys() - attributes_of(value).keys():
            _assign(value, name, before[name])

    return put_back


def _assign(value: Any, name: str, item: object) -> None:  # noqa: ANN401
    """Set an attribute, and nothing that its class may do when it is set."""
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        setattr(value, name, item)
    else:
        value.__dict__[name] = item
