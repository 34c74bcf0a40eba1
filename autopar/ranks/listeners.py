"""Listeners: the sockets on which ranks wait for each other's connections, and who else may come there.

Gloo opens one for every group of ranks, keeps it until the group ends, and takes whatever connects: each connection is
a descriptor that stays. Once a group is made, all of its ranks are connected, and nobody else has reason to come. The
socket cannot be closed, nor shut (Gloo would end the process), but the kernel can be told to drop what arrives there.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A filter of one instruction (struct sock_filter): return, and let nothing pass."""
_LISTENS = "0A"
"""A socket's state in the kernel's tables."""


@contextmanager
def late_connections_dropped() -> Iterator[None]:
    """Return the context in which groups of ranks are made; behind it, nobody connects to what they listen on.

    Elsewhere than on Linux, and where Gloo connects ranks only when they first exchange something, this does nothing.
    """
    if sys.platform != "linux" or os.environ.get("TORCH_GLOO_LAZY_INIT", "0") not in ("", "0"):
        yield
        return
    before = set(_listening_sockets())
    yield
    for inode, descriptor in _listening_sockets().items():
        if inode not in before:
            _drop_all(descriptor)


def _listening_sockets() -> dict[int, int]:
    """Return the descriptors of the sockets on which this process listens for TCP connections, by their inodes."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=os.dup(int(name))) as each:
                    inet = each.family in (socket.AF_INET, socket.AF_INET6)
                    if inet and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found[status.st_ino] = int(name)
    return found


def _drop_all(descriptor: int) -> None:
    """Have the kernel drop what arrives at a listening socket; connections that were accepted are others."""
    instructions = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
    program = struct.pack("HP", 1, ctypes.addressof(instructions))
    # Where a sandbox forbids it, connections pile up as they would.
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as each:
        each.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def listens_everywhere(port: int) -> bool:
    """Return whether a process of this host listens at a port on all interfaces; False where that is not known."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                address, _, at = fields[1].partition(":")
                if fields[3] == _LISTENS and int(at, 16) == port and not int(address, 16):
                    return True
    return False
