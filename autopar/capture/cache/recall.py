"""Recall: what was captured once is not captured again, as long as the model is the same.

    graph = recall(user, module, seed)  # reads what `autopar profile` has kept, or captures and keeps

An entry of the user's cache (:mod:`autopar.cache`) counts only where the model that was built is the same in all that a
capture depends on (:mod:`autopar.capture.cache.identity`), and files and variables that the capture read are as they
were. A graph of ``layers(model)`` is not kept: it consists of the user's modules.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from autopar.cache import Cache, Entry, users_cache
from autopar.capture.cache.identity import WorldReads, identity
from autopar.capture.cache.store import constants_of, load_graph, save_graph
from autopar.capture.graph import LayerGraph
from autopar.capture.layers.export import capture, capture_module
from autopar.capture.model.python_state import roots_of, tensors_reached
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


class _Capture(NamedTuple):
    """A captured graph."""

    graph: LayerGraph
    keep: Callable[[], Entry | None]
    """Keeps it in the user's cache, once it has been checked; returns its entry, if there is one then."""
    found: bool = False
    """Whether it was there."""


def capture_to_keep(
    model: UserModel,
    module: nn.Module,
    seed: int | None = None,
    *,
    recalls: bool = False,
    layers: Sequence[str] | None = None,
    shapes: bool = True,
    **facts: object,
) -> _Capture:
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
    kept = users_cache() if model.layers is None else None
    if kept is None:
        return _Capture(capture(model, module), lambda: None)
    attempt = _Attempt(kept, model, {**facts, "seed": seed}, layers, recalls, shapes)
    graph = capture(model, module, attempt.captured)
    return _Capture(graph, attempt.keep, attempt.found)


@dataclass
class _Attempt:
    """Finds a graph in a cache, or captures it; what it was captured of is then known."""

    kept: Cache
    model: UserModel
    facts: Mapping[str, object]
    layers: Sequence[str] | None
    recalls: bool
    shapes: bool
    found: bool = False
    made: tuple[Entry, LayerGraph] | None = None
    """What was captured, if it can be kept."""

    def captured(self, module: nn.Module, batch: object, *rest: Any, keep_modes: bool = False) -> LayerGraph:  # noqa: ANN401
        """Stand for :func:`capture_module`."""
        key = _identity_of(self.model, module, batch, {**self.facts, "keep_modes": keep_modes})
        if self.recalls:
            graph = None if key is None else self._found(key, module)
            if graph is not None:
                if not keep_modes:
                    module.train()
                self.found = True
                return graph
            _say_changed(self.kept, self.model)
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
        """Keep what was captured; return its entry."""
        if self.made is None:
            return None
        entry, graph = self.made
        return self.kept.keep(entry, partial(save_graph, graph))

    def _found(self, key: str, module: nn.Module) -> LayerGraph | None:
        """Return the graph of an identity, with the parameters and buffers of a module, where it is kept and sound.

        What is torn, signed with another key, or read what has changed, is let go.
        """
        entry = self.kept.sound(key)
        if entry is not None and WorldReads(dict(entry.files), dict(entry.environment)).changed() is None:
            values = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            with contextlib.suppress(FileError):
                graph = load_graph(self.kept.folder_of(key), values, shapes=self.shapes)
                wanted = self.layers is None or list(self.layers) == [layer.name for layer in graph.layers]
                return graph if wanted else None
        self.kept.drop(key)
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
    facts = {"sha256": model.sha256, "imports": imports, "ignored": model.ignored_state, **more}
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
    held = {name for layer in graph.layers for name in layer.parameters.values()} if module is not None else set()
    if module is None or not (graph.portable or held.issuperset(dict(module.named_parameters()))):
        module = model.build(seed)
        graph = recall(model, module, seed, layers, shapes=shapes)
    return module, graph
