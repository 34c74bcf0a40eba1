"""Launched: processes that a test starts as a launcher does, each told by its environment which rank it is."""

import os
import random
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from suite import warm


def free_port() -> int:
    """Return a port at which nobody listens, and which no system gives to who asks for any."""
    while True:
        with suppress(OSError), socket.create_server(("127.0.0.1", _PORTS.randint(10_000, 32_000))) as found:
            return int(found.getsockname()[1])


_PORTS = random.SystemRandom()


_AGENT = """
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.run import main
from suite import warm

def start(args, **how):
    return warm.Popen([each for each in args if each != "-u"], **how)

subprocess_handler.Popen = start
main()
"""


def torchrun(count: int, *, is_warm: bool = True) -> list[str]:
    """Return the command of an agent that starts a script's ranks, at a port of their own: the usual one is one.

    One that is run by ``warm`` has its ranks forked, too.
    """
    start = ["-c", _AGENT] if is_warm else ["-m", "torch.distributed.run"]
    return [sys.executable, *start, "--master-port", f"{free_port()}", "--nproc-per-node", f"{count}"]


def launch(
    count: int,
    arguments: Sequence[str],
    hosts: int = 1,
    interface: str | None = "lo",
    of_rank_0: Sequence[str] = (),
    **environment: str,
) -> list[warm.Popen]:
    """Start a Python command once a rank, of which as many hosts have equally many; their output is piped.

    ``interface`` is the one where ranks are told to listen; ``of_rank_0`` are more arguments of rank 0.
    """
    size = count // hosts
    place = {"WORLD_SIZE": f"{count}", "LOCAL_WORLD_SIZE": f"{size}", "MASTER_PORT": f"{free_port()}"}
    common = {**os.environ, **place, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", **environment}
    common |= {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    every = [{**common, "RANK": f"{rank}", "LOCAL_RANK": f"{rank % size}"} for rank in range(count)]
    commands = [[sys.executable, *arguments, *(() if rank else of_rank_0)] for rank in range(count)]
    return [
        warm.Popen(command, stdout=-1, stderr=-1, text=True, env=own)
        for command, own in zip(commands, every, strict=True)
    ]


def ended(processes: Sequence[warm.Popen], timeout_s: float = 200.0) -> list[tuple[int, str, str]]:
    """Wait for all; return the exit code, standard output and errors of each."""
    found = [process.communicate(timeout=timeout_s) for process in processes]
    return [(process.returncode, *each) for process, each in zip(processes, found, strict=True)]


def processes_in(folder: Path) -> list[int]:
    """Return the processes, other than this one, that work in a folder: what is started there, and what that starts."""
    every = [each for each in psutil.process_iter(["cwd"]) if each.pid != os.getpid()]
    return [each.pid for each in every if each.info["cwd"] == str(folder)]


def alive(process: int) -> bool:
    """Whether a process is there, and has not ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(happens: Callable[[], Any], seconds: float = 200.0, running: Sequence[warm.Popen] = ()) -> None:
    """Wait until something is so, for which these processes have to run."""
    until_s = time.monotonic() + seconds
    while not happens():
        if time.monotonic() > until_s or any(each.poll() is not None for each in running):
            for each in running:
                each.kill()
            raise AssertionError(f"it did not happen: {ended(running)}")
        time.sleep(0.02)
