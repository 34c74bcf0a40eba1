"""What the rank processes of the tests run."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import FileError
from autopar.ranks.board import STEPPING
from autopar.ranks.channel import open_channels
from autopar.ranks.context import RankContext

CLONE_NEWNET = 0x40000000


def add_up(context: RankContext, arguments: object) -> list[float]:
    """Sum ranks over all ranks."""
    total = torch.tensor([float(context.rank)])
    dist.all_reduce(total)
    return [context.rank, float(total)]


def tell(context: RankContext, arguments: object) -> list[str]:
    """Gather texts and report one."""
    context.report({"from": context.rank})
    return context.gather(f"rank {context.rank}" * context.rank)


def gather_texts(context: RankContext, arguments: dict[str, Any]) -> list[str]:
    """Gather what every rank is given to say."""
    return context.gather(arguments["texts"][context.rank])


def misbehave(context: RankContext, arguments: dict[str, object]) -> None:
    """Do something bad in one rank while the others wait for it."""
    assert context.board is not None
    context.board.write(context.rank, STEPPING, 7, 3)
    if context.rank == arguments["rank"]:
        match arguments["how"]:
            case "raise":
                raise ValueError("two lines\nof trouble")
            case "file":
                raise FileError("plan.json: $.stages: no")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "exit":
                os._exit(3)
            case "hang":
                threading.Event().wait()
    # The others wait in a collective that the bad rank never enters.
    dist.barrier()


def listening(context: RankContext, arguments: object) -> list[str]:
    """Return the addresses on which this process listens, as the kernel writes them."""
    context.barrier()
    sockets = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            sockets.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                found.append(fields[1].partition(":")[0])
    return found


def pass_around(context: RankContext, arguments: dict[str, Any]) -> dict[str, float]:
    """Open channels between pairs of ranks, as one of ``hosts`` hosts; return what arrived by the rank it is from."""
    size = context.size // arguments["hosts"]
    context = replace(context, local_rank=context.rank % size, local_size=size)
    if context.rank == arguments.get("apart"):
        enter_network_of_its_own()
    channels = open_channels(context, [(first, second) for first, second in arguments["pairs"]])
    for channel in channels.values():
        channel.send(torch.tensor([float(context.rank)]))
    found = {}
    for rank, channel in channels.items():
        received = torch.empty(1)
        channel.receive(received).wait()
        found[str(rank)] = float(received)
    return found


def enter_network_of_its_own() -> None:
    """Be where names that others listen under are not known, as a container is.

    Raises:
        OSError: this process may not.
    """
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")


def lose_while_receiving(context: RankContext, arguments: object) -> None:
    """Wait for a message of a rank that is killed meanwhile."""
    channels = open_channels(context, [(0, 1)])
    context.barrier()
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    channels[1].receive(torch.empty(1)).wait()
