"""Stateful: Python state that a forward changes, found by running it again on other batches.

A captured graph is computed as the state was when it was captured, so a change is refused, unless the user says that
the state is only logged. Of listed modules the state may change where it is one module's alone.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.capture.batch import named_tensors
from autopar.capture.reached import Path
from autopar.capture.state import Roots, Snapshot, differences, snapshot
from autopar.capture.traps import FALLBACK
from autopar.errors import CaptureError

GENERATORS = {
    Path("random", "the generator of Python's "): random._inst,
    Path("numpy.random", "the generator of "): numpy.random.mtrand._rand,
}


def refuse_state(roots: Roots, calls: Sequence[Callable[[], object]], ignored: tuple[str, ...]) -> None:
    """Check that no call changes Python state; a call before these has filled what is made once.

    Args:
        roots: the model and its loss.
        calls: a forward each, on different batches.
        ignored: paths that are only logged.

    Raises:
        CaptureError: one does; names it.
    """
    for call in calls:
        before = snapshot(roots)
        call()
        for path, how in differences(before, snapshot(roots)).items():
            if not path.named_by(ignored):
                raise CaptureError(
                    f"{path} {how} with every forward, which cannot be captured; keep it in a buffer and write into "
                    f"it, name it in ignored_state if it is only logged, {FALLBACK}"
                )


def carried_over(roots: Roots, calls: Sequence[Callable[[], object]]) -> tuple[Path, torch.Tensor] | None:
    """Return a tensor of the Python state, with its path, that a call replaces and has read the old one of."""
    for call in calls:
        before = snapshot(roots)
        with _Reads() as reads, contextlib.suppress(Exception):
            call()
        for path in _changed(before, snapshot(roots), reads.storages - _of_buffers(roots)):
            if path in before.tensors:
                return path, before.tensors[path][0][0]
    return None


def stateful_modules(
    elements: Sequence[Mapping[Path, object]],
    whole: Roots,
    calls: Sequence[Callable[[], object]],
    ignored: tuple[str, ...],
) -> list[tuple[str, ...]]:
    """Return for every listed module which state of its own a call changes; calls are as of :func:`refuse_state`.

    Args:
        elements: what each of the modules begins with: itself, and the loss if it computes it.
        whole: what else there is.
        calls: a forward through all of them each.
        ignored: paths that are only logged.

    Raises:
        CaptureError: state changes that is not one module's alone; names it.
    """
    everything = {path: value for each in (*elements, whole, GENERATORS) for path, value in each.items()}
    changed: dict[Path, None] = {}
    found: list[dict[Path, None]] = [{} for _ in elements]
    for call in calls:
        before, parts = snapshot(everything), [snapshot(roots) for roots in elements]
        with _Reads() as reads:
            call()
        read = reads.storages - _of_buffers(everything)
        changed |= _changed(before, snapshot(everything), read)
        for own, roots, part in zip(found, elements, parts, strict=True):
            own |= _changed(part, snapshot(roots), read)
    _refuse_shared(changed, found, ignored)
    return [tuple(str(path) for path in own if not path.named_by(ignored)) for own in found]


def refuse_lasting(before: Snapshot, after: Snapshot, changed: Sequence[Collection[str]]) -> None:
    """Check that state which listed modules change was put back, so that training starts where plain training does.

    Raises:
        CaptureError: some was not, as of iterators; names it.
    """
    for path in differences(before, after):
        if any(str(path) in own for own in changed):
            raise CaptureError(
                f"layers(): {path} changes with every forward and cannot be put back after the capture; keep numbers, "
                "or a generator of torch, in the module instead of an iterator"
            )


def _refuse_shared(changed: Collection[Path], found: Sequence[Collection[Path]], ignored: tuple[str, ...]) -> None:
    for path in dict.fromkeys([*changed, *(path for own in found for path in own)]):
        holders = sum(path in own for own in found)
        # What a module reaches under another path than the whole does, another one reaches as well.
        if (holders != 1 or path not in changed) and not path.named_by(ignored):
            raise CaptureError(
                f"layers(): {path} changes with every forward and belongs to no single module of the list, which ranks "
                "would hold apart; keep it in the module that needs it, or name it in ignored_state if it is only "
                "logged"
            )


def _changed(before: Snapshot, after: Snapshot, read: Collection[int]) -> dict[Path, None]:
    """Return the paths that differ; of tensors those of which the call has read the old one."""
    found = dict.fromkeys(differences(before, after))
    for path, tensors in before.tensors.items():
        pairs = zip(tensors, after.tensors.get(path, []), strict=False)
        gone = len(tensors) != len(after.tensors.get(path, []))
        changed = gone or any(one[0] is not other[0] or one[1] != other[1] for one, other in pairs)
        if changed and any(_storage(tensor) in read for tensor, _ in tensors):
            found[path] = None
    return found


def _of_buffers(roots: Roots) -> set[int]:
    """Return the memory of buffers, which layers hold as such, under whichever other names they are reached."""
    modules = [value for value in roots.values() if isinstance(value, nn.Module)]
    return {_storage(buffer) for module in modules for buffer in module.buffers()}


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which memory operators read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        self.storages.update(
            _storage(value) for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)
        )
        return func(*args, **(kwargs or {}))


def other_batches(batch: object, others: Sequence[object]) -> list[dict[str, torch.Tensor]]:
    """Return two batches of the shapes of the first: of the others, or its own rows in another order."""
    tensors = named_tensors(batch)
    found = []
    for shift in (1, 2):
        given = named_tensors(others[shift - 1]) if len(others) >= shift else {}
        alike = {name: tensor.shape for name, tensor in given.items()} == {n: t.shape for n, t in tensors.items()}
        found.append(given if alike else {name: tensor.roll(shift, 0) for name, tensor in tensors.items()})
    return found
