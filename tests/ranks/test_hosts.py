"""Hosts that are told to end agree on the step behind which they do, whichever of them is told, and whenever."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from autopar.ranks.board import FINISHED, STEPPING, Board
from autopar.ranks.hosts import STOP, HostsLink

HOSTS = ((0, 1), (2,), (3, 4, 5))
RANKS = 6


@pytest.mark.parametrize("seed", range(8))
def test_ranks_of_all_hosts_end_behind_the_same_step(seed: int, tmp_path: Path) -> None:
    rng, done = random.Random(seed), [0] * RANKS
    store = dist.HashStore()
    boards = [Board(tmp_path / f"board-{host}", RANKS) for host in range(len(HOSTS))]
    # Ranks are a step apart at most, as those that send each other something are.
    steps_s = [rng.choice([0.0005, 0.004]) for _ in range(RANKS)]
    lock, begun = threading.Condition(), [0] * RANKS

    def train(rank: int, board: Board) -> None:
        for step in range(100_000):
            if board.ends_before(rank, step):
                return
            with lock:
                begun[rank] = step
                lock.notify_all()
                assert lock.wait_for(lambda step=step: min(begun) >= step - 1, 30.0)
            time.sleep(steps_s[rank])
            done[rank] = step + 1

    threads = [
        threading.Thread(target=train, args=(rank, boards[host])) for host, own in enumerate(HOSTS) for rank in own
    ]
    links = [HostsLink(store, boards[host], own, [own[0] for own in HOSTS]) for host, own in enumerate(HOSTS)]
    for thread in threads:
        thread.start()
    time.sleep(rng.uniform(0.05, 0.3))
    # One host is told, or several are, by a launcher.
    for host in rng.sample(range(len(HOSTS)), rng.randint(1, len(HOSTS))):
        boards[host].request_stop()
        time.sleep(rng.choice([0.0, 0.02]))
    for thread in threads:
        thread.join(60.0)
    assert not any(thread.is_alive() for thread in threads)
    assert len(set(done)) == 1
    for link in links:
        link.close()
    for board in boards:
        board.close()


def test_a_host_whose_ranks_have_finished_has_all_train_to_the_end(tmp_path: Path) -> None:
    store = dist.HashStore()
    with Board(tmp_path / "one", 2) as one, Board(tmp_path / "two", 2) as two:
        one.write(0, FINISHED)
        two.write(1, STEPPING, 7)
        links = [HostsLink(store, board, (rank,), (0, 1)) for rank, board in enumerate((one, two))]
        two.request_stop()
        _until(lambda: two.last_step is not None)
        assert two.last_step is not None
        assert two.last_step > 1_000_000
        for link in links:
            link.close()


def test_a_host_that_is_told_while_it_looks_passes_it_on(tmp_path: Path) -> None:
    store, told = dist.HashStore(), threading.Event()
    with Board(tmp_path / "one", 2) as one, Board(tmp_path / "two", 2) as two:

        class Looking:
            """Has the host told between its two looks."""

            def __getattr__(self, name: str) -> object:
                return getattr(store, name)

            def check(self, keys: list[str]) -> bool:
                found = store.check(keys)
                if keys == [STOP] and not told.is_set():
                    told.set()
                    one.request_stop()
                return bool(found)

        stores = (Looking(), store)
        links = [HostsLink(stores[at], board, (at,), (0, 1)) for at, board in enumerate((one, two))]  # type: ignore[arg-type]
        _until(lambda: one.last_step is not None and two.last_step is not None)
        for link in links:
            link.close()


def test_a_store_that_is_gone_ends_the_thread_alone(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=2))
    with Board(tmp_path / "board", 2) as board:
        client = dist.TCPStore("127.0.0.1", store.port, wait_for_workers=False, timeout=timedelta(seconds=2))
        link = HostsLink(client, board, (0,), (0, 1))
        del store
        board.request_stop()
        link.close()
        assert board.last_step is None


def _until(happens: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 30
    while not happens():
        assert time.monotonic() < until_s
        time.sleep(0.01)
