"""System calls that fail, or at which the process is killed, each in its turn; and ranks that gather texts."""

import errno
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

NAMES = ("open", "mkdir", "fsync", "replace", "rename", "unlink", "rmdir", "close")
"""Of the functions of ``os`` that writing files goes through, beside what writes into an open one."""


class Calls:
    """Counts calls, and acts at one of them."""

    def __init__(self, at: int | None, act: Callable[[str], None]) -> None:
        self.count = 0
        self._at, self._act, self._lock = at, act, threading.Lock()

    def come(self, name: str) -> None:
        with self._lock:
            self.count += 1
            due = self.count - 1 == self._at
        if due:
            self._act(name)


def full(name: str) -> None:
    """Fail as a full disk does."""
    raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({name})")


def killed(name: str) -> None:
    """End as SIGKILL does: nothing is cleaned up."""
    os._exit(9)


@contextmanager
def counted(calls: Calls) -> Iterator[None]:
    """Return the context in which calls of all threads are counted."""

    def wrapped(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
            calls.come(name)
            return real(*arguments, **options)

        return call

    class File(io.FileIO):
        def write(self, content: Any) -> int:  # noqa: ANN401
            calls.come("write")
            return super().write(content)

    def opened(handle: int, mode: str) -> Any:  # noqa: ANN401
        return io.BufferedWriter(File(handle, mode))

    with ExitStack() as stack:
        for name in NAMES:
            stack.enter_context(patch.object(os, name, wrapped(name)))
        stack.enter_context(patch("autopar.formats.document.open", opened, create=True))
        yield


def meeting(count: int) -> list[Any]:
    """Return what stands for the contexts of ranks that are threads and gather texts."""
    texts, barrier = [""] * count, threading.Barrier(count)

    def gather(rank: int, text: str) -> list[str]:
        texts[rank] = text
        barrier.wait()
        found = list(texts)
        barrier.wait()
        return found

    cpu = torch.device("cpu")
    return [SimpleNamespace(rank=at, size=count, device=cpu, gather=partial(gather, at)) for at in range(count)]
