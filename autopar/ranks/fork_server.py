"""ForkServer: starts rank processes, all forked from one that has imported what they need; and what runs in them.

In come how many, and modules to import. Out come processes, each with a pipe for jobs and one for answers, and how
every one ended. What a rank needs takes seconds of a processor to import, which is so spent once, not once a rank.

:func:`main` is the process that ranks are forked from, and the main loop of each of them. The server imports what
ranks need, forks them, and reports who has ended; it computes nothing, for a process that has threads or has asked for
a GPU cannot be forked. A command that has imported all this itself forks the server in place of starting it
(:func:`forked_servers`), as long as it has no thread and no GPU either. A rank reads jobs as JSON lines from one pipe
and answers on another; when its input closes, or its parent dies, it ends. Nothing that crosses is a pickle.

Why: docs/design/decisions.md, "Ranks: Ranks are forked from one process".
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from contextvars import ContextVar
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from autopar.ranks.monitor import AnswerPipe, RankProcess

END_S = 5.0
"""How long a server may take to end its ranks when it is told to; one that is stopped does not."""


class ForkServer:
    """The process that ranks are forked from (:func:`main`).

    It reports who has been forked, and who has ended: both are its children, which nobody else can wait for. It ends
    with this process, and its ranks with it.
    """

    def __init__(self, size: int, threads: int, imports: Sequence[str] = ()) -> None:
        """Start it.

        Args:
            size: how many ranks.
            threads: of each.
            imports: modules to import before ranks are forked.
        """
        jobs, answers, reports = [os.pipe() for _ in range(size)], [os.pipe() for _ in range(size)], os.pipe()
        of_server = [reports[1], *(reader for reader, _ in jobs), *(writer for _, writer in answers)]
        settings = {
            "parent": os.getpid(),
            "threads": threads,
            "imports": list(imports),
            "reports": reports[1],
            "jobs": [reader for reader, _ in jobs],
            "answers": [writer for _, writer in answers],
        }
        environment = {
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
        }
        self._reports, self._rest = reports[0], b""
        os.set_blocking(self._reports, False)
        self.pids: dict[int, int] = {}
        self.codes: dict[int, int] = {}
        """Of every rank that has ended, how: its exit code, or the negative of a signal."""
        pipes = [
            (os.fdopen(writer, "wb"), os.fdopen(reader, "rb", buffering=0))
            for (_, writer), (reader, _) in zip(jobs, answers, strict=True)
        ]
        self.links = [
            RankProcess(_ForkedProcess(self, rank, job), pipe, partial(self.end_before, rank))
            for rank, (job, pipe) in enumerate(pipes)
        ]
        try:
            # A fork is made by this process's only thread, and ends with it.
            start: Callable[..., subprocess.Popen[bytes] | _ForkedServer] = _fork if can_fork() else _start
            self._process = start(settings, environment, of_server)
        finally:
            for each in of_server:
                os.close(each)

    @property
    def pid(self) -> int:
        """The number of its process."""
        return self._process.pid

    def wait_for(self, rank: int) -> int:
        """Wait until a rank has ended, and return how; of one that was never there, how the server did."""
        os.set_blocking(self._reports, True)
        while rank not in self.codes and self.look():
            pass
        return self.codes[rank] if rank in self.codes else self._process.wait()

    def end_before(self, rank: int) -> int | None:
        """Return how the server ended, where that took the rank along; None where the rank ended first."""
        return None if rank in self.codes else self._process.wait()

    def close(self) -> None:
        """End all ranks and the server, and wait until they are gone."""
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for link in self.links:
            link.close()
        os.close(self._reports)

    def look(self) -> bool:
        """Take in what the server has reported; return False where it has ended."""
        try:
            data = os.read(self._reports, 1 << 16)
        except BlockingIOError:
            return True
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            report = json.loads(line)
            found = self.codes if "code" in report else self.pids
            found[report["rank"]] = report["code" if "code" in report else "pid"]
        return bool(data)


class _ForkedProcess:
    """One rank's process, with the part of :class:`subprocess.Popen` that who watches over it needs."""

    def __init__(self, server: ForkServer, rank: int, stdin: BinaryIO) -> None:
        self._server, self._rank, self.stdin = server, rank, stdin

    @property
    def pid(self) -> int:
        """Its number; where it is not there yet, that of the server, whose imports it waits for."""
        self._server.look()
        return self._server.pids.get(self._rank, self._server.pid)

    def poll(self) -> int | None:
        """Return how it has ended, if it has."""
        self._server.look()
        return self._server.codes.get(self._rank)

    def wait(self) -> int:
        """Wait until it has ended, and return how."""
        return self._server.wait_for(self._rank)


