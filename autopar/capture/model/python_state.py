"""Python state: values outside of tensors that a forward reaches, as they are at a moment, by path.

    class Net(nn.Module):
        def forward(self, x):
            self.state["n"] += 1  # Net.state['n'] changes from 1 to 2 with every forward
            return x * 2 if self.state["n"] > 40 else x

A captured layer computes as the model did when it was captured, so a counter that it reads stands still. Forward and
loss are called three times, on different batches, and all that they reach is compared before and after the second and
third call. Objects that the first call makes (a mask, a cache) may stay. State that changes is refused with its path;
then

- keep it in a buffer, and write into it (``self.n.add_(1)``);
- or, if you only log it, name it: ``ignored_state = ["Net.state['n']"]`` in the model file, or
  ``autopar.profile(..., ignored_state=[...])``. A name stands for all that it holds (``"Net.state"``), the class of the
  model may be left out (``"state"``), ``*`` stands for anything (``"blocks.*.calls"``); ``"COUNT"`` and ``"global COUNT
  of model.py"`` are the same, and so it is with variables of closures. Profile, plan and report repeat the names;
- or list the layers: a module that alone keeps the state may change it, and is then neither replicated nor recomputed.
  The loss belongs to the last one. State that several modules reach is refused, and so is an iterator, which cannot be
  put back when the layers have been tried out. Such a job does not evaluate.

It is walked from a value through attributes, items, closures, and globals of the user's own files.
``M.state['n']`` is in an attribute of the model M, ``closure variable n of loss`` in a function, ``global COUNT of
model.py`` in a file of the user's own. Values are compared by structure, never by ``==``, which may be costly, raise,
or give no truth value. Globals of installed packages are not looked at, nor what C extensions keep. State is put back
as it was after capturing, so that training starts where plain training does.

Why: docs/design/decisions.md, "Capture: Python state is walked".
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import itertools
import random
import re
import sys
import sysconfig
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from os.path import abspath, basename, dirname, sep
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    GeneratorType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy
import torch
from torch import nn

_Parts = Iterator[tuple["Path", object]]

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

    def matches_any(self, names: Iterable[str]) -> bool:
        """Tell whether one of some names is this path's, or that of something on the way; ``*`` stands for anything.

        What is before and behind may be left out, and so may the model's class.

        >>> counter = Path("Net.blocks.3.state['n']")
        >>> [counter.matches_any([name]) for name in ("Net.blocks.3.state", "blocks.*.state['n']", "n")]
        [True, True, False]
        >>> Path("COUNT", "global ", " of model.py").matches_any(["COUNT"])
        True
        """
        return any(map(self._matches, names))

    def _matches(self, name: str) -> bool:
        if self.before and name.startswith(self.before) and name.endswith(self.behind):
            name = name[len(self.before) : len(name) - len(self.behind)]
        pattern = ".*".join(map(re.escape, name.split("*"))) + r"(?=$|[.\[])"
        return any(re.match(pattern, text) for text in (self.inner, self.inner.partition(".")[2]))


def _parts_of(path: Path, value: Any) -> _Parts:  # noqa: ANN401
    """Return what a value reaches in a single step, each with its path."""
    if isinstance(value, ModuleType):
        return
    if isinstance(value, type):
        # What its methods reach, those of its bases included.
        for kind in value.__mro__:
            at = Path(kind.__name__, "class attribute ")
            yield from ((at.attribute(name), item) for name, item in attributes_of(kind).items())
        return
    hidden = _internal_state(value)
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


def _of_container(path: Path, value: Any) -> _Parts:  # noqa: ANN401
    if isinstance(value, (dict, MappingProxyType)):
        yield from ((path.item(key), item) for key, item in list(value.items()))
    elif isinstance(value, (list, tuple, deque)):
        yield from ((path.item(index), item) for index, item in enumerate(list(value)))
    elif isinstance(value, (set, frozenset)):
        # Their own order is another in every process.
        yield from ((path.item(index), item) for index, item in enumerate(sorted(value, key=repr)))
    elif isinstance(value, numpy.ndarray) and value.dtype == object:
        yield from ((path.item(index), item) for index, item in enumerate(value.flat))


def _internal_state(value: Any) -> dict[str, object] | None:  # noqa: ANN401
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


def _of_callable(path: Path, value: Any) -> _Parts:  # noqa: ANN401
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
        yield from ((path, content) for content in contents_of(value))
    elif isinstance(value, FunctionType):
        yield from _of_function(value)
    elif callable(value) and not isinstance(value, nn.Module):
        wrapped = inspect.getattr_static(value, "__wrapped__", None)
        if inspect.isfunction(wrapped):
            yield path, wrapped


def contents_of(cell: CellType) -> list[object]:
    """Return what a cell holds, if its variable has a value yet."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _of_function(value: FunctionType) -> _Parts:
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
    return list(_resolve_globals(names_of(value.__code__), value.__globals__, set()))


