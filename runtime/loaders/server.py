"""LoaderServer: the process that a host's loaders are forked from, which deals out their work.

In come ranks, which say what they need and, a little ahead, which mini-batches; out go tasks, to whichever loader has
nothing to do, in the order in which they were asked for. Samples go from loaders to ranks directly. It reads none
itself, starts no thread and computes nothing, so that it can be forked from; a loader that ends is known to be gone at
once, and all ranks are told how.

Why: docs/design/decisions.md, "Ranks: Loaders are processes of a host, and send bytes".
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from autopar.formats.plan import Plan
from autopar.ranks.fork_server import become
from autopar.ranks.pool import RankPool
from autopar.runtime.loaders import wire
from autopar.runtime.loaders.process import TASK, ReadingArguments, serve_tasks
from autopar.runtime.loaders.work import ReadingDivision, ReadingTask

SERVER = "loaders"
"""What the server's socket is called in the folder where ranks find it; loaders' have their number behind it."""


class ServingArguments(ReadingArguments):
    """What the server needs to know; plain data."""

    folder: str
    """Where ranks find sockets."""
    loaders: int
    """How many are forked."""
    ranks: list[int]
    """Those of the host, all of which come."""


@dataclass
class _Loader:
    """One loader, as its server knows it."""

    number: int
    pid: int
    link: socket.socket
    task: ReadingTask | None = None
    """What it reads."""
    opened: bool = False
    """Whether it has its dataset, and knows the ranks."""


class _LoaderServer:
    """Forks loaders, and deals out what ranks ask for, until all ranks have gone."""

    def __init__(self, arguments: ServingArguments) -> None:
        """Fork the loaders, where ranks can find them."""
        self._arguments, self._plan = arguments, Plan.parse(arguments["plan"], Path("plan.json"))
        self._folder, count = Path(arguments["folder"]), arguments["loaders"]
        self._listener = wire.listen(self._folder, SERVER)
        listeners = [wire.listen(self._folder, f"{SERVER}-{number}") for number in range(count)]
        self._loaders: list[_Loader] = []
        for number in range(count):
            self._loaders.append(self._fork(number, listeners))
        for each in listeners:
            each.close()
        self._ranks: dict[int, socket.socket] = {}
        self._reads: dict[int, bool] = {}
        self._gone = 0
        self._facts: Mapping[str, object] | None = None
        """What the first loader that has opened its dataset says of it."""
        self._division: ReadingDivision | None = None
        self._asked: dict[int, set[int]] = {}
        """By mini-batch, the ranks that have yet to ask for it."""
        self._tasks: deque[ReadingTask] = deque()
        self._trouble: Mapping[str, object] | None = None
        """What ranks are told that come later."""

    def perform(self, report: Callable[[dict[str, object]], None]) -> None:
        """Serve the ranks; say, when they can come, that all is ready."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._meet)
        for loader in self._loaders:
            self._selector.register(loader.link, selectors.EVENT_READ, lambda loader=loader: self._hear(loader))
        report({"ready": True})
        try:
            while self._gone < len(self._arguments["ranks"]):
                for key, _ in self._selector.select():
                    key.data()
        finally:
            self._end()

    def _fork(self, number: int, listeners: Sequence[socket.socket]) -> _Loader:
        own, theirs = socket.socketpair()
        server, pid = os.getpid(), os.fork()
        if not pid:
            code = 1
            try:
                links = [own, self._listener, *(loader.link for loader in self._loaders)]
                for each in (*links, *listeners[:number], *listeners[number + 1 :]):
                    each.close()
                become(f"autopar-load-{number}", server)
                serve_tasks(theirs, listeners[number], self._arguments)
                code = 0
            finally:
                os._exit(code)
        theirs.close()
        return _Loader(number, pid, own)

    def _meet(self) -> None:
        """Take up a rank's connection."""
        link, _ = self._listener.accept()
        hello = wire.receive(link)
        if hello is None:
            link.close()
            return
        rank = hello["rank"]
        self._ranks[rank], self._reads[rank] = link, hello["reads"]
        self._selector.register(link, selectors.EVENT_READ, lambda: self._answer(rank))
        if self._trouble is not None:
            self._tell(self._trouble)
        self._begin()

    def _begin(self) -> None:
        """Once all is known of the ranks and the dataset, have loaders and ranks meet."""
        if self._facts is None or len(self._reads) < len(self._arguments["ranks"]) or self._division is not None:
            return
        ranks = tuple(sorted(rank for rank, reads in self._reads.items() if reads))
        how = bool(self._facts["collates"]), bool(self._facts["whole"])
        self._division = ReadingDivision(self._plan, ranks, len(self._loaders), *how)
        for loader in self._loaders:
            with suppress(OSError):
                wire.send(loader.link, {"ranks": len(ranks)})
        counts = {"ahead": self._division.ahead, "loaders": len(self._loaders)}
        self._tell({"samples": self._facts["samples"], "excerpt": self._facts["excerpt"], **counts})

    def _hear(self, loader: _Loader) -> None:
        """Take in what a loader says."""
        message = wire.receive(loader.link)
        if message is None or "failure" in message:
            self._selector.unregister(loader.link)
            self._trouble = {"lost": self._loss_of(loader)} if message is None else message
            self._tell(self._trouble)
            return
        if "opened" in message:
            loader.opened = True
            self._facts = self._facts or message["opened"]
            self._begin()
        else:
            loader.task = None
        self._deal()

    def _answer(self, rank: int) -> None:
        """Take in what a rank asks for."""
        link = self._ranks[rank]
        message = wire.receive(link)
        if message is None:
            self._selector.unregister(link)
            link.close()
            del self._ranks[rank]
            self._gone += 1
            return
        assert self._division is not None
        if "again" in message:
            step, micro_batch = message["again"]
            self._tasks.appendleft(self._division.again(step, micro_batch, rank))
        for step in message.get("load", ()):
            self._ask(rank, step, message["first"])
        self._deal()

    def _ask(self, rank: int, step: int, first: int) -> None:
        """Note that a rank asks for a mini-batch; whoever is first to does so for all."""
        assert self._division is not None
        if step not in self._asked:
            self._asked[step] = set(self._division.readers(step, first))
            self._tasks += self._division.tasks(step, first)
        self._asked[step].discard(rank)
        if not self._asked[step]:
            del self._asked[step]

    def _deal(self) -> None:
        """Give tasks to loaders that have none."""
        for loader in self._loaders:
            if self._tasks and loader.opened and loader.task is None:
                loader.task = self._tasks.popleft()
                with suppress(OSError):
                    wire.send(loader.link, {"task": TASK.dump_python(loader.task, mode="json")})

    def _loss_of(self, loader: _Loader) -> str:
        """Return how a loader has ended, in words."""
        _, status = os.waitpid(loader.pid, 0)
        loader.pid = 0
        how = f"{_ending(os.waitstatus_to_exitcode(status))} while it {_doing(loader)}"
        return f"loader {loader.number} (of {len(self._loaders)}) {how}"

    def _tell(self, message: Mapping[str, object]) -> None:
        """Tell all ranks."""
        for link in self._ranks.values():
            with suppress(OSError):
                wire.send(link, message)

    def _end(self) -> None:
        for loader in self._loaders:
            loader.link.close()
            if loader.pid:
                with suppress(ProcessLookupError):
                    os.kill(loader.pid, signal.SIGKILL)
                os.waitpid(loader.pid, 0)
        self._listener.close()
        for number in ("", *(f"-{loader.number}" for loader in self._loaders)):
            (self._folder / f"{SERVER}{number}").unlink(missing_ok=True)
        self._selector.close()


