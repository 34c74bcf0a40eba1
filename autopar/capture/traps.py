"""Find what torch.export would capture wrongly without a word, by watching one ordinary forward."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import traceback
from collections.abc import Iterator
from types import FrameType, TracebackType

import torch
import torch.utils.checkpoint

from autopar.errors import CaptureError

__all__ = ["FALLBACK", "user_line", "watch"]

FALLBACK = "or give layers(model) in the model file: a list of modules that are called one after another"

_CHECKPOINT = inspect.unwrap(torch.utils.checkpoint.checkpoint).__code__
_APPLY = inspect.unwrap(torch.autograd.Function.apply.__func__).__code__  # type: ignore[attr-defined]
_LIBRARY = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


@contextlib.contextmanager
def watch() -> Iterator[None]:
    """Watch the calls inside the block.

    Raises:
        CaptureError: an ``autograd.Function`` of the user's own was applied (its backward would be replaced), or
            ``torch.utils.checkpoint`` was used (its recomputation would be lost); names file and line.
    """
    found: list[str] = []

    def on_event(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or found:
            return
        if frame.f_code is _CHECKPOINT:
            remedy = "remove the checkpointing"
            found.append(f"{_caller(frame)}: torch.utils.checkpoint cannot be captured; {remedy}, {FALLBACK}")
        elif frame.f_code is _APPLY and not _of_torch(function := frame.f_locals["cls"]):
            name = f"{function.__qualname__}"
            remedy = "write it with differentiable operators"
            found.append(f"{_caller(frame)}: autograd.Function {name} cannot be captured; {remedy}, {FALLBACK}")

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        yield
    finally:
        sys.setprofile(before)
    if found:
        raise CaptureError(found[0])


def _of_torch(function: type) -> bool:
    return function.__module__ == "torch" or function.__module__.startswith("torch.")


def _is_users(filename: str) -> bool:
    return not filename.startswith((_LIBRARY, _OWN, "<"))


def _caller(frame: FrameType | None) -> str:
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "the model"


def user_line(trace: TracebackType | None) -> tuple[str, str]:
    """Return ``file:line`` and source text of the innermost frame that is neither torch's nor autopar's."""
    frames = [frame for frame in traceback.extract_tb(trace) if _is_users(frame.filename)]
    if not frames:
        return "the model", ""
    return f"{frames[-1].filename}:{frames[-1].lineno}", frames[-1].line or ""
