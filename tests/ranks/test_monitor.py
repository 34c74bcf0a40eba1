"""What a monitor makes of what ranks say and note: results, the one to blame, slow ranks, and the last step."""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import pytest

from autopar.errors import TrainingError, UsageError
from autopar.ranks import monitor as monitors
from autopar.ranks import setting_up
from autopar.ranks.board import FINISHED, SETTING_UP, STEPPING, Board
from autopar.ranks.failure import (
    Failure,
    NonFiniteBesideError,
    NonFiniteError,
    PeerFailedError,
    PeerLostError,
    SaidElsewhereError,
)
from autopar.ranks.monitor import AnswerPipe, Doing, RankMonitor, RankProcess, Watch


class Played:
    """A rank that is no process: the test says what it answers, and how it ends."""

    pid = None
    stdin: IO[bytes] | None = None

    def __init__(self) -> None:
        reader, self._writer = os.pipe()
        self.code: int | None = None
        self.link = RankProcess(self, os.fdopen(reader, "rb", buffering=0))

    def say(self, **message: object) -> None:
        os.write(self._writer, json.dumps(message).encode() + b"\n")

    def end(self, code: int) -> None:
        self.code = code
        os.close(self._writer)

    def poll(self) -> int | None:
        return self.code

    def wait(self) -> int:
        assert self.code is not None
        return self.code


@pytest.fixture
def ranks() -> Iterator[list[Played]]:
    found = [Played() for _ in range(3)]
    yield found
    for each in found:
        each.link.close()
        if each.code is None:
            each.end(0)


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Board]:
    for name, seconds in (("POLL_S", 0.02), ("GRACE_S", 0.4), ("STOP_DELAY_S", 0.02)):
        monkeypatch.setattr(monitors, name, seconds)
    with Board(tmp_path / "board", 3) as board:
        for rank in range(3):
            board.write(rank, STEPPING, 5)
        yield board


def _monitor(ranks: list[Played], board: Board, watch: Watch | None = None) -> RankMonitor:
    return RankMonitor({rank: each.link for rank, each in enumerate(ranks)}, board, watch or Watch(60.0))


def test_results_are_by_rank_whoever_is_first_and_messages_are_passed_on(ranks: list[Played], board: Board) -> None:
    heard: list[tuple[int, object]] = []
    watch = Watch(60.0, on_message=lambda rank, message: heard.append((rank, message)))
    board.write(0, FINISHED)
    for rank in (2, 0, 1):
        ranks[rank].say(message={"of": rank})
        ranks[rank].say(result=[rank, "done"])
    assert _monitor(ranks, board, watch).until_done() == [[rank, "done"] for rank in range(3)]
    assert sorted(heard, key=lambda each: each[0]) == [(rank, {"of": rank}) for rank in range(3)]


def test_who_ended_is_to_blame_and_not_who_lost_it(ranks: list[Played], board: Board) -> None:
    lost = Failure.of(PeerLostError("rank 0: no message from rank 2")).as_dict()
    ranks[0].say(failure=lost)
    ranks[1].say(failure=lost)
    ranks[2].end(-9)
    watch = Watch(60.0, on_failure=lambda board, error: f"rank {board.blamed_rank} is to blame")
    with pytest.raises(TrainingError, match=r"^rank 2 \(working\) was killed by SIGKILL; .*; rank 2 is to blame"):
        _monitor(ranks, board, watch).until_done()
    assert (board.blamed_rank, board.is_said) == (2, True)


def test_ranks_are_called_what_they_have_become_since_they_were_started(ranks: list[Played], board: Board) -> None:
    for started, rank in enumerate((2, 1, 0)):
        board.place(started, rank)
    ranks[2].end(3)
    watch = Watch(60.0, lambda rank, note: Doing(f"{rank} at step {note.step}", waiting=False))
    said = r"^rank 0 \(0 at step 5; started as rank 2\) ended by itself with exit code 3"
    with pytest.raises(TrainingError, match=said):
        _monitor(ranks, board, watch).until_done()
    assert (board.blamed_rank, board.placed(1)) == (2, 1)