def _resolve_globals(
    names: frozenset[str], variables: dict[str, Any], seen_ids: set[int]
) -> Iterator[tuple[dict[str, Any], str]]:
    if id(variables) in seen_ids or not _own(variables.get("__file__"), variables.get("__name__")):
        return
    seen_ids.add(id(variables))
    for name in sorted(names & variables.keys()):
        if isinstance(variables[name], ModuleType):
            yield from _resolve_globals(names, vars(variables[name]), seen_ids)
        elif not name.startswith("__"):
            yield variables, name


@functools.lru_cache(maxsize=4096)
def names_of(code: CodeType) -> frozenset[str]:
    """Return the names and texts in a function, and in those within it."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, str):
            found.add(constant)
        elif isinstance(constant, CodeType):
            found |= names_of(constant)
    return frozenset(found)


def is_own(module: ModuleType | None) -> bool:
    """Tell whether a module is of the user's own files, and not of an installed package."""
    return module is not None and _own(getattr(module, "__file__", None), module.__name__)


def is_own_file(path: str) -> bool:
    """Tell whether a file is none of Python's or of an installed package."""
    return _own(path, None)


@functools.lru_cache(maxsize=4096)
def _own(file: str | None, name: str | None) -> bool:
    if file is None:
        # Typed in, or of a notebook.
        return name == "__main__"
    path = abspath(file)
    installed = any(f"{sep}{folder}{sep}" in path for folder in ("site-packages", "dist-packages"))
    return not (installed or path.startswith(_INSTALLED))


def restorers(value: Any) -> Iterator[Callable[[], object]]:  # noqa: ANN401
    """Yield what puts a single value back as it is now; nothing for iterators, which cannot be put back."""
    if isinstance(value, torch.Tensor):
        if not isinstance(value, nn.Parameter) and not value.is_inference():
            yield _tensor_restorer(value)
        return
    if isinstance(value, (list, deque, dict, set, bytearray)):
        yield _container_restorer(value)
    elif isinstance(value, numpy.ndarray):
        array = value.copy()
        yield lambda: numpy.copyto(value, array) if value.flags.writeable else None
    elif isinstance(value, random.Random):
        yield functools.partial(value.setstate, value.getstate())
    elif isinstance(value, numpy.random.Generator):
        yield functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    elif isinstance(value, (torch.Generator, numpy.random.RandomState)):
        generator: Any = value
        yield functools.partial(generator.set_state, generator.get_state())
    elif isinstance(value, CellType):
        for content in contents_of(value):
            yield functools.partial(setattr, value, "cell_contents", content)
    elif isinstance(value, FunctionType):
        for variables, name in globals_of(value):
            yield functools.partial(variables.update, {name: variables[name]})
    yield _attribute_restorer(value)


def _tensor_restorer(tensor: torch.Tensor) -> Callable[[], None]:
    copied, version = tensor.detach().clone(), tensor._version

    def put_back() -> None:
        if tensor._version != version:
            with torch.no_grad():
                tensor.copy_(copied)

    return put_back


def _container_restorer(container: Any) -> Callable[[], None]:  # noqa: ANN401
    before = list(container.items() if isinstance(container, dict) else container)

    def put_back() -> None:
        container.clear()
        (container.update if isinstance(container, (dict, set)) else container.extend)(before)

    return put_back


def _attribute_restorer(value: Any) -> Callable[[], None]:  # noqa: ANN401
    before = attributes_of(value)

    def put_back() -> None:
        now = attributes_of(value)
        for name in now.keys() - before.keys():
            delattr(value, name)
        for name, item in before.items():
            if name not in now or now[name] is not item:
                _assign(value, name, item)

    return put_back


def _assign(value: Any, name: str, item: object) -> None:  # noqa: ANN401
    """Set an attribute, and nothing that its class may do when it is set."""
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        setattr(value, name, item)
    else:
        value.__dict__[name] = item


Roots = Mapping[Path, object]
"""Where walks begin: a model and its loss, by the names that paths are to begin with."""

