"""Supervisor: where a launcher starts the ranks, each process that it starts runs one rank and watches over it.

The launcher sees the supervisor alone; the rank is its child, and ends with it. All supervisors of a host share a
board, which is how they agree on the one rank that is to blame, and on the step behind which a run that is asked to end
does. Nothing here needs torch.

Why: docs/design/decisions.md, "Ranks: Each launched rank has a supervisor".
"""

from __future__ import annotations

import faulthandler
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from autopar.errors import AutoparError, FileError, UsageError
from autopar.ranks.board import SETTING_UP, Board
from autopar.ranks.environment import SUPERVISED, LaunchedRank, rank_from_environment
from autopar.ranks.failure import SaidElsewhereError
from autopar.ranks.fork_server import die_with
from autopar.ranks.monitor import AnswerPipe, RankMonitor, RankProcess, Watch
from autopar.ranks.scratch import LOCK, PREFIX, Closable
from autopar.signals import stopping

_OF_LAUNCHERS = {"TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"}
"""Variables that launchers set for the processes that are their children."""
_REFUSE_S = 60.0
"""How long a rank that refuses may take to have the others hear it."""


def supervise(launch: LaunchedRank, watch: Watch, command: Sequence[str]) -> int:
    """Run a command as one rank, watch over it, and return its exit code.

    The command finds with :class:`SupervisedRank` what it is to write, and on which board.

    Raises:
        AutoparError: the rank failed, or was lost; says how.
        SaidElsewhereError: another supervisor of this host says why the run failed.
    """
    if not _OF_LAUNCHERS.isdisjoint(os.environ):
        # A launcher that is killed ends none of the processes that it has started. A shell may have ended long ago.
        die_with(os.getppid())
    with shared_board(launch) as (path, board):
        process, link = _start(path, command)
        patience_s = 0.0
        try:
            monitor = RankMonitor({launch.rank: link}, board, watch, launch.ranks_of_host, whole=launch.one_host)
            with stopping(monitor.ask_to_stop):
                _wait(monitor)
            return process.wait()
        except AutoparError:
            patience_s = 0.0 if board.has_come(launch.rank) else _REFUSE_S
            raise
        finally:
            # A rank that refuses has the others hear it; what failed is said meanwhile.
            ending = threading.Thread(target=_end, args=(process, link, patience_s))
            ending.start()
            if not patience_s:
                ending.join()


def _end(process: subprocess.Popen[bytes], link: RankProcess, patience_s: float) -> None:
    """End a process, which may take some time to end by itself."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(patience_s)
    process.kill()
    process.wait()
    link.close()


@contextmanager
def refusals_heard() -> Iterator[None]:
    """Have the other ranks that a launcher has started hear of an error that keeps this process from becoming one.

    A thread does, which the process waits for where it ends: the error is said meanwhile.
    """
    try:
        yield
    except AutoparError as error:
        # Where no launcher is at work, or its variables are wrong, there are no others.
        with suppress(UsageError):
            launch = rank_from_environment(os.environ)
            if launch.size > 1:
                threading.Thread(target=_refuse, args=(launch, error)).start()
        raise


def _refuse(launch: LaunchedRank, error: AutoparError) -> None:
    # It needs torch.
    from autopar.ranks.meeting import refuse

    refuse(launch, error)


def _wait(monitor: RankMonitor) -> None:
    try:
        monitor.until_done()
    except SaidElsewhereError:
        # The launcher ends all when one has ended; that is nothing to be said, too.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
        raise


@contextmanager
def shared_board(launch: LaunchedRank) -> Iterator[tuple[Path, Board]]:
    """Open the board of this host's ranks, which the first to come clears and the last to go removes.

    Raises:
        FileError: its folder is another user's.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), os.environ.get("TORCHELASTIC_RUN_ID", "")
    place = json.dumps([launch.address, launch.port, launch.ranks_of_host[0], launch.size, attempt])
    digest = hashlib.sha256(place.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"{PREFIX}board-{os.getuid()}-{digest}"
    handle = _share_lock(folder)
    try:
        with Board(folder / "board", launch.size) as board:
            yield folder / "board", board
    finally:
        with suppress(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def _share_lock(folder: Path) -> int:
    """Make a folder that others use, too, and share its lock; remove the board that an earlier run has left."""
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.lstat().st_uid != os.getuid():
            raise FileError(f"{folder}: is another user's; remove it, or set TMPDIR to a folder of your own")
        with suppress(FileNotFoundError):
            handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            with suppress(BlockingIOError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (folder / "board").unlink(missing_ok=True)
            fcntl.flock(handle, fcntl.LOCK_SH)
            # Whoever went last, or sweeps, may have removed it meanwhile.
            with suppress(FileNotFoundError):
                if (folder / LOCK).stat().st_ino == os.fstat(handle).st_ino:
                    return handle
            os.close(handle)


def _start(board: Path, command: Sequence[str]) -> tuple[subprocess.Popen[bytes], RankProcess]:
    reader, writer = os.pipe()
    settings = json.dumps({"pipe": writer, "board": str(board), "parent": os.getpid()})
    try:
        process = subprocess.Popen(
            command, pass_fds=(writer,), start_new_session=True, env={**os.environ, SUPERVISED: settings}
        )
    finally:
        os.close(writer)
    return process, RankProcess(process, os.fdopen(reader, "rb", buffering=0))


class SupervisedRank(Closable):
    """A rank's connection with its supervisor."""

    def __init__(self, launch: LaunchedRank) -> None:
        """Take it up; this process then ends with its supervisor, whose signals are not for it."""
        settings = json.loads(os.environ.pop(SUPERVISED))
        die_with(settings["parent"])
        # Of a crash, the stack is written.
        faulthandler.enable()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.set_inheritable(settings["pipe"], False)
        self._pipe = AnswerPipe(settings["pipe"])
        self.board = Board(Path(settings["board"]), launch.size)
        self.board.write(launch.rank, SETTING_UP)
        self._said = False

    def fail(self, error: Exception) -> None:
        """Have the supervisor say what failed, unless another rank does; said once, as early as it is known."""
        if not self._said:
            self._said = True
            if isinstance(error, SaidElsewhereError):
                self._pipe.send({"elsewhere": error.exit_code})
            else:
                self._pipe.fail(error)

    def finish(self) -> None:
        """Say that the rank has done all."""
        self._pipe.send({"result": None})

    def close(self) -> None:
        self.board.close()
        self._pipe.close()