def test_where_no_cause_shows_the_first_consequence_is_raised(ranks: list[Played], board: Board) -> None:
    ranks[1].say(failure=Failure.of(PeerLostError("rank 1: no message from rank 2")).as_dict())
    with pytest.raises(TrainingError, match=r"^rank 1: no message from rank 2"):
        _monitor(ranks, board).until_done()


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("found", "first"),
    [
        # (stage, whether in a forward, whether the rank has only lost others), by rank.
        ([(0, False, False), (1, False, False), None], 1),
        ([(0, False, False), (1, False, False), (2, True, False)], 2),
        ([(0, True, True), (1, True, True), (9, True, False)], 0),
        ([(0, False, False), (1, True, False), (9, True, False)], 1),
    ],
)
def test_of_numbers_that_are_not_finite_the_one_that_came_first_is_said(
    found: list[tuple[int, bool, bool] | None], first: int, apart: bool, ranks: list[Played], board: Board
) -> None:
    for rank, said in enumerate(found):
        error: TrainingError = PeerLostError("rank 2: lost rank 1")
        if said is not None:
            kind = NonFiniteBesideError if said[2] else NonFiniteError
            error = kind(f"rank {rank}: not finite", said[0], forward=said[1])
        ranks[rank].say(failure=Failure.of(error).as_dict())
    links = {rank: each.link for rank, each in enumerate(ranks)}
    single = [RankMonitor({rank: link}, board, Watch(60.0), range(3)) for rank, link in links.items()]
    with ThreadPoolExecutor(3) as threads:
        waiting = single if apart else [RankMonitor(links, board, Watch(60.0))]
        ended = [each.exception(30.0) for each in [threads.submit(each.until_done) for each in waiting]]
    spoken = [str(each) for each in ended if not isinstance(each, SaidElsewhereError)]
    assert spoken == [f"rank {first}: not finite"]
    assert board.blamed_rank == first


def test_of_ranks_that_stand_still_the_one_that_does_not_wait_is_named(ranks: list[Played], board: Board) -> None:
    watch = Watch(0.1, describe=lambda rank, note: Doing(f"step {note.step}", waiting=rank != 1))
    with pytest.raises(TrainingError, match=r"^rank 1 \(step 5\) made no progress for 0.1 s; raise `timeout_s`"):
        _monitor(ranks, board, watch).until_done()


def test_a_mistake_of_the_users_blames_no_rank_and_messages_may_come_in_parts(
    ranks: list[Played], board: Board
) -> None:
    text = json.dumps({"failure": Failure.of(UsageError("no such thing")).as_dict()}).encode()
    os.write(ranks[1]._writer, b'{"message": {}}\n' + text[:20])
    assert ranks[1].link.read() == [{"message": {}}]
    os.write(ranks[1]._writer, text[20:] + b"\n")
    with pytest.raises(UsageError, match=r"^no such thing"):
        _monitor(ranks, board).until_done()
    assert board.blamed_rank is None
    board.blame(2)
    board.blame(0)
    assert board.blamed_rank == 2, "what fails later is a consequence"


def _play(ranks: list[Played], board: Board, ratios: Sequence[Sequence[float]], on_slow: Callable[..., Any]) -> None:
    """Have all ranks note how slow they were, step by step."""
    steps = enumerate(ratios)

    def step(rank: int, message: object) -> None:
        for number, slowness in steps:
            for each in range(3):
                board.write(each, STEPPING, number)
                board.write_slowness(each, slowness[each])
            ranks[0].say(message={})
            return
        for played in ranks:
            played.say(result=None)

    ranks[0].say(message={})
    _monitor(ranks, board, Watch(60.0, on_message=step, on_slow=on_slow)).until_done()


def test_slow_and_still_ranks_are_told(ranks: list[Played], board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[int, float, float]] = []
    # Two slow steps, a quick one, four slow ones, one that is neither, and a quick one.
    ratios = [2.0, 2.0, 1.0, 2.0, 2.0, 2.0, 2.0, 1.4, 1.1]
    _play(ranks, board, [(1.0, each, 1.0) for each in ratios], lambda *each: said.append(each))
    assert said == [(1, 2.0, 1.0), (1, 1.1, 1.0)]
    # Nobody is blamed for what was before the monitor, nor at once a rank that has a monitor of its own.
    monkeypatch.setattr(monitors, "GRACE_S", 60.0)
    other = RankMonitor({0: ranks[0].link}, board, Watch(0.05), [0, 1])
    time.sleep(0.06)
    board.write(0, STEPPING, 6)
    other._check_progress()
    _monitor(ranks, board, Watch(0.05))._check_progress()


