"""Recall: what was captured once is not captured again, as long as the model is the same.

    graph = recall(user, module, seed)  # reads what `autopar profile` has kept, or captures and keeps

An entry of the user's cache (:mod:`autopar.cache`) counts only where the model that was built is the same in all that a
capture depends on, and files and variables that the capture read are as they were. A graph of ``layers(model)`` is not
kept: it consists of the user's modules.

What a capture depends on has an identity, a text that is the same in every process:

    >>> model, batch = nn.Linear(2, 1), (torch.zeros(2, 2), torch.zeros(2, 1))
    >>> loss = lambda output, batch: (output - batch[1]).square().mean()
    >>> identity(model, batch, loss) == identity(nn.Linear(2, 1), batch, loss)
    True
    >>> identity(model, batch, loss) == identity(model.double(), batch, loss)
    False

In it are the modules, parameters (their shapes, not their values), all other tensors, the Python state and code that
model and loss reach, the shapes of a batch, settings of torch, and versions. What code reads of the world while it is
captured is not known before: :class:`WorldReads` notes the files and variables of the environment, so that an equal
identity counts only where these are as they were.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import torch
from torch import nn

from autopar.cache import Cache, Entry, users_cache
from autopar.capture.cache.store import constants_of, load_graph, save_graph
from autopar.capture.graph import LayerGraph
from autopar.capture.layers.export import capture, capture_module
from autopar.capture.model.batch import named_tensors
from autopar.capture.model.python_state import (
    MOST_OBJECTS,
    bytes_of,
    contents,
    digest_of,
    is_own_file,
    roots_of,
    tensors_reached,
    token_of,
    walk,
)
from autopar.capture.model.source import UserModel
from autopar.errors import CaptureError, FileError, ModelError


def recall(
    model: UserModel,
    module: nn.Module,
    seed: int | None = None,
    layers: Sequence[str] | None = None,
    *,
    shapes: bool = True,
) -> LayerGraph:
    """Return the graph of a model as :func:`capture` does, from the user's cache if it is there.

    ``layers`` are those of a plan: a graph of others has to be captured to be cut as they are. ``shapes`` are as for
    :func:`autopar.capture.cache.store.load_graph`.

    Raises:
        ModelError: as :func:`autopar.capture.layers.export.capture`.
        CaptureError: likewise.
    """
    found = capture_to_keep(model, module, seed, recalls=True, layers=layers, shapes=shapes)
    found.keep()
    return found.graph


def capture_to_keep(
    model: UserModel,
    module: nn.Module,
    seed: int | None = None,
    *,
    recalls: bool = False,
    layers: Sequence[str] | None = None,
    shapes: bool = True,
    **facts: object,
) -> _Attempt:
    """Capture a model, to be kept in the user's cache once it has been checked.

    Args:
        model: the user's file.
        module: what its ``model()`` built.
        seed: that it was built with; None: it is what a script has made of it.
        recalls: whether what is kept already will do.
        layers: names that it must have then; None: any.
        shapes: whether it has shapes then (:func:`autopar.capture.cache.store.load_graph`).
        facts: what else has to be the same.

    Raises:
        ModelError: as :func:`autopar.capture.layers.export.capture`.
        CaptureError: likewise.
    """
    cache = users_cache() if model.layers is None else None
    attempt = _Attempt(cache, model, {**facts, "seed": seed}, layers, recalls, shapes)
    attempt.graph = capture(model, module, None if cache is None else partial(attempt.captured, cache))
    return attempt


@dataclass
class _Attempt:
    """Finds a graph in a cache, or captures it; what it was captured of is then known."""

    cache: Cache | None
    model: UserModel
    facts: Mapping[str, object]
    layers: Sequence[str] | None
    recalls: bool
    shapes: bool
    graph: LayerGraph = field(init=False)
    found: bool = False
    """Whether it was there."""
    made: tuple[Entry, LayerGraph] | None = None
    """What was captured, if it can be kept."""

    def captured(
        self,
        cache: Cache,
        module: nn.Module,
        batch: object,
        *rest: Any,  # noqa: ANN401
        keep_modes: bool = False,
    ) -> LayerGraph:
        """Stand for :func:`capture_module`."""
        key = _identity_of(self.model, module, batch, {**self.facts, "keep_modes": keep_modes})
        if self.recalls:
            graph = None if key is None else self._kept_graph(cache, key, module)
            if graph is not None:
                if not keep_modes:
                    module.train()
                self.found = True
                return graph
            _say_changed(cache, self.model)
        reads = WorldReads()
        with reads.noted():
            graph = capture_module(module, batch, *rest, keep_modes=keep_modes)
        if key is not None and graph.portable and not self._shares_constants(graph, module):
            reads.add_files(graph.files_run)
            about = _place(self.model), self.model.sha256, dict(self.model.imports), time.time(), len(graph.layers)
            self.made = Entry(key, *about, reads.files, reads.environment), graph
        return graph

    def _shares_constants(self, graph: LayerGraph, module: nn.Module) -> bool:
        """Tell whether layers read tensors of a script, which may write into them: a copy would not see it."""
        if self.facts["seed"] is not None:
            return False
        reached = tensors_reached(roots_of(module, self.model.loss))
        own = {tensor.untyped_storage().data_ptr() for _, tensor in reached if tensor.layout is torch.strided}
        constants = (value for layer in graph.layers for _, value in constants_of(layer))
        return any(value.untyped_storage().data_ptr() in own for value in constants)

    def keep(self) -> Entry | None:
        """Keep what was captured, once it has been checked; return its entry, if there is one then."""
        if self.cache is None or self.made is None:
            return None
        entry, graph = self.made
        return self.cache.keep(entry, partial(save_graph, graph))

    def _kept_graph(self, cache: Cache, key: str, module: nn.Module) -> LayerGraph | None:
        """Return the graph of an identity, with the parameters and buffers of a module, where it is kept and sound.

        What is torn, signed with another key, or read what has changed, is let go.
        """
        entry = cache.sound(key)
        if entry is not None and WorldReads(dict(entry.files), dict(entry.environment)).changed() is None:
            values = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            with contextlib.suppress(FileError):
                graph = load_graph(cache.folder_of(key), values, shapes=self.shapes)
                wanted = self.layers is None or list(self.layers) == [layer.name for layer in graph.layers]
                return graph if wanted else None
        cache.drop(key)
        return None


def _place(model: UserModel) -> str:
    """Return where a model is from: its file, or the class of one that a script has made."""
    return os.path.abspath(model.path) if model.path.exists() else model.spec


def _say_changed(kept: Cache, model: UserModel) -> None:
    """Say that a model's code is no longer what was captured, where that is why it is captured again."""
    of_file = [entry for entry in kept.entries() if entry.model == _place(model)]
    if of_file and all((entry.sha256, entry.imports) != (model.sha256, model.imports) for entry in of_file):
        sys.stderr.write(f"autopar: {model.spec} has changed since it was captured, and is captured again\n")


