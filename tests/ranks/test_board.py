"""The board of a host's ranks: every rank's last note, read by another process while it is written."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from autopar.ranks.board import FINISHED, SETTING_UP, STEPPING, Board, Note


def test_a_board_keeps_every_ranks_last_note(tmp_path: Path) -> None:
    with Board(tmp_path / "board", 3) as board, Board(tmp_path / "board", 3) as other:
        board.write(1, 1, 5, 17)
        board.write(2, 2)
        assert other.read(1)[:3] == (1, 5, 17)
        assert other.read(2)[:3] == (2, 0, 0)
        assert other.read(0).time_s == 0 < other.read(1).time_s


def test_a_board_that_is_read_while_a_rank_writes_never_goes_back(tmp_path: Path) -> None:
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from autopar.ranks.board import Board\n"
        "with Board(Path(sys.argv[1]), 1) as board:\n"
        "    note, until_s = board.stepping(0), time.monotonic() + 3\n"
        "    while time.monotonic() < until_s:\n"
        "        for position in range(1000):\n"
        "            note(1 + position % 2 * 2**40, position)\n"
    )
    path = tmp_path / "board"
    with Board(path, 1) as board:
        with subprocess.Popen([sys.executable, "-c", script, str(path)]) as writer:
            before, reads = board.read(0), 0
            while writer.poll() is None:
                found = board.read(0)
                assert found.time_s >= before.time_s
                assert found.step in (0, 1, 1 + 2**40)
                before, reads = found, reads + 1
        assert writer.returncode == 0
        assert reads > 1000
        assert before.time_s > 0


def test_a_note_says_what_its_rank_does_and_when_and_outlives_who_wrote_it(tmp_path: Path) -> None:
    with Board(tmp_path / "board", 4) as board:
        before_s = time.monotonic()
        note = board.stepping(3)
        for step in range(5):
            note(step, 100 * step)
        board.write(0, FINISHED, 2**62, 2**62)
    with Board(tmp_path / "board", 4) as again:
        assert again.read(3)[:3] == (STEPPING, 4, 400)
        assert before_s <= again.read(3).time_s <= again.read(0).time_s <= time.monotonic()
        assert again.read(0)[:3] == (FINISHED, 2**62, 2**62)
        assert again.read(1) == again.read(2) == Note(SETTING_UP, 0, 0, 0.0)


@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_are_asked_to_stop_end_behind_the_same_step(seed: int, tmp_path: Path) -> None:
    rng, done = random.Random(seed), [0, 0, 0]

    def train(rank: int, board: Board) -> None:
        for step in range(10_000):
            if board.ends_before(rank, step):
                return
            done[rank] = step + 1
            if rng.random() < 0.05:
                time.sleep(0.0005)

    with Board(tmp_path / "board", 3) as board:
        threads = [threading.Thread(target=train, args=(rank, board)) for rank in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(rng.uniform(0.0, 0.02))
        board.request_stop()
        time.sleep(0.05)
        board.announce_last(max(board.read(rank).step for rank in range(3)))
        for thread in threads:
            thread.join()
    assert len(set(done)) == 1
    assert done[0] >= 1
