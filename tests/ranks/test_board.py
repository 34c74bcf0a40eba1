"""The board of a host's ranks: every rank's last note, read by another process while it is written.

Hosts that are told to end agree on the step behind which they do, whichever of them is told, and whenever.
"""

import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch.distributed as dist

from autopar.ranks.board import FINISHED, SETTING_UP, STEPPING, STOP, Board, HostsLink, Note
from launched import until
from suite import warm

WRITER = """
import sys
from functools import partial
from pathlib import Path
from autopar.ranks.board import Board
with Board(Path(sys.argv[1]), 1) as board:
    note = partial(board.write_action, 0)
    while True:
        for position in range(1000):
            note(1 + position % 2 * 2**40, position)
"""


def test_boards_are_never_read_back_and_lost_stores_end_the_thread_alone(tmp_path: Path) -> None:
    path = tmp_path / "board"
    with Board(path, 1) as board, warm.Popen([sys.executable, "-c", WRITER, str(path)]) as writer:
        until(lambda: board.read(0).time_s)
        before, seen = board.read(0), set()
        while len(seen) < 200:
            found = board.read(0)
            assert found.time_s >= before.time_s
            assert found.step in (1, 1 + 2**40)
            seen.add(found.time_s)
            before = found
        writer.kill()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=2))
    with Board(tmp_path / "board", 2) as board:
        client = dist.TCPStore("127.0.0.1", store.port, wait_for_workers=False, timeout=timedelta(seconds=2))
        link = HostsLink(client, board, (0,), (0, 1))
        del store
        board.request_stop()
        link.close()
        assert board.last_step is None


def test_a_note_says_what_its_rank_does_and_when_and_outlives_who_wrote_it(tmp_path: Path) -> None:
    # A board of fewer ranks makes way for a larger one.
    Board(tmp_path / "board", 1).close()
    with Board(tmp_path / "board", 4) as board:
        before_s = time.monotonic()
        with Board(tmp_path / "board", 4) as other:
            board.write(0, 1, 5, 17)
            assert other.read(0)[:3] == (1, 5, 17)
        note = partial(board.write_action, 3)
        for step in range(5):
            note(step, 100 * step)
        assert [each[:3] for each in board.history(3)] == [(STEPPING, step, 100 * step) for step in range(5)]
        board.write(0, FINISHED, 2**62, 2**62)
    with Board(tmp_path / "board", 4) as again:
        assert again.read(3)[:3] == (STEPPING, 4, 400)
        assert before_s <= again.read(3).time_s <= again.read(0).time_s <= time.monotonic()
        assert again.read(0)[:3] == (FINISHED, 2**62, 2**62)
        assert again.read(1) == again.read(2) == Note(SETTING_UP, 0, 0, 0.0)


@pytest.mark.some(5)
@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_are_asked_to_stop_end_behind_the_same_step(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    with Board(tmp_path / "board", 3) as board, ThreadPoolExecutor(3) as threads:

        def train(rank: int) -> int:
            for step in range(10_000):
                if board.ends_before(rank, step):
                    return step
                if rng.random() < 0.05:
                    time.sleep(0.0005)
            return 10_000

        done = [threads.submit(train, rank) for rank in range(3)]
        time.sleep(rng.uniform(0.0, 0.02))
        board.request_stop()
        time.sleep(0.05)
        board.announce_last(max(board.read(rank).step for rank in range(3)))
        (step,) = {each.result() for each in done}
    assert step >= 1


HOSTS = ((0, 1), (2,), (3, 4, 5))


@pytest.mark.some(4)
@pytest.mark.parametrize("seed", range(8))
def test_ranks_of_all_hosts_end_behind_the_same_step(seed: int, tmp_path: Path) -> None:
    rng, store = random.Random(seed), dist.HashStore()
    boards = [Board(tmp_path / f"board-{host}", 6) for host in range(len(HOSTS))]
    # Ranks are a step apart at most, as those that send each other something are.
    steps_s = [rng.choice([0.0005, 0.004]) for _ in range(6)]
    lock, begun = threading.Condition(), [0] * 6

    def train(rank: int, board: Board) -> int:
        for step in range(10_000):
            if board.ends_before(rank, step):
                return step
            with lock:
                begun[rank] = step
                lock.notify_all()
                assert lock.wait_for(lambda step=step: min(begun) >= step - 1, 30.0)
            time.sleep(steps_s[rank])
        return 10_000

    links = [HostsLink(store, boards[host], own, [own[0] for own in HOSTS]) for host, own in enumerate(HOSTS)]
    with ThreadPoolExecutor(6) as threads:
        done = [threads.submit(train, rank, boards[host]) for host, own in enumerate(HOSTS) for rank in own]
        time.sleep(rng.uniform(0.05, 0.3))
        # One host is told, or several are, by a launcher.
        for host in rng.sample(range(len(HOSTS)), rng.randint(1, len(HOSTS))):
            boards[host].request_stop()
            time.sleep(rng.choice([0.0, 0.02]))
        assert len({each.result(60.0) for each in done}) == 1
    for each in (*links, *boards):
        each.close()


def test_a_host_whose_ranks_have_finished_has_all_train_to_the_end(tmp_path: Path) -> None:
    store = dist.HashStore()
    with Board(tmp_path / "one", 2) as one, Board(tmp_path / "two", 2) as two:
        one.write(0, FINISHED)
        two.write(1, STEPPING, 7)
        links = [HostsLink(store, board, (rank,), (0, 1)) for rank, board in enumerate((one, two))]
        two.request_stop()
        until(lambda: (two.last_step or 0) > 1_000_000)
        for link in links:
            link.close()


def test_a_host_that_is_told_while_it_looks_passes_it_on(tmp_path: Path) -> None:
    store, told = dist.HashStore(), threading.Event()
    with Board(tmp_path / "one", 2) as one, Board(tmp_path / "two", 2) as two:

        def look(keys: list[str]) -> bool:
            """Have the host told between its two looks."""
            found = store.check(keys)
            if keys == [STOP] and not told.is_set():
                told.set()
                one.request_stop()
            return bool(found)

        stores = (MagicMock(wraps=store, check=look), store)
        links = [HostsLink(stores[at], board, (at,), (0, 1)) for at, board in enumerate((one, two))]
        until(lambda: one.last_step is not None and two.last_step is not None)
        for link in links:
            link.close()