MOST_OBJECTS = 200_000
"""A walk ends there; nearer objects come first."""
_SHORT = 32
"""Longer containers of numbers and texts are compared as one."""
_LARGEST_ARRAY_BYTES = 2**26
ATOMS = (type(None), bool, int, float, complex, str, bytes, type(...))
_SHOWN = (itertools.count, itertools.repeat, range, slice, torch.dtype, torch.device, numpy.generic)


@dataclass(eq=False)
class Snapshot:
    """What roots reached."""

    values: dict[Path, list[object]] = field(default_factory=dict)
    """Something that is equal as long as the value is the same; closures of one name have one path."""
    tensors: dict[Path, list[tuple[torch.Tensor, int]]] = field(default_factory=dict)
    """With how often they had been written."""
    restorers: list[Callable[[], object]] = field(default_factory=list)

    def restore(self) -> None:
        """Put back the values that are kept; iterators stay where they are."""
        for put_back in self.restorers:
            put_back()


def roots_of(model: nn.Module, loss: Callable[..., Any] | None) -> dict[Path, object]:
    """Return where the walk through a model's and its loss's state begins."""
    return {Path(type(model).__name__): model} | ({} if loss is None else {Path("loss"): loss})


def snapshot(roots: Roots, is_restorable: Callable[[Path], bool] = lambda path: False) -> Snapshot:
    """Note the state that the roots reach; that of paths that are ``is_restorable`` can be restored."""
    found = Snapshot()
    for path, value, before in walk(roots):
        if isinstance(value, torch.Tensor):
            found.tensors.setdefault(path, []).append((value, 0 if value.is_inference() else value._version))
        else:
            token = token_of(value) if before is None else ("same", before)
            if isinstance(value, nn.Module):
                # Modules that are alike have other parameters.
                token = token, id(value), tuple(map(id, value._parameters.values()))
            found.values.setdefault(path, []).append(token)
        if before is None and not isinstance(value, ATOMS) and is_restorable(path):
            with contextlib.suppress(Exception):
                found.restorers.extend(restorers(value))
    return found


def tensors_reached(roots: Roots) -> list[tuple[Path, torch.Tensor]]:
    """Return the tensors that the roots reach, but for parameters and buffers where modules register them."""
    return [(path, value) for path, value, _ in walk(roots) if isinstance(value, torch.Tensor)]


def parameters_reached(roots: Roots) -> dict[str, nn.Parameter]:
    """Return the parameters that the roots reach, each once, by path."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for path, value, _ in walk(roots):
        parameters = value._parameters if isinstance(value, nn.Module) else {}
        named = [(str(path), value), *((str(path.attribute(key)), each) for key, each in parameters.items())]
        for name, each in named:
            if isinstance(each, nn.Parameter):
                found.setdefault(id(each), (name, each))
    return dict(found.values())


def contents(value: object) -> dict[Path, list[object]]:
    """Return something that is equal for values, such as samples of data, that hold the same."""
    found: dict[Path, list[object]] = {}
    for path, part, before in walk({Path(""): value}):
        token = token_of(part) if before is None else ("same", before)
        if isinstance(part, torch.Tensor) and part.layout is torch.strided:
            token = part.shape, part.dtype, digest_of(bytes_of(part))
        found.setdefault(path, []).append(token)
    return found


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the elements of a tensor, of whatever type and wherever it lies, in order."""
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes()


@contextlib.contextmanager
def preserve_state(roots: Roots, ignored_state: tuple[str, ...]) -> Iterator[Snapshot]:
    """Put the state that the roots reach back at the end of the block, but for what is ignored: the user's logs."""
    before = snapshot(roots, lambda path: not path.matches_any(ignored_state))
    try:
        yield before
    finally:
        before.restore()


def walk(
    roots: Roots, takes: Callable[[object, Path, object], bool] = lambda holder, path, part: True
) -> Iterator[tuple[Path, object, Path | None]]:
    """Yield everything that the roots reach, nearest first, and the path where it has been yielded before.

    ``takes`` tells of a holder, a path and what is there whether the walk goes there.
    """
    first: dict[int, Path] = {}
    # Kept to the end, for the address of a value that is gone may be another's.
    visited: list[object] = []
    waiting: deque[tuple[Path, object]] = deque(roots.items())
    while waiting and len(visited) < MOST_OBJECTS:
        path, value = waiting.popleft()
        visited.append(value)
        if isinstance(value, (*ATOMS, torch.Tensor)):
            yield path, value, None
        elif id(value) in first:
            yield path, value, first[id(value)]
        else:
            first[id(value)] = path
            yield path, value, None
            # An object may raise whatever it likes when it is asked for an attribute: then it stays closed.
            with contextlib.suppress(Exception):
                parts = [] if _is_plain(value) else _parts_of(path, value)
                waiting.extend([each for each in parts if takes(value, *each)])


