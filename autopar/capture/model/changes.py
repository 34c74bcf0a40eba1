"""Changes: whether what forward and loss read outside of tensors is still as it was when they were captured.

    weights["aux"] = 0.1 * epoch   # read by loss(); a script writes it between steps
    model.dropout.p = 0.2
    model.backbone.eval()

In come a model, its loss, and the names in the code that they ran; out comes, asked before every step, whether a number
that this code can reach by such a name has another value, or a module another mode. A counter of a trainer whose method
the loss is, and which the loss does not mention, is not looked at. Neither is what ``ignored_state`` names.

It is asked often, and what can be reached is much: the walk is made once, and leaves a flat list of what to read again.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import operator
import os
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import CellType, CodeType, FunctionType, MappingProxyType
from typing import Any

import numpy
import torch
from torch import nn

from autopar.capture.model.python_state import (
    ATOMS,
    Path,
    Roots,
    attributes_of,
    contents_of,
    globals_of,
    is_own,
    names_of,
    token_of,
    walk,
)

_GONE = object()
_Read = Callable[[], Sequence[object]]


def names_read(codes: Collection[CodeType]) -> frozenset[str]:
    """Return the names by which some code can read attributes, globals and variables of closures."""
    return frozenset(name for code in codes for name in (*names_of(code), *code.co_freevars))


class Readings:
    """What forward and loss read, as it was when this was made."""

    def __init__(
        self, roots: Roots, names: Collection[str] | None, ignored_state: tuple[str, ...] = (), *, modes: bool = True
    ) -> None:
        """Read it.

        Args:
            roots: a model and its loss, or the functions of a file that make them. A model may be in evaluation mode as
                a whole, which says nothing: it is trained in training mode.
            names: in the code that they run; None if that is not known: everything is read.
            ignored_state: paths of what may change.
            modes: whether modes of modules count.
        """
        takes = functools.partial(_takes, names, ignored_state)
        models = [value for value in roots.values() if isinstance(value, nn.Module)] if modes else []
        reads: list[tuple[Path, _Read]] = [
            (Path("training"), functools.partial(_modes, model, list(model.modules()))) for model in models
        ]
        reads.append((Path("torch.get_default_dtype()"), lambda: [torch.get_default_dtype()]))
        if names is None or not {"environ", "getenv"}.isdisjoint(names):
            reads.append((Path("os.environ"), functools.partial(_items, os.environ)))
        trained = {module for value in roots.values() if isinstance(value, nn.Module) for module in value.modules()}
        for path, value, before in walk(roots, takes):
            if before is not None or isinstance(value, ATOMS):
                continue
            if isinstance(value, torch.Tensor) or (isinstance(value, nn.Module) and value not in trained):
                reads.append((path, functools.partial(_memory, value)))
            # An object may raise whatever it likes when it is asked for an attribute: then it stays closed.
            with contextlib.suppress(Exception):
                reads += [(path, read) for read in _reads(path, value, takes)]
        self._readings = [(read, list(read())) for _, read in reads]
        self._paths = [path for path, _ in reads]

    def have_changed(self) -> bool:
        """Tell whether something is other than it was."""
        return not all(_same(before, read()) for read, before in self._readings)

    def changed(self) -> list[str]:
        """Return the paths of what holds something that is other than it was."""
        every = zip(self._paths, self._readings, strict=True)
        return [str(path) for path, (read, before) in every if not _same(before, read())]


def _takes(
    names: Collection[str] | None, ignored_state: tuple[str, ...], holder: object, path: Path, part: object
) -> bool:
    """Tell whether a part of what is reached is read."""
    if ignored_state and path.matches_any(ignored_state):
        return False
    name = path.inner.rpartition(".")[2]
    if isinstance(holder, FunctionType) and path.before == "global ":
        return _reads_global(holder, holder.__globals__, name)
    by_name = names is not None and not path.inner.endswith("]") and not name.startswith("__")
    if not by_name or isinstance(part, (nn.Module, type)):
        return True
    own = isinstance(holder, nn.Module) or _is_users(holder)
    return not own or name in (names or ())


def _reads_global(function: FunctionType, variables: Mapping[str, object], name: str) -> bool:
    """Tell whether a function reads a global: of its own file by name, and no attribute that is called like it."""
    own = variables is function.__globals__ and name in variables
    return not own or name in _loaded_globals(function.__code__)


@functools.lru_cache(maxsize=4096)
def _loaded_globals(code: CodeType) -> frozenset[str]:
    found = {each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return frozenset(found).union(*map(_loaded_globals, inner))


def _is_users(value: object) -> bool:
    kind = value if isinstance(value, type) else type(value)
    return is_own(sys.modules.get(kind.__module__))


def _same(before: Sequence[object], now: Sequence[object]) -> bool:
    if len(before) != len(now):
        return False
    if all(map(operator.is_, before, now)):
        return True
    return all(
        one is other or (type(one) is type(other) and isinstance(one, ATOMS) and one == other)
        for one, other in zip(before, now, strict=True)
    )


def _modes(model: nn.Module, modules: Sequence[nn.Module]) -> list[object]:
    """Return which modules are in training mode; all are trained so where the model is not in it as a whole."""
    return [module.training for module in modules] if model.training else [True] * len(modules)


def _reads(path: Path, value: Any, takes: Callable[..., bool]) -> Iterator[_Read]:  # noqa: ANN401
    """Yield what reads again all that a value reaches in a single step, as ``parts_of`` has it."""
    if isinstance(value, (dict, MappingProxyType)):
        yield functools.partial(_items, value)
    elif isinstance(value, (list, tuple, deque, set, frozenset)):
        yield functools.partial(list, value)
    elif isinstance(value, numpy.ndarray):
        yield lambda: list(value.flat) if value.dtype == object else [repr(token_of(value))]
    elif isinstance(value, CellType):
        yield functools.partial(contents_of, value)
    elif isinstance(value, FunctionType):
        yield lambda: [value.__code__, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        read = ((each, name) for each, name in globals_of(value) if _reads_global(value, each, name))
        yield from (functools.partial(_values_at, variables, [name]) for variables, name in read)
    elif isinstance(value, functools.partial):
        yield lambda: [*value.args, *value.keywords.values()]
    if isinstance(value, nn.Module):
        yield functools.partial(_items, value._modules)
        yield functools.partial(_values_at, vars(value), ["forward"])
    keys = [name for name, part in attributes_of(value).items() if takes(value, path.attribute(name), part)]
    variables = getattr(value, "__dict__", {})
    inside, slots = [key for key in keys if key in variables], [key for key in keys if key not in variables]
    # What an object may have of its own, in the place of its class's.
    bases = (base for base in type(value).__mro__ if is_own(sys.modules.get(base.__module__)))
    inside += [
        name
        for name in {name for base in bases for name in vars(base)} - {*keys}
        if takes(value, path.attribute(name), None)
    ]
    if inside:
        yield functools.partial(_values_at, variables, inside)
    if slots:
        yield lambda: [getattr(value, name, _GONE) for name in slots]


def _memory(value: torch.Tensor | nn.Module) -> list[object]:
    """Return where a tensor's values are, or those of a module that is not trained: ``.data`` puts others there."""
    tables = (value._parameters, value._buffers) if isinstance(value, nn.Module) else ({"": value},)
    tensors = [each for table in tables for each in table.values() if each is not None]
    plain = (each for each in tensors if type(each) in (torch.Tensor, nn.Parameter))
    return [*tensors, *(each.data_ptr() for each in plain if each.layout is torch.strided)]


def _values_at(mapping: Mapping[str, object], keys: Sequence[str]) -> list[object]:
    return [mapping.get(key, _GONE) for key in keys]


def _items(mapping: Mapping[Any, object]) -> list[object]:
    return [*mapping, *mapping.values()]