def _identity_of(model: UserModel, module: nn.Module, batch: object, more: Mapping[str, object]) -> str | None:
    imports = sorted(model.imports.items())
    cut = {"ignored": model.ignored_state, "joins": model.joins}
    facts = {"sha256": model.sha256, "imports": imports, **cut, **more}
    try:
        return identity(module, batch, model.loss, facts)
    except Exception:
        # Objects of the user's may raise whatever they like where they are looked at.
        return None


def build_and_capture(
    model: UserModel, seed: int, layers: Sequence[str] | None = None, *, shapes: bool = True
) -> tuple[nn.Module, LayerGraph]:
    """Build and capture a model that may be larger than memory; its buffers have values.

    One that cannot do without the values of its parameters is built with them. ``layers`` and ``shapes`` are as for
    :func:`recall`.

    Raises:
        ModelError: as :func:`autopar.capture.layers.export.capture`.
        CaptureError: likewise.
    """
    try:
        module = model.build(seed, on_meta=True)
        graph = recall(model, module, seed, layers, shapes=shapes)
    except (CaptureError, ModelError):
        # It wants them, or what is wrong with it is said where it has them.
        module = None
    # Listed layers may read other parameters than theirs, which nobody would give values.
    owned = {name for layer in graph.layers for name in layer.parameters.values()} if module is not None else set()
    if module is None or not (graph.portable or owned.issuperset(dict(module.named_parameters()))):
        module = model.build(seed)
        graph = recall(model, module, seed, layers, shapes=shapes)
    return module, graph


_PREFIXES = ("TRANSFORMERS_", "HF_", "PYTORCH_", "TIMM_")
"""Of variables that libraries read when they are imported, and models go by."""
_HASHES = "._original_object_hash"
"""What Transformers keeps of Python's ``hash()``, which is another in every process."""
_MOST_BYTES = 2**28
"""Of tensors and arrays beside the model's own, such as a data set that a trainer holds, that are looked at."""
_ABSENT = "absent"
_OWN_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
_OF_SYSTEM = ("/proc/", "/dev/", "/sys/")


def identity(
    model: nn.Module, batch: object, loss: Callable[..., Any] | None, facts: Mapping[str, object] | None = None
) -> str | None:
    """Return a SHA-256 of what the capture of a model depends on; None where it reaches too much to look at.

    Args:
        model: as it is built.
        batch: the example; its shapes count, and what in it is no tensor.
        loss: as of a model file.
        facts: more that it depends on, which have texts.
    """
    found = hashlib.sha256()
    parts = [*(facts or {}).items(), *_surroundings(model), *_structure(model), *_batch(batch)]
    for part in parts:
        found.update(repr(part).encode("utf-8", "replace"))
    walked = size = 0
    for path, value, before in walk(roots_of(model, loss)):
        walked += 1
        if path.inner.endswith(_HASHES):
            continue
        size += value.nbytes if before is None and isinstance(value, (torch.Tensor, numpy.ndarray)) else 0
        if size > _MOST_BYTES:
            return None
        token = ("same", str(before)) if before is not None else token_of(value, _MOST_BYTES)
        if isinstance(value, torch.Tensor):
            token = _shape(value), value.requires_grad, "" if isinstance(value, nn.Parameter) else _content(value)
        found.update(repr((str(path), token)).encode("utf-8", "replace"))
    return found.hexdigest() if walked < MOST_OBJECTS else None