FROM = "changes from "
"""What is said of a number or text that differs."""


def differences(before: Snapshot, after: Snapshot) -> dict[Path, str]:
    """Return the paths whose values differ, and how.

    Of a value that is there before and after, and of what it holds, the innermost path is named; of one that is there
    only once, the outermost.
    """
    one, other = before.values, after.values
    differing = [path for path in one | other if one.get(path) != other.get(path)]
    differing += _moved_tensor_paths(before, after)
    lasting = {path for path in differing if path in one and path in other}
    holders, every = {holder for path in lasting for holder in path.holders()}, set(differing)
    kept = [
        path for path in differing if (path not in holders if path in lasting else every.isdisjoint(path.holders()))
    ]
    return {path: _change(one.get(path, []), other.get(path, [])) for path in kept}


def _moved_tensor_paths(before: Snapshot, after: Snapshot) -> list[Path]:
    """Return the paths of tensors that were at other paths before; new tensors are no state until one is read."""
    known = {id(tensor) for tensors in before.tensors.values() for tensor, _ in tensors}
    found = []
    for path in before.tensors.keys() & after.tensors.keys():
        pairs = zip(before.tensors[path], after.tensors[path], strict=False)
        if any(one is not other and id(other) in known for (one, _), (other, _) in pairs):
            found.append(path)
    return sorted(found, key=str)


def _change(before: list[object], after: list[object]) -> str:
    for pair in zip(before, after, strict=False):
        shown = [token[1] for token in pair if isinstance(token, tuple) and token[0] in ATOMS]
        if len(shown) == 2 and pair[0] != pair[1]:
            return f"{FROM}{shown[0]:.40} to {shown[1]:.40}"
    return "changes"


def _is_plain(value: object) -> bool:
    """Tell whether a container is long, and holds numbers and texts only."""
    if not isinstance(value, (list, tuple, set, frozenset, dict, deque)) or len(value) <= _SHORT:
        return False
    items: Iterator[object] = itertools.chain(value, value.values()) if isinstance(value, dict) else iter(value)
    return set(map(type, items)).issubset(ATOMS)


def token_of(value: Any, most_bytes: int = _LARGEST_ARRAY_BYTES) -> object:  # noqa: ANN401
    """Return something that is equal for equal values, in every process; of what a value holds a walk tells.

    Arrays of more than ``most_bytes`` are taken for equal.
    """
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, ATOMS):
        return type(value), repr(value)
    if _is_plain(value) or isinstance(value, bytearray):
        items = sorted(map(repr, value)) if isinstance(value, (set, frozenset)) else value
        return kind, len(value), digest_of(repr(items).encode("utf-8", "replace"))
    if isinstance(value, dict):
        return kind, tuple(map(_key, value))
    if isinstance(value, (set, frozenset)):
        return kind, tuple(sorted(map(_key, value)))
    if isinstance(value, (list, tuple, deque)):
        return kind, len(value)
    if isinstance(value, numpy.ndarray) and value.dtype != object and value.nbytes <= most_bytes:
        return kind, value.shape, str(value.dtype), digest_of(numpy.ascontiguousarray(value).tobytes())
    if isinstance(value, torch.Generator):
        return kind, digest_of(value.get_state().numpy().tobytes())
    if isinstance(value, _SHOWN):
        return kind, repr(value)
    if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        code = value.__code__ if isinstance(value, FunctionType) else None
        own = code is not None and is_own(sys.modules.get(str(value.__module__)))
        return kind, value.__module__, value.__qualname__, code and (_code(code) if own else code.co_firstlineno)
    return kind, None


def _key(key: object) -> str:
    return repr(key) if isinstance(key, ATOMS) else type(key).__qualname__


@functools.lru_cache(maxsize=4096)
def _code(code: CodeType) -> str:
    """Return a hash of what a function does, wherever it stands."""
    # The order of a set is another in every process.
    ordered = [sorted(map(repr, each)) if isinstance(each, frozenset) else each for each in code.co_consts]
    constants = [_code(each) if isinstance(each, CodeType) else repr(each) for each in ordered]
    parts = code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags, constants
    return digest_of(repr(parts).encode("utf-8", "replace"))


def digest_of(content: bytes) -> str:
    """Return a SHA-256."""
    return hashlib.sha256(content).hexdigest()
