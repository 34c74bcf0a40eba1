"""RankPool: processes of this host that run jobs together, watched over.

In come a function's name and its arguments; out comes what every rank returned, or the one failure that is to blame.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

from autopar.errors import TrainingError
from autopar.ranks.board import SET_UP_S, Board
from autopar.ranks.failure import Failure
from autopar.ranks.fork_server import ForkServer
from autopar.ranks.monitor import RankMonitor, RankProcess, Watch
from autopar.ranks.scratch import Closable, Scratch
from autopar.signals import stopping

_WATCH = Watch()


class RankPool(Closable):
    """Start rank processes once and run jobs on them, one after the other.

    The processes listen on loopback only, receive no signal of the terminal, and end with this process whatever ends
    it, not with the thread that asked for them. A job that fails ends all of them: the pool is then closed.

    >>> with RankPool(2) as pool:  # doctest: +SKIP
    ...     pool.run("package.module:function", {"size": 3})
    """

    def __init__(
        self,
        size: int,
        *,
        threads: int = 1,
        device_type: str = "cpu",
        share_gpus: bool = False,
        imports: Sequence[str] = (),
        spare: bool = False,
    ) -> None:
        """Start processes.

        Args:
            size: how many run jobs.
            threads: of each.
            device_type: what they compute on.
            share_gpus: whether several may have the same GPU.
            imports: modules that its jobs need, imported once for all of them.
            spare: whether there is one more process, which :meth:`serving` has do something beside jobs.
        """
        self.size, self.has_spare = size, spare
        self._device_type, self._share_gpus = device_type, share_gpus
        self._scratch = Scratch("ranks")
        self._jobs = 0
        self._server: ForkServer | None = None
        try:
            self._server = ForkServer(size + spare, threads, imports)
        except BaseException:
            self.close()
            raise

    @property
    def is_closed(self) -> bool:
        """Whether the processes are gone, by :meth:`close` or by a failure."""
        return self._server is None

    def run(
        self,
        target: str,
        arguments: object = None,
        *,
        ranks: int | None = None,
        watch: Watch = _WATCH,
        stoppable: bool = False,
        devices: Sequence[int] | None = None,
    ) -> list[object]:
        """Call ``target`` (``module:function``) with (context, arguments) in every rank; return their results.

        Args:
            target: where the function is; it returns something JSON-able.
            arguments: JSON-able, the same for all ranks.
            ranks: how many of the processes take part, by default all.
            watch: how they are watched over.
            stoppable: whether ranks look for being asked to stop (:meth:`Board.ends_before`), and end soon then.
            devices: the index of every rank's GPU; by default they take them in turn.

        Raises:
            AutoparError: of the kind that the failing rank raised; a lost or silent rank is a ``TrainingError``. Names
                rank and action, and all processes have ended when it is raised.
        """
        size = self.size if ranks is None else ranks
        if self._server is None or size > self.size:
            has = 0 if self._server is None else self.size
            raise TrainingError(f"{size} ranks were asked of a pool that has {has}")
        links = self._server.links[:size]
        self._jobs += 1
        folder = self._scratch.path / f"job-{self._jobs}"
        folder.mkdir(mode=0o700)
        job = {
            "target": target,
            "arguments": arguments,
            "size": size,
            "board": str(folder / "board"),
            "rendezvous": str(folder / "rendezvous"),
            # Twice as long, so that this process, which knows what every rank was doing, is the first to speak.
            "timeout_s": 2 * max(watch.timeout_s, SET_UP_S),
            "device": self._device_type,
            "share_gpus": self._share_gpus,
        }
        with Board(folder / "board", size) as board:
            monitor = RankMonitor(dict(enumerate(links)), board, watch)
            try:
                for rank, link in enumerate(links):
                    link.submit({**job, "rank": rank, "index": rank if devices is None else devices[rank]})
                with stopping(monitor.ask_to_stop) if stoppable else nullcontext():
                    return monitor.until_done()
            except BaseException:
                self.close()
                raise
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def serving(self, target: str, arguments: object) -> Iterator[Callable[[], None]]:
        """Have the spare process call ``target`` (``module:function``) with (arguments, report).

        What is done in this context has the function end by itself; where it fails, the pool is closed.

        Yields:
            What waits until the function has reported something.

        Raises:
            AutoparError: what the function raised, or how the process ended.
        """
        if self._server is None or not self.has_spare:
            raise TrainingError("a pool without a spare process was asked to serve")
        link = self._server.links[self.size]
        link.submit({"target": target, "arguments": arguments})
        try:
            yield partial(_await_word, link, "message")
            _await_word(link, "result")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End every process and forget them."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        self._scratch.close()


def _await_word(link: RankProcess, kind: str) -> None:
    """Wait until a process that is none of a job's ranks says something of a kind."""
    while (messages := link.read()) is not None:
        for message in messages:
            if "failure" in message:
                raise Failure(**message["failure"]).as_error()  # type: ignore[arg-type]
        if any(kind in message for message in messages):
            return
    raise TrainingError(f"the process that serves ranks ended with exit code {link.process.wait()}")
