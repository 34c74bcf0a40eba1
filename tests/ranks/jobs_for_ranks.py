"""What the rank processes of the tests run."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from autopar.errors import FileError
from autopar.ranks.board import STEPPING
from autopar.ranks.context import RankContext


def add_up(context: RankContext, arguments: object) -> list[float]:
    """Sum ranks over all ranks."""
    total = torch.tensor([float(context.rank)])
    dist.all_reduce(total)
    return [context.rank, float(total)]


def tell(context: RankContext, arguments: object) -> list[str]:
    """Gather texts and report one."""
    context.report({"from": context.rank})
    return context.gather(f"rank {context.rank}" * context.rank)


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