@pytest.mark.parametrize("who", [0, 1, "elsewhere"])
@pytest.mark.parametrize("how", ["R", "D", "S"])
def test_setting_up_is_no_stand_still_as_long_as_some_rank_of_the_run_works(
    who: int | str, how: str, ranks: list[Played], board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    began_s, used = time.monotonic(), [0.0, 0.0, 0.0]

    def work(process_id: int | None) -> tuple[str, float]:
        # All look for others now and then; one works, or is ready to, or reads a disk, for some time.
        rank = calls.pop(0)
        calls.append(rank)
        used[rank] += 1e-5
        works = time.monotonic() < began_s + 0.5
        if works and who == "elsewhere":
            board.write_work(None)
        used[rank] += 1.0 if works and who == rank and how == "S" else 0.0
        return how if works and who == rank else "S", used[rank]

    calls = [0, 1, 2]
    monkeypatch.setattr(setting_up, "_work_of", work)
    for rank in range(3):
        board.write(rank, SETTING_UP)
        board.write_waiting(rank, rank != 1)
    with pytest.raises(TrainingError, match=r"^rank 1 \(setting up\) made no progress for 0.1 s"):
        _monitor(ranks, board, Watch(0.1)).until_done()
    assert time.monotonic() > began_s + 0.5


def test_ranks_that_all_wait_for_others_leave_it_to_these_and_the_network(
    ranks: list[Played], board: Board, tmp_path: Path
) -> None:
    for rank in range(3):
        board.write_waiting(rank, 1)
    alone = RankMonitor({0: ranks[0].link}, board, Watch(0.05), range(3), whole=False)
    with pytest.raises(TrainingError, match=r"^rank 0 \(working\) waited 0.05 s for ranks of other hosts, .* network"):
        alone.until_done()
    lost = Failure.of(PeerLostError("rank 1: lost rank 7"))
    for whole, said in ((True, "all ranks are there: the network"), (False, "its own host says, or the network")):
        ranks[1].say(failure=lost.as_dict())
        fresh = Board(tmp_path / str(whole), 3)
        other = RankMonitor({1: ranks[1].link}, fresh, Watch(60.0), [1], whole=whole)
        with fresh, pytest.raises(TrainingError, match=f"^rank 1: lost rank 7; .*{said} between them is lost"):
            other.until_done()
    ranks[2].say(failure=Failure.of(PeerFailedError("the gradients of another rank")).as_dict())
    with pytest.raises(TrainingError) as raised:
        RankMonitor({2: ranks[2].link}, Board(tmp_path / "third", 3), Watch(60.0), [2]).until_done()
    assert str(raised.value) == "the gradients of another rank"


@pytest.mark.parametrize("ratios", [(2.0, 2.0, 2.1), (0.0, 3.0, 1.0), (1.0, 1.4, 1.0)])
def test_ranks_slow_alike_or_without_time_go_unsaid(ratios: Sequence[float], ranks: list[Played], board: Board) -> None:
    said: list[object] = []
    _play(ranks, board, [ratios] * 20, lambda *each: said.append(each))
    assert not said


def test_the_last_step_is_the_latest_that_any_has_begun(ranks: list[Played], board: Board) -> None:
    board.write(1, SETTING_UP)
    stopped = _monitor(ranks, board)
    assert not stopped.ask_to_stop()
    board.write(1, STEPPING, 7)
    assert stopped.ask_to_stop()
    said = iter((False, True))

    def look(rank: int, message: object) -> None:
        going = board.last_step is None or not next(said)
        for each in ranks[:1] if going else ranks:
            each.say(**{"message" if going else "result": {}})

    watched = _monitor(ranks, board, Watch(60.0, on_message=look))
    assert watched.ask_to_stop()
    ranks[0].say(message={})
    watched.until_done()
    assert (board.stop_requested, board.last_step) == (True, 7)


def test_who_answers_to_nobody_ends_without_a_word() -> None:
    reader, writer = os.pipe()
    pipe = AnswerPipe(writer)
    pipe.send({"result": 1})
    assert os.read(reader, 99) == b'{"result": 1}\n'
    os.close(reader)
    pipe.send({"result": 2})
    pipe.close()
