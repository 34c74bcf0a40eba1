"""Supervisors of a host's ranks: the board that they share, and that one of them says what failed."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from autopar.errors import AutoparError, OutOfMemoryError, TrainingError, UsageError
from autopar.ranks.board import STEPPING, Board
from autopar.ranks.environment import LaunchedRank
from autopar.ranks.failure import SaidElsewhereError
from autopar.ranks.monitor import Doing, Watch
from autopar.ranks.supervisor import shared_board, supervise
from launched import alive, until

RANK = """
import os, signal, sys, time
from autopar.errors import *
from autopar.ranks.environment import LaunchedRank
from autopar.ranks.failure import PeerLostError
from autopar.ranks.supervisor import SupervisedRank
rank, size = int(sys.argv[1]), int(sys.argv[2])
launch = LaunchedRank(rank, size, rank, size, "127.0.0.1", 1, "a test")
with SupervisedRank(launch) as supervised:
    try:
        for step in range(int(sys.argv[4])):
            if supervised.board.ends_before(rank, step):
                break
            supervised.board.write_action(rank, step, 0)
            supervised.board.write_slowness(rank, 1.0)
            time.sleep(0.02)
            if step == 3:
                exec(sys.argv[3])
        supervised.finish()
    except Exception as error:
        supervised.fail(error)
        sys.exit(1)
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def launched(rank: int) -> LaunchedRank:
    return LaunchedRank(rank, 2, rank, 2, "127.0.0.1", 1, "a test")


def run(acts: list[str], timeout_s: float = 5.0) -> list[object]:
    """Supervise a rank for each of two acts, in threads; return their exit codes, or what they raise."""
    watch = Watch(timeout_s, lambda rank, note: Doing(f"step {note.step}", waiting=note.phase != STEPPING))

    def watching(rank: int) -> object:
        try:
            return supervise(launched(rank), watch, [sys.executable, "-c", RANK, str(rank), "2", acts[rank], "6"])
        except AutoparError as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(watching, range(2)))


@pytest.mark.reliability(30, 31)
def test_boards_are_shared_by_one_job_and_one_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with shared_board(launched(0)) as (path, one):
        one.write(1, STEPPING, 7)
        with shared_board(launched(1)) as (same, other):
            assert same == path
            assert other.read(1).step == 7
        assert path.exists()
    assert not list(tmp_path.iterdir())
    # One that was left, by processes that were killed.
    folder = path.parent
    folder.mkdir()
    (folder / "lock").touch()
    with Board(path, 2) as left:
        left.blame(1)
    with shared_board(launched(0)) as (again, board):
        assert again == path
        assert board.blamed_rank is None
    found = set()
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        for launch in (launched(0), launched(0)._replace(port=2), LaunchedRank(2, 4, 0, 2, "127.0.0.1", 1, "a test")):
            with shared_board(launch) as (path, _):
                found.add(path)
    assert len(found) == 6
    with shared_board(launched(0)) as (path, _):
        name = path.parent.name
    (tmp_path / name).mkdir()
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    (tmp_path / name.replace(f"-{own}-", f"-{own + 1}-")).mkdir()
    with pytest.raises(AutoparError, match="is another user's; remove it, or set TMPDIR"), shared_board(launched(0)):
        pass


@pytest.mark.parametrize(
    ("act", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", r"rank 1 \(step 3\) was killed by SIGKILL"),
        ("os._exit(3)", r"rank 1 \(step 3\) ended by itself with exit code 3"),
        ("raise TrainingError('here')", "^here"),
        ("raise KeyError('mine')", r"rank 1 \(step 3\): KeyError: 'mine'"),
        ("time.sleep(60)", r"rank 1 \(step 3\) made no progress for 1 s"),
        ("os.kill(os.getpid(), signal.SIGSTOP)", r"rank 1 \(step 3\) is stopped; the others waited 1 s for it"),
    ],
)
def test_one_supervisor_says_what_failed(act: str, said: str) -> None:
    consequence = "time.sleep(0.3); raise PeerLostError('lost')"
    waiting = "supervised.board.write(rank, 2); time.sleep(60)" if "sleep" in act or "STOP" in act else consequence
    first, second = run([waiting, act], timeout_s=1.0)
    assert isinstance(first, SaidElsewhereError)
    with pytest.raises(TrainingError, match=said):
        raise second  # type: ignore[misc]


def test_who_says_what_depends_on_whether_a_cause_shows_and_memory_to_plan_with_passes_the_pipe() -> None:
    assert run(["pass", "pass"]) == [0, 0]
    outcomes = run(["raise PeerLostError('lost')"] * 2)
    assert sorted(type(each).__name__ for each in outcomes) == ["SaidElsewhereError", "TrainingError"]
    # Mistakes that all ranks find blame none.
    assert [type(each) for each in run(["raise UsageError('typed')"] * 2)] == [UsageError] * 2
    first, second = run(["time.sleep(60)", "raise OutOfMemoryError('none left', 5 << 20)"])
    assert isinstance(first, SaidElsewhereError)
    assert isinstance(second, OutOfMemoryError)
    assert second.memory_bytes == 5 << 20


WATCHING = """
import sys
from autopar.ranks.environment import LaunchedRank
from autopar.ranks.monitor import Watch
from autopar.ranks.supervisor import supervise
launch = LaunchedRank(0, 1, 0, 1, "127.0.0.1", 1, "a test")
supervise(launch, Watch(60.0), [sys.executable, "-c", sys.argv[1], "0", "1", sys.argv[2], "100000"])
"""
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


@pytest.mark.parametrize("launcher", [None, "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"])
@pytest.mark.reliability(29)
def test_a_rank_ends_with_its_supervisor_and_that_with_its_launcher(tmp_path: Path, launcher: str | None) -> None:
    mark = tmp_path / "pid"
    act = f"open({str(mark)!r}, 'w').write(str(os.getpid()))"
    environment = {**os.environ, "TMPDIR": str(tmp_path), **({} if launcher is None else {launcher: "0"})}
    started = ["-c", WATCHING, RANK, act] if launcher is None else ["-c", LAUNCHER, WATCHING, RANK, act]
    with subprocess.Popen([sys.executable, *started], env=environment) as killed:
        until(lambda: mark.exists() and mark.read_text())
        killed.kill()
    until(lambda: not alive(int(mark.read_text())))
