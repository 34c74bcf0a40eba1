"""Reached: what Python code reaches from a value: attributes, items, closures, and globals of the user's own files."""

from __future__ import annotations

import functools
import inspect
import itertools
import random
import re
import sys
import sysconfig
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from os.path import abspath, basename, dirname, sep
from types import CellType, CodeType, FunctionType, GeneratorType, MappingProxyType, MethodType, ModuleType
from typing import Any

import numpy
from torch import nn

Parts = Iterator[tuple["Path", object]]

_FOLDERS = [path for name, path in sysconfig.get_paths().items() if name.endswith(("stdlib", "lib"))]
_INSTALLED = tuple(abspath(path) + sep for path in (*_FOLDERS, dirname(inspect.__file__), dirname(dirname(__file__))))
_OPAQUE = {"torch", "logging", "threading", "weakref", "_weakref", "io", "_io", "re", "inspect", "ctypes"}
"""Packages whose objects keep what no forward computes with: locks, guards, open files."""
_OF_MODULES = set(vars(nn.Module())) - {"_forward_hooks", "_forward_pre_hooks"}


@dataclass(frozen=True)
class Path:
    """Where a value is.

    >>> print(Path("COUNT", "global ", " of model.py").item("n"))
    global COUNT['n'] of model.py
    """

    inner: str
    before: str = ""
    behind: str = ""

    def __str__(self) -> str:
        return f"{self.before}{self.inner}{self.behind}"

    def attribute(self, name: str) -> Path:
        """Return that of an attribute."""
        return Path(f"{self.inner}.{name}", self.before, self.behind)

    def item(self, key: object) -> Path:
        """Return that of an item."""
        text = repr(key) if isinstance(key, (str, int, float, bool, bytes, type(None))) else type(key).__name__
        return Path(f"{self.inner}[{text}]", self.before, self.behind)

    def holders(self) -> Iterator[Path]:
        """Yield the paths of what holds this, outermost first.

        >>> [path.inner for path in Path("M.state['n']").holders()]
        ['M', 'M.state']
        """
        for place, letter in enumerate(self.inner):
            if letter in ".[":
                yield Path(self.inner[:place], self.before, self.behind)

    def named_by(self, names: tuple[str, ...]) -> bool:
        """Tell whether one of the names is this path's."""
        return any(map(self.named, names))

    def named(self, name: str) -> bool:
        """Tell whether a name is this path's, or that of something on the way; ``*`` stands for anything.

        What is before and behind may be left out, and so may the model's class.

        >>> counter = Path("Net.blocks.3.state['n']")
        >>> [counter.named(name) for name in ("Net.blocks.3.state['n']", "blocks.3.state", "blocks.*.state", "n")]
        [True, True, True, False]
        >>> [Path("COUNT", "global ", " of model.py").named(name) for name in ("COUNT", "global COUNT of model.py")]
        [True, True]
        """
        if self.before and name.startswith(self.before) and name.endswith(self.behind):
            name = name[len(self.before) : len(name) - len(self.behind)]
        pattern = ".*".join(map(re.escape, name.split("*"))) + r"(?=$|[.\[])"
        return any(re.match(pattern, text) for text in (self.inner, self.inner.partition(".")[2]))


def parts_of(path: Path, value: Any) -> Parts:  # noqa: ANN401
    """Return what a value reaches in a single step, each with its path."""
    if isinstance(value, ModuleType):
        return
    if isinstance(value, type):
        yield from _of_class(value)
        return
    hidden = _hidden(value)
    if hidden is not None:
        yield from ((path.attribute(name), item) for name, item in hidden.items())
        return
    yield from _of_container(path, value)
    yield from _of_callable(path, value)
    yield from ((path.attribute(name), item) for name, item in attributes_of(value).items())
    if isinstance(value, nn.Module):
        yield from ((path.attribute(name), child) for name, child in value._modules.items())
    if is_own(sys.modules.get(type(value).__module__)):
        yield Path(type(value).__name__, "class "), type(value)


def attributes_of(value: Any) -> dict[str, object]:  # noqa: ANN401
    """Return an object's attributes: of a module those that are none of torch's, of a class of the user's own all."""
    kind = type(value)
    if isinstance(value, type):
        own = vars(value) if is_own(sys.modules.get(value.__module__)) else {}
        return {name: item for name, item in own.items() if callable(item) or not name.startswith("__")}
    if kind.__module__.partition(".")[0] in _OPAQUE and not isinstance(value, nn.Module):
        return {}
    found = dict(getattr(value, "__dict__", None) or {})
    if isinstance(value, nn.Module):
        found = {name: item for name, item in found.items() if name not in _OF_MODULES}
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ()) if is_own(sys.modules.get(base.__module__)) else ()
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__") and hasattr(value, slot):
                found[slot] = getattr(value, slot)
    return found


