"""What the rank processes of the tests run."""

import ctypes
import os
import random
import select
import signal
import socket
import sys
import threading
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

from autopar.errors import AutoparError, FileError
from autopar.ranks.board import STEPPING
from autopar.ranks.channel import open_channels
from autopar.ranks.context import RankContext
from autopar.ranks.meeting import late_connections_dropped

CLONE_NEWNET = 0x40000000


def fresh_numbers(context: RankContext, arguments: object) -> list[float]:
    """Return how many modules there are, and numbers that no seed was set for."""
    return [len(sys.modules), random.random(), float(np.random.random())]


def add_up(context: RankContext, arguments: object) -> list[float]:
    """Sum ranks over all ranks."""
    return [context.rank, _sum(context)]


def _sum(context: RankContext, group: dist.ProcessGroup | None = None) -> float:
    total = torch.tensor([float(context.rank)])
    dist.all_reduce(total, group=group)
    return float(total)


def tell(context: RankContext, arguments: object) -> list[str]:
    """Gather texts and report one."""
    context.report({"from": context.rank})
    return context.gather(f"rank {context.rank}" * context.rank)


def gather_texts(context: RankContext, arguments: dict[str, Any]) -> list[str]:
    """Gather what every rank is given to say."""
    return context.gather(arguments["texts"][context.rank])


def share_results(context: RankContext, arguments: dict[str, Any]) -> list[object]:
    """Act as every rank is told, and return what all learn: of all ranks, and of rank 0."""

    def act() -> list[int]:
        if context.rank in arguments["failing"]:
            raise FileError(f"rank {context.rank} finds nothing") if arguments["known"] else KeyError("nothing")
        return [context.rank, context.size]

    learnt: list[object] = []
    for share in (context.gather_results, context.result_of_rank_0):
        try:
            learnt.append(share(act))
        except AutoparError as error:
            learnt.append([type(error).__name__, str(error), error.exit_code])
    return learnt


def threads(context: RankContext, arguments: object) -> list[int]:
    """Return how many threads compute, and how many this process was told."""
    return [torch.get_num_threads(), int(os.environ["OMP_NUM_THREADS"])]


def misbehave(context: RankContext, arguments: dict[str, object]) -> None:
    """Do something bad in one rank while the others wait for it."""
    assert context.board is not None
    context.board.write(context.rank, STEPPING, 7, 3)
    if context.rank == arguments["rank"]:
        me, how = os.getpid(), str(arguments["how"])
        if how in ("raise", "file"):
            raise ValueError("two lines\nof trouble") if how == "raise" else FileError("plan.json: $.stages: no")
        ways = {"kill": partial(os.kill, me, signal.SIGKILL), "stop": partial(os.kill, me, signal.SIGSTOP)}
        ways |= {"segfault": partial(ctypes.string_at, 0), "exit": partial(os._exit, 3), "hang": threading.Event().wait}
        ways[how]()
    # The others wait in a collective that the bad rank never enters.
    context.barrier()


def listening_places(process: int) -> list[tuple[str, int]]:
    """Return the addresses and ports on which a process listens for connections."""
    every = (each for each in psutil.net_connections("tcp") if each.pid == process)
    return [(each.laddr.ip, each.laddr.port) for each in every if each.status == psutil.CONN_LISTEN]


def listening(context: RankContext, arguments: object) -> list[str]:
    """Return the addresses on which this process listens."""
    context.barrier()
    return [address for address, _ in listening_places(os.getpid())]


def listen_to_strangers(context: RankContext, arguments: object) -> dict[str, Any]:
    """Have strangers knock where this rank listens, make a group then, and add up over all groups."""
    everyone = list(range(context.size))
    groups = [dist.group.WORLD]
    with late_connections_dropped():
        groups += [dist.new_group(everyone) for _ in range(2)]
    context.barrier()
    before, places = len(os.listdir("/proc/self/fd")), listening_places(os.getpid())
    strangers = [_knock(place) for place in places for _ in range(20)]
    connected = select.select([], strangers, [], 0.5)[1]
    open_ends = len(os.listdir("/proc/self/fd")) - before - len(strangers)
    groups.append(dist.new_group(everyone))
    sums = [_sum(context, group) for group in groups]
    for stranger in strangers:
        stranger.close()
    return {"listeners": len(places), "connected": len(connected), "descriptors": open_ends, "sums": sums}


def _knock(place: tuple[str, int]) -> socket.socket:
    stranger = socket.socket()
    stranger.setblocking(False)
    stranger.connect_ex(place)
    return stranger


def pass_around(context: RankContext, arguments: dict[str, Any]) -> dict[str, float]:
    """Open channels between pairs of ranks, as one of ``hosts`` hosts; return what arrived by the rank it is from."""
    size = context.size // arguments["hosts"]
    context = replace(context, local_rank=context.rank % size, local_size=size)
    if context.rank == arguments.get("apart") and ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        # Names that others listen under are not known there, as in a container.
        raise OSError(ctypes.get_errno(), "unshare")
    channels = open_channels(context, [(first, second) for first, second in arguments["pairs"]])
    for channel in channels.values():
        channel.send(torch.tensor([float(context.rank)]))
    found = {}
    for rank, channel in channels.items():
        received = torch.empty(1)
        channel.receive(received).wait()
        found[str(rank)] = float(received)
    return found


def lose_while_receiving(context: RankContext, arguments: object) -> None:
    """Wait for a message of a rank that is killed meanwhile."""
    channels = open_channels(context, [(0, 1)])
    context.barrier()
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    channels[1].receive(torch.empty(1)).wait()


def moved(context: RankContext, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of what is gathered and scattered by one call of each, their seconds, and those of rounds."""
    from autopar.profiler.operations import Operation, Pace, gathering, scattering, time_operation

    seen: list[tuple[str, int]] = []
    for name in ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor"):
        if hasattr(dist, name):
            setattr(dist, name, _noting(name.rsplit("_", 1)[0], getattr(dist, name), seen))
    group = dist.new_group(list(range(context.size)))
    gather, scatter = (make(arguments["bytes"], group) for make in (gathering, scattering))
    scatter()
    calls: dict[str, Any] = {}
    for name, call in {"gather": gather, "scatter": scatter}.items():
        seen.clear()
        calls[name] = {"seconds": [call(), call()], "seen": list(seen)}
    ranks = tuple(range(context.size))
    pace = Pace(warm_up=1, iterations=2, budget_s=0.0, least=2)
    for kind in ("all_gather", "reduce_scatter"):
        calls[kind] = time_operation(Operation(context, kind, ranks, group), [64, arguments["bytes"]], pace)
    return calls


def _noting(name: str, call: Any, seen: list[tuple[str, int]]) -> Any:  # noqa: ANN401
    def noting(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        tensors = [each for each in (*arguments, *options.values()) if isinstance(each, torch.Tensor)]
        seen.append((name, max(tensor.numel() for tensor in tensors)))
        return call(*arguments, **options)

    return noting
