"""Ranks that set up wait for each other as long as one works, and hear at once what another fails of."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from autopar.errors import AutoparError, FileError, TrainingError, UsageError
from autopar.ranks import setting_up
from autopar.ranks.failure import Failure
from autopar.ranks.setting_up import OtherRanks, SharedWork, WorkMeter
from launched import until


@pytest.fixture
def ranks_of() -> Iterator[Callable[..., list[OtherRanks]]]:
    """Return what makes the ranks of a script, as threads."""
    made: list[OtherRanks] = []

    def make(size: int, timeout_s: float, store: Any = None) -> list[OtherRanks]:  # noqa: ANN401
        shared = store or dist.HashStore()  # type: ignore[attr-defined]
        made.extend(OtherRanks(shared, rank, size, timeout_s) for rank in range(size))
        return made[-size:]

    yield make
    for each in made:
        each._pulse.close()


def waits(ranks: list[OtherRanks]) -> list[AutoparError | None]:
    """Have ranks wait for all; return what each raises."""

    def one(rank: OtherRanks) -> AutoparError | None:
        try:
            return rank.await_all()
        except AutoparError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(one, ranks))


def test_all_come_again_and_again_and_who_does_not_is_named_on_all_that_do(
    ranks_of: Callable[..., list[OtherRanks]],
) -> None:
    ranks = ranks_of(4, 60.0)
    assert all(waits(ranks) == [None] * 4 for _ in range(20))
    ranks = ranks_of(4, 0.4)
    assert waits(ranks) == [None] * 4
    began_s = time.monotonic()
    first, second = waits([ranks[0], ranks[3]])
    assert time.monotonic() - began_s < 60.0
    assert [type(each) for each in (first, second)] == [TrainingError] * 2
    assert str(first).startswith("rank 0 has waited 0.4 s for ranks 1, 2 of 4, and none has used a processor; raise")
    assert str(second).startswith("rank 3 has waited 0.4 s for ranks 1, 2 of 4, ")


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (UsageError("no such thing"), UsageError, "rank 1 has failed: no such thing"),
        (FileError("a.json: is none"), FileError, "rank 1 has failed: a.json: is none"),
        (ZeroDivisionError("by\n0"), TrainingError, "rank 1 has failed: ZeroDivisionError: by 0"),
        (None, TrainingError, "rank 1 has left, and rank 0 waits for it"),
    ],
)
def test_what_a_rank_fails_of_is_heard_at_once_and_that_it_has_left(
    error: Exception | None, kind: type, said: str, ranks_of: Callable[..., list[OtherRanks]]
) -> None:
    first, second, third = ranks_of(3, 600.0)
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(waits, [first, third])
        second.leave(None if error is None else Failure.of(error))
        heard, other = found.result(60.0)
    assert type(heard) is type(other) is kind
    assert str(heard) == said
    # All had come before it left.
    ranks = ranks_of(2, 600.0)
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(waits, [ranks[0]])
        ranks[1].await_all()
        ranks[1].leave(None)
        assert found.result(60.0) == [None]


def test_a_rank_that_works_is_waited_for_and_one_that_only_waits_is_none(
    monkeypatch: pytest.MonkeyPatch, ranks_of: Callable[..., list[OtherRanks]]
) -> None:
    monkeypatch.setattr(setting_up, "_TELL_S", 0.1)
    busy = threading.Event()
    busy.set()
    monkeypatch.setattr(WorkMeter, "worked_s", lambda meter: time.monotonic() if busy.is_set() else 0.0)
    first, _ = ranks_of(2, 1.5)
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(waits, [first])
        # What else is waited for here has no bound but this.
        time.sleep(4.0)
        assert not found.done()
        busy.clear()
        (error,) = found.result(60.0)
    assert "rank 0 has waited 1.5 s for rank 1 of 2" in str(error)


def test_a_process_that_has_ended_and_a_store_that_does_not_answer_are_not_waited_for(
    ranks_of: Callable[..., list[OtherRanks]],
) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    store = dist.HashStore()  # type: ignore[attr-defined]
    first, _ = ranks_of(2, 600.0, store)
    store.set("process/1", json.dumps([setting_up._system(), ended.pid]))
    (error,) = waits([first])
    assert str(error) == "rank 1 has ended, and rank 0 waits for it"
    answers = threading.Event()

    class Mute:
        def __getattr__(self, name: str) -> Callable[..., None]:
            def never(*arguments: object) -> None:
                answers.wait()
                raise RuntimeError("the store is gone")

            return never

    (error,) = waits(ranks_of(2, 0.3, Mute())[:1])
    answers.set()
    assert str(error) == (
        "rank 0 has waited 0.3 s for an answer of what keeps the ranks' store: rank 0, or its launcher, stands still"
    )


def test_a_process_works_that_computes_and_not_one_that_sleeps() -> None:
    busy, idle = (
        subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE)
        for text in ("while True: pass", "import time; time.sleep(600)")
    )
    try:
        until(lambda: setting_up.status_of(idle.pid)[0] == "S")
        meters = [WorkMeter(each.pid) for each in (busy, idle)]
        began_s = [each.worked_s() for each in meters]
        until(lambda: meters[0].worked_s() > began_s[0] + 1.0)
        assert meters[1].worked_s() < began_s[1] + 1.0
    finally:
        for each in (busy, idle):
            each.kill()
            each.communicate()


def test_those_who_reach_a_store_tell_each_other_of_their_work_and_hear_none_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(setting_up, "_TELL_S", 0.0)
    store, worked_s = dist.HashStore(), [0.0, 0.0, 0.0]  # type: ignore[attr-defined]
    shared = [SharedWork(store, lambda at=at: worked_s[at]) for at in range(3)]  # type: ignore[misc]

    def told() -> list[bool]:
        return [each.tell() for each in shared]

    assert told() == [False] * 3
    worked_s[1] = time.monotonic()
    assert told() == [False, False, True]
    assert told() == [True, False, False]
    assert told() == [False] * 3