def _surroundings(model: nn.Module) -> Iterator[object]:
    """Yield what is of this installation, and not of the model."""
    packages = {type(module).__module__.partition(".")[0] for module in model.modules()} | {"torch", "numpy", "autopar"}
    yield [(name, str(getattr(sys.modules.get(name), "__version__", ""))) for name in sorted(packages)]
    yield platform.python_version(), _own_code()
    yield [(name, value) for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)]
    yield torch.get_default_dtype(), str(torch.get_default_device()), torch.are_deterministic_algorithms_enabled()
    yield torch.is_autocast_enabled("cpu"), torch.get_float32_matmul_precision()
    cuda: Any = torch.backends.cuda
    yield [getattr(cuda, f"{kind}_sdp_enabled")() for kind in ("flash", "mem_efficient", "math", "cudnn")]


@functools.cache
def _own_code() -> str:
    """Return a hash of what captures: of one version, others may be at work on it."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return digest_of(b"".join(path.read_bytes() for path in files))


def _structure(model: nn.Module) -> Iterator[object]:
    """Yield modules, parameters and buffers, each under all its names."""
    first: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        kind = type(module)
        yield name, first.setdefault(id(module), name), kind.__module__, kind.__qualname__, module.training
    for name, each in model.named_parameters(remove_duplicate=False):
        yield name, first.setdefault(id(each), name), *_shape(each), each.requires_grad
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield name, first.setdefault(id(buffer), name), *_shape(buffer), _content(buffer)


def _shape(tensor: torch.Tensor) -> tuple[object, ...]:
    strides = tensor.stride() if tensor.layout is torch.strided else ()
    return tuple(tensor.shape), strides, str(tensor.dtype), str(tensor.device), type(tensor).__qualname__


def _content(tensor: torch.Tensor) -> str:
    if tensor.device.type == "meta" or tensor.layout is not torch.strided:
        return ""
    return digest_of(bytes_of(tensor))


def _batch(batch: object) -> Iterator[object]:
    for name, tensor in named_tensors(batch).items():
        yield name, *_shape(tensor)
    for path, tokens in contents(batch).items():
        yield (
            str(path),
            [token for token in tokens if not (isinstance(token, tuple) and token[0].__class__ is torch.Size)],
        )


@dataclass
class WorldReads:
    """Files and variables of the environment that are read inside :meth:`noted`, with hashes of what was there."""

    files: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note what is read inside the block."""
        kind: Any = type(os.environ)
        get = kind.__getitem__

        def read(variables: Any, name: str) -> str:  # noqa: ANN401
            if _counts(_reader()):
                value = os.environ._data.get(os.fsencode(name))  # type: ignore[attr-defined]
                self.environment[name] = _ABSENT if value is None else digest_of(value)
            found: str = get(variables, name)
            return found

        opened = set[str]()
        with patch.object(kind, "__getitem__", read), _noting_opens(opened):
            yield
        self.add_files(path for path in opened if is_own_file(path) and not path.startswith(_OF_SYSTEM))

    def add_files(self, paths: Iterable[str]) -> None:
        """Note files, but torch's and Python's, by what is in them now."""
        for path in filter(_counts, sorted(paths)):
            with contextlib.suppress(OSError):
                self.files[os.path.abspath(path)] = digest_of(Path(path).read_bytes())

    def changed(self) -> str | None:
        """Return the first file or variable that is not as it was; None: all are."""
        for path, before in self.files.items():
            try:
                now = digest_of(Path(path).read_bytes())
            except OSError:
                now = _ABSENT
            if now != before:
                return path
        for name, before in self.environment.items():
            value = os.environ.get(name)
            if before != (_ABSENT if value is None else digest_of(os.fsencode(value))):
                return f"the variable {name}"
        return None


def _counts(path: str) -> bool:
    """Tell whether a file is none of torch's, autopar's or Python's, whose versions stand for them."""
    return not path.startswith((*_OWN_FOLDERS, "<")) and (is_own_file(path) or f"{os.sep}site-packages{os.sep}" in path)


def _reader() -> str:
    """Return the file of the code that asks for a variable of the environment."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(("<", os.__file__)):
        frame = frame.f_back
    return "" if frame is None else frame.f_code.co_filename


_listening: set[str] | None = None
_hooked = False


@contextlib.contextmanager
def _noting_opens(opened: set[str]) -> Iterator[None]:
    """Note the paths of files that are opened inside the block; a hook of Python's cannot be taken away again."""
    global _listening, _hooked
    if not _hooked:
        sys.addaudithook(_note_open)
        _hooked = True
    before, _listening = _listening, opened
    try:
        yield
    finally:
        _listening = before


def _note_open(event: str, arguments: tuple[Any, ...]) -> None:
    if _listening is not None and event == "open" and isinstance(arguments[0], (str, bytes)):
        mode = arguments[1]
        if mode is None or "r" in mode:
            _listening.add(os.fsdecode(arguments[0]))
