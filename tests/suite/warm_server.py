"""The warm process: has imported what commands of autopar need, and forks a process for every one asked of it.

In come requests over a socket: a command line of Python, its environment, working folder and open files. Out of it come
processes that do what Python started with that line would do, without the seconds that imports take. Each has a warm
process of its own beside it, for the processes that it starts itself (`tests/suite/warm.py` is the other side).
"""

import ctypes
import faulthandler
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

IMPORTS = (
    "autopar.api.calls",
    "autopar.api.exports",
    "autopar.cli",
    "autopar.runtime.start.materialize",
    "autopar.runtime.start.worker",
    "torch._dynamo",
    "torch.export",
)
LARGEST = 1 << 17
"""Bytes of a request."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_paths: list[str] = []
"""Where Python looks for modules of its own and installed ones, beside PYTHONPATH."""
_SPARE = 400
"""Descriptors from here on are out of the way of those that a command is given."""


def main(channel: int) -> None:
    """Import, and fork until the other side is gone."""
    _paths.extend(each for each in sys.path[2:] if each not in _python_path())
    for name in IMPORTS:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # Who has lost its parent comes here, so that what it used is known (`costs.py`).
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    serve(socket.socket(fileno=channel))


def serve(channel: socket.socket) -> None:
    """Fork what is asked for; return in no process but run the command in one that was forked."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    reports = dict[int, int]()
    while True:
        ready, _, _ = select.select([channel, woken], [], [])
        if woken in ready:
            os.read(woken, 1 << 12)
            _reap(reports)
        if channel in ready:
            data, descriptors, _, _ = socket.recv_fds(channel, LARGEST, 32)
            if not data:
                os._exit(0)
            request = json.loads(data)
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                for each in (channel.detach(), woken, wake, *reports.values(), descriptors[0]):
                    os.close(each)
                _become(request, descriptors[1:])
            reports[pid] = descriptors[0]
            for each in descriptors[1:]:
                os.close(each)
            os.write(reports[pid], f"{pid}\n".encode())


def _python_path() -> list[str]:
    return [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]


def _reap(reports: dict[int, int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        if (report := reports.pop(pid, None)) is not None:
            os.write(report, f"{os.waitstatus_to_exitcode(status)}\n".encode())
            os.close(report)


def _become(request: Mapping[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """Do what Python would, and end as it would."""
    if request["session"]:
        os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    spare = [fcntl.fcntl(each, fcntl.F_DUPFD, _SPARE) for each in descriptors]
    for each in descriptors:
        os.close(each)
    for own, target in zip(spare, request["descriptors"], strict=True):
        os.dup2(own, target)
        os.close(own)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    # What dies with its parent looks who that is: here who has asked for it, in what it forks the real one.
    me, real = os.getpid(), os.getppid
    os.getppid = lambda: request["parent"] if os.getpid() == me else real()
    if not any("autopar.ranks.fork_server" in each for each in request["arguments"][:3]):
        _keep_another_beside()
    _settle()
    _run(request["arguments"])


def _keep_another_beside() -> None:
    """Fork a warm process from this one while nothing has run in it, for what it will start."""
    from suite import warm

    mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if not os.fork():
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)
        mine.close()
        nothing = os.open(os.devnull, os.O_RDWR)
        for each in range(3):
            os.dup2(nothing, each)
        serve(other)
    other.close()
    warm.connect(mine)


def _settle() -> None:
    """Leave what a process has from its start on as it would be in one that has just begun."""
    import torch

    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    sys.stderr.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))


def _run(arguments: Sequence[str]) -> NoReturn:
    """Run a module, a text or a file as Python's command line does."""
    is_safe = arguments[0] == "-P"
    first, *rest = arguments[is_safe:]
    paths = [*_python_path(), *_paths]
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    if first == "-m":
        sys.path[:] = [os.getcwd(), *paths]
        sys.argv = ["-m", *rest[1:]]
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif first == "-c":
        sys.path[:] = paths if is_safe else ["", *paths]
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.path[:] = [os.path.dirname(os.path.realpath(first)), *paths]
        sys.argv = [first, *rest]
        main.__file__ = first
        with open(first, "rb") as file:
            exec(compile(file.read(), first, "exec"), main.__dict__)
    sys.exit()