def _ending(code: int) -> str:
    """Return how a process has ended, in words."""
    if code >= 0:
        return f"ended by itself with exit code {code}"
    name = signal.Signals(-code).name
    # A guess, which the reader can check.
    return f"was killed by {name}" + (" (the system may have run out of memory)" if name == "SIGKILL" else "")


def _doing(loader: _Loader) -> str:
    if not loader.opened:
        return "opened the dataset"
    if loader.task is None:
        return "waited for work"
    place = "" if loader.task.micro_batch is None else f", micro-batch {loader.task.micro_batch}"
    return f"read samples of step {loader.task.step}{place}"


def serve(arguments: ServingArguments, report: Callable[[dict[str, object]], None]) -> None:
    """Fork a host's loaders, and serve its ranks until all have gone."""
    _LoaderServer(arguments).perform(report)


@contextmanager
def spare_process(pool: RankPool | None, plan: Plan, *, wanted: bool) -> Iterator[RankPool | None]:
    """Give a pool with a process that takes part in no job, from which loaders can be forked; None if none is wanted.

    Started early, it imports what loaders need while its host captures the model.

    Args:
        pool: of the ranks, which may have such a process.
        plan: what is carried out.
        wanted: whether there are loaders.
    """
    if not wanted:
        yield None
    elif pool is not None and pool.has_spare:
        yield pool
    else:
        with RankPool(0, threads=plan.threads, imports=[__name__], spare=True) as own:
            yield own


@contextmanager
def loading(
    pool: RankPool | None, folder: Path, count: int, ranks: Sequence[int], reading: ReadingArguments
) -> Iterator[Callable[[], None]]:
    """Have a host's loaders serve its ranks, which have all gone when this ends.

    Args:
        pool: has the process that they are forked from; None: there are none.
        folder: where ranks find them.
        count: of loaders.
        ranks: those of the host.
        reading: what is read.

    Yields:
        What waits until ranks can come.
    """
    if pool is None:
        yield lambda: None
        return
    own = {"folder": str(folder), "loaders": count, "ranks": list(ranks)}
    arguments = ServingArguments(**reading, **own)  # type: ignore[typeddict-item]
    with pool.serving(f"{__name__}:{serve.__name__}", arguments) as come:
        yield come