_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


_Settings = dict[str, Any]
"""What the server is told; plain data."""

_FORKS = ContextVar("_FORKS", default=False)


@contextmanager
def forked_servers() -> Iterator[None]:
    """Let servers be forks of this process inside the block, which is a command's, not a user's with what it holds."""
    token = _FORKS.set(True)
    try:
        yield
    finally:
        _FORKS.reset(token)


def can_fork() -> bool:
    """Tell whether the server may be a fork of this process now: it has no other thread, and no GPU."""
    torch = sys.modules.get("torch")
    if not _FORKS.get() or torch is None or torch.cuda.is_initialized() or sys.platform != "linux":
        return False
    return len(os.listdir("/proc/self/task")) == 1


def _start(settings: _Settings, environment: Mapping[str, str], descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start the server as a process of its own, which has ``descriptors``.

    The kernel ends a child with the thread that started it, not with the process: one that lasts does.
    """
    starting = _lasting_thread(os.getpid()).submit(
        lambda: subprocess.Popen(
            command_of(__name__, json.dumps(settings)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=descriptors,
            start_new_session=True,
            env={**os.environ, **environment},
        )
    )
    try:
        return starting.result()
    except BaseException:
        starting.add_done_callback(lambda done: None if done.exception() else done.result().kill())
        raise


@cache
def _lasting_thread(process: int) -> ThreadPoolExecutor:
    """Return a thread that lives as long as this process: one that was forked has to start its own."""
    return ThreadPoolExecutor(1, "autopar-ranks")


def _fork(settings: _Settings, environment: Mapping[str, str], descriptors: Sequence[int]) -> _ForkedServer:
    """Fork the server, which has ``descriptors``, and nothing else that this process has open."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return _ForkedServer(pid)
    code = 1
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for each in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *descriptors}:
            with suppress(OSError):
                os.close(each)
        os.environ.update(environment)
        _serve_ranks(settings)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        # Nothing that the command would do at its end is done here.
        with suppress(OSError):
            sys.stderr.flush()
        os._exit(code)


