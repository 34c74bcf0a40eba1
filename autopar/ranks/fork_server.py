"""ForkServer: starts rank processes, all forked from one that has imported what they need.

In come how many, and modules to import. Out come processes, each with a pipe for jobs and one for answers, and how
every one ended. What a rank needs takes seconds of a processor to import, which is so spent once, not once a rank.

Why: docs/design/decisions.md, "Ranks: Ranks are forked from one process".
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import BinaryIO

from autopar.ranks.monitor import RankProcess

END_S = 5.0
"""How long a server may take to end its ranks when it is told to; one that is stopped does not."""


class ForkServer:
    """The process that ranks are forked from (:mod:`.entry`).

    It reports who has been forked, and who has ended: both are its children, which nobody else can wait for. It ends
    with the thread that has made it, and its ranks with it.
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
            **os.environ,
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
        }
        self._reports, self._rest = reports[0], b""
        os.set_blocking(self._reports, False)
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        pipes = [
            (os.fdopen(writer, "wb"), os.fdopen(reader, "rb", buffering=0))
            for (_, writer), (reader, _) in zip(jobs, answers, strict=True)
        ]
        self.links = [RankProcess(ForkedProcess(self, rank, job), pipe) for rank, (job, pipe) in enumerate(pipes)]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "autopar.ranks.entry", json.dumps(settings)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=of_server,
                start_new_session=True,
                env=environment,
            )
        finally:
            for each in of_server:
                os.close(each)

    def pid_of(self, rank: int) -> int | None:
        """Return a rank's process; None where it is not there yet."""
        self._look()
        return self._pids.get(rank)

    def code_of(self, rank: int) -> int | None:
        """Return how a rank ended: its exit code, or the negative of a signal; None where it has not."""
        self._look()
        return self._codes.get(rank)

    def wait_for(self, rank: int) -> int:
        """Wait until a rank has ended, and return how; of one that was never there, how the server did."""
        os.set_blocking(self._reports, True)
        while rank not in self._codes and self._look():
            pass
        return self._codes[rank] if rank in self._codes else self._process.wait()

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

    def _look(self) -> bool:
        """Take in what the server has reported; return False where it has ended."""
        try:
            data = os.read(self._reports, 1 << 16)
        except BlockingIOError:
            return True
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            report = json.loads(line)
            found = self._codes if "code" in report else self._pids
            found[report["rank"]] = report["code" if "code" in report else "pid"]
        return bool(data)


class ForkedProcess:
    """One rank's process, with the part of :class:`subprocess.Popen` that who watches over it needs."""

    def __init__(self, server: ForkServer, rank: int, stdin: BinaryIO) -> None:
        self._server, self._rank, self.stdin = server, rank, stdin

    @property
    def pid(self) -> int | None:
        """Its number; None where it is not there yet."""
        return self._server.pid_of(self._rank)

    def poll(self) -> int | None:
        """Return how it has ended, if it has."""
        return self._server.code_of(self._rank)

    def wait(self) -> int:
        """Wait until it has ended, and return how."""
        return self._server.wait_for(self._rank)
