"""Wire: what loaders, their server and ranks write to each other, over sockets of this host.

A message is a line of JSON, its length before it, and behind it the bytes of the tensors that it names, as they lie in
memory. So neither files nor shared memory are needed, nothing is left behind by processes that are killed, and nothing
that is read can run.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from autopar.errors import TrainingError

Header = dict[str, Any]
_LENGTH = struct.Struct("!I")
_LONGEST_NAME = 100
"""Of what a socket may be called; systems allow 104 or 108 bytes."""


def send(link: socket.socket, header: Mapping[str, object], tensors: Sequence[torch.Tensor] = ()) -> None:
    """Send a message, and the values of tensors behind it."""
    text = json.dumps(header).encode()
    link.sendall(_LENGTH.pack(len(text)) + text)
    for tensor in tensors:
        link.sendall(bytes_of(tensor))


def receive(link: socket.socket) -> Header | None:
    """Return the next message; None where the other side has gone."""
    length = bytearray(_LENGTH.size)
    if not fill(link, memoryview(length)):
        return None
    text = bytearray(_LENGTH.unpack(length)[0])
    if not fill(link, memoryview(text)):
        return None
    found: Header = json.loads(text)
    return found


def fill(link: socket.socket, view: memoryview) -> bool:
    """Fill memory with what comes next; return False where the other side has gone."""
    while view.nbytes:
        # One call for all of it: whoever computes beside this thread is interrupted once.
        try:
            count = link.recv_into(view, 0, socket.MSG_WAITALL)
        except ConnectionResetError:
            return False
        if not count:
            return False
        view = view[count:]
    return True


def dense(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose elements lie in memory without gaps, in the order of its strides, as a plain one.

    Raises:
        TrainingError: it has no strides.
    """
    tensor = tensor.detach().cpu().as_subclass(torch.Tensor)
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise TrainingError(f"{name} is {kind}, which loaders do not carry; run with `loaders=0`")
    tensor = tensor.resolve_conj().resolve_neg()
    # Torch keeps the strides of what has no gaps.
    return tensor if torch.empty_like(tensor, device="meta").stride() == tensor.stride() else tensor.clone()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a dense tensor."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def listen(folder: Path, name: str) -> socket.socket:
    """Return a socket that listens in a folder."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _short(folder / name) as path:
        link.bind(path)
    link.listen(128)
    return link


def connect(folder: Path, name: str) -> socket.socket:
    """Return a connection with who listens in a folder."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _short(folder / name) as path:
        link.connect(path)
    return link


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """Return a name of a socket that is short enough."""
    if len(os.fsencode(path)) < _LONGEST_NAME:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