class _ForkedServer:
    """The process of a forked server."""

    def __init__(self, pid: int) -> None:
        self.pid, self._code = pid, cast(int | None, None)

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended, and return how.

        Raises:
            subprocess.TimeoutExpired: it has not.
        """
        end_s = None if timeout is None else time.monotonic() + timeout
        while self._code is None:
            found, status = os.waitpid(self.pid, 0 if end_s is None else os.WNOHANG)
            if found:
                self._code = os.waitstatus_to_exitcode(status)
            elif end_s is not None and time.monotonic() > end_s:
                raise subprocess.TimeoutExpired("the server of ranks", timeout or 0.0)
            else:
                time.sleep(_LOOK_S)
        return self._code

    def _send(self, number: int) -> None:
        if self._code is None:
            os.kill(self.pid, number)


_LOOK_S = 0.005


def main() -> None:
    """Fork ranks, and wait until all have ended."""
    _serve_ranks(json.loads(sys.argv[1]))


def _serve_ranks(settings: _Settings) -> None:
    die_with(int(settings["parent"]))
    # An interrupt of this process alone ends it as any signal does, without a traceback; its parent says so.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # User code may print; the parent's standard output is for results alone.
    os.dup2(2, 1)
    faulthandler.enable(2)
    import torch  # noqa: F401

    from autopar.ranks.allocator import keep_pages

    for name in settings["imports"]:
        importlib.import_module(name)
    keep_pages()
    # What is there already is never collected: a collector that looks at it copies its pages.
    gc.collect()
    gc.freeze()
    ends = list(zip(settings["jobs"], settings["answers"], strict=True))
    with closing(AnswerPipe(int(settings["reports"]))) as reports:
        if rank_ends := _fork_ranks(ends, reports):
            _serve_jobs(*rank_ends, int(settings["threads"]))


def _fork_ranks(ends: Sequence[tuple[int, int]], reports: AnswerPipe) -> tuple[int, int] | None:
    """Fork a rank for every pair of pipes; return its own in a rank, and None behind the end of all in the server."""
    server, children = os.getpid(), dict[int, int]()

    def end_all(*_: object) -> None:
        for pid in children:
            os.kill(pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end_all)
    for rank, own in enumerate(ends):
        # The handler knows all children, or has not begun.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
            os.setsid()
            become(f"autopar-rank-{rank}", server)
            for descriptor in (each for others in ends if others != own for each in others):
                os.close(descriptor)
            return own
        children[pid] = rank
        reports.send({"rank": rank, "pid": pid})
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    for each in ends:
        for descriptor in each:
            os.close(descriptor)
    while children:
        pid, status = os.wait()
        reports.send({"rank": children.pop(pid), "code": os.waitstatus_to_exitcode(status)})
    return None


def become(name: str, parent: int) -> None:
    """Have this process, which was just forked, end with its parent, and be called by a name in `ps` and `top`."""
    die_with(parent)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())
    if "numpy" in sys.modules:
        # Python's own generator is seeded anew in a process that was forked.
        sys.modules["numpy"].random.seed()


def _serve_jobs(jobs: int, answers: int, threads: int) -> None:
    """Serve a rank's jobs until there are no more."""
    import torch

    torch.set_num_threads(threads)
    with os.fdopen(jobs, encoding="utf-8") as lines, closing(AnswerPipe(answers)) as pipe:
        pipe.send({"ready": True})
        for line in lines:
            _serve(json.loads(line), pipe)
            # What a job leaves behind in cycles holds its groups of ranks, each with threads and sockets.
            gc.collect()


def _serve(job: dict[str, object], pipe: AnswerPipe) -> None:
    """Perform a job, as one of its ranks, or beside them."""
    try:
        if "rank" in job:
            _serve_rank(job, pipe)
        else:
            pipe.send({"result": _target_of(job)(job["arguments"], pipe.report)})
    except Exception as error:
        pipe.fail(error)


def _serve_rank(job: dict[str, object], pipe: AnswerPipe) -> None:
    from autopar.ranks.board import FINISHED, SETTING_UP, Board
    from autopar.ranks.context import join_ranks

    rank, size = int(str(job["rank"])), int(str(job["size"]))
    with Board(Path(str(job["board"])), size) as board:
        board.write(rank, SETTING_UP)
        target = _target_of(job)
        place = (int(str(job["index"])), str(job["rendezvous"]), str(job["device"]), float(str(job["timeout_s"])))
        with join_ranks(rank, size, *place, board, pipe.report, bool(job["share_gpus"])) as context:
            try:
                result = target(context, job["arguments"])
            except Exception as error:
                # Said before the group is left: leaving it may take as long as the peers let it.
                pipe.fail(error)
                raise
        board.write(rank, FINISHED)
        pipe.send({"result": result})


def _target_of(job: dict[str, object]) -> Callable[..., object]:
    module, _, function = str(job["target"]).partition(":")
    found: Callable[..., object] = getattr(importlib.import_module(module), function)
    return found


def command_of(module: str, *arguments: str) -> list[str]:
    """Return what runs ``main()`` of a module of this very autopar, wherever it is from, in a process of its own.

    Without ``-P`` Python would run what is called like a module of its own in the working folder.
    """
    start = f"import sys; sys.path.insert(0, sys.argv.pop(1)); import autopar; del sys.path[0]; import {module} as own"
    return [sys.executable, "-P", "-c", f"{start}; own.main()", str(Path(__file__).parents[2]), *arguments]


def die_with(parent: int) -> None:
    """Ask the kernel to end this process when its parent ends, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(1)