def _of_class(value: type) -> Parts:
    """A class of the user's own: its attributes, and what its methods reach."""
    for kind in value.__mro__:
        at = Path(kind.__name__, "class attribute ")
        yield from ((at.attribute(name), item) for name, item in attributes_of(kind).items())


def _of_container(path: Path, value: Any) -> Parts:  # noqa: ANN401
    if isinstance(value, (dict, MappingProxyType)):
        yield from ((path.item(key), item) for key, item in list(value.items()))
    elif isinstance(value, (list, tuple, deque, set, frozenset)):
        yield from ((path.item(index), item) for index, item in enumerate(list(value)))
    elif isinstance(value, numpy.ndarray) and value.dtype == object:
        yield from ((path.item(index), item) for index, item in enumerate(value.flat))


def _hidden(value: Any) -> dict[str, object] | None:  # noqa: ANN401
    """Return what objects that are written in C keep; none of other objects."""
    if isinstance(value, GeneratorType):
        frame = value.gi_frame
        return {} if frame is None else {"line": frame.f_lasti, "locals": dict(frame.f_locals)}
    if isinstance(value, random.Random):
        return {"state": value.getstate()}
    if isinstance(value, numpy.random.Generator):
        return {"state": value.bit_generator.state}
    if isinstance(value, numpy.random.RandomState):
        return {"state": value.get_state(legacy=False)}
    counted = isinstance(value, (itertools.count, itertools.repeat))
    if counted or not hasattr(type(value), "__next__") or hasattr(value, "__dict__"):
        return None
    with warnings.catch_warnings():
        # Python is going to lose this of the iterators of itertools.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return {"place": value.__reduce__()}
        except Exception:
            return {}


def _of_callable(path: Path, value: Any) -> Parts:  # noqa: ANN401
    if isinstance(value, MethodType):
        yield path, value.__func__
        yield path.attribute("__self__"), value.__self__
    elif isinstance(value, functools.partial):
        yield path.attribute("func"), value.func
        yield path.attribute("args"), value.args
        yield path.attribute("keywords"), value.keywords
    elif isinstance(value, (staticmethod, classmethod)):
        yield path, value.__func__
    elif isinstance(value, property):
        yield from ((path, function) for function in (value.fget, value.fset) if function is not None)
    elif isinstance(value, CellType):
        try:
            yield path, value.cell_contents
        except ValueError:
            # The variable has no value yet.
            return
    elif isinstance(value, FunctionType):
        yield from _of_function(value)
    elif callable(value) and not isinstance(value, nn.Module):
        wrapped = inspect.getattr_static(value, "__wrapped__", None)
        if inspect.isfunction(wrapped):
            yield path, wrapped


def _of_function(value: FunctionType) -> Parts:
    name, code = value.__name__, value.__code__
    for variable, cell in zip(code.co_freevars, value.__closure__ or (), strict=False):
        yield Path(variable, "closure variable ", f" of {name}"), cell
    names, defaults = code.co_varnames[: code.co_argcount], value.__defaults__ or ()
    named = [*zip(names[len(names) - len(defaults) :], defaults, strict=True), *(value.__kwdefaults__ or {}).items()]
    yield from ((Path(variable, "default ", f" of {name}"), item) for variable, item in named)
    for variables, variable in globals_of(value):
        file = basename(variables.get("__file__") or "") or str(variables.get("__name__"))
        yield Path(variable, "global ", f" of {file}"), variables[variable]


def globals_of(value: FunctionType) -> list[tuple[dict[str, Any], str]]:
    """Return the globals of the user's own files that a function names, as names in the files' variables."""
    return list(_named(_names(value.__code__), value.__globals__, set()))


def _named(names: frozenset[str], variables: dict[str, Any], seen: set[int]) -> Iterator[tuple[dict[str, Any], str]]:
    if id(variables) in seen or not _own(variables.get("__file__"), variables.get("__name__")):
        return
    seen.add(id(variables))
    for name in sorted(names & variables.keys()):
        if isinstance(variables[name], ModuleType):
            yield from _named(names, vars(variables[name]), seen)
        elif not name.startswith("__"):
            yield variables, name


@functools.lru_cache(maxsize=4096)
def _names(code: CodeType) -> frozenset[str]:
    """Return the names and texts in a function, and in those within it."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, str):
            found.add(constant)
        elif isinstance(constant, CodeType):
            found |= _names(constant)
    return frozenset(found)


def is_own(module: ModuleType | None) -> bool:
    """Tell whether a module is of the user's own files, and not of an installed package."""
    return module is not None and _own(getattr(module, "__file__", None), module.__name__)


@functools.lru_cache(maxsize=4096)
def _own(file: str | None, name: str | None) -> bool:
    if file is None:
        # Typed in, or of a notebook.
        return name == "__main__"
    path = abspath(file)
    installed = any(f"{sep}{folder}{sep}" in path for folder in ("site-packages", "dist-packages"))
    return not (installed or path.startswith(_INSTALLED))
