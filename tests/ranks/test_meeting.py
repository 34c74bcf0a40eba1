"""Ranks that a launcher started: who did not come, and what sets hosts apart, is said on all of them.

Who may connect to ranks, once they are connected.
"""

import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from autopar.errors import AutoparError, FileError, TrainingError, UsageError
from autopar.ranks import meeting
from autopar.ranks.board import Board
from autopar.ranks.device import FoundDevice
from autopar.ranks.environment import LaunchedRank
from autopar.ranks.failure import SaidElsewhereError
from autopar.ranks.meeting import Arrival, disagreement, late_connections_dropped, listens_everywhere, meet, refuse
from autopar.ranks.pool import RankPool
from launched import free_port


def ranks_of(size: int, address: str = "127.0.0.1") -> list[LaunchedRank]:
    port = free_port()
    return [LaunchedRank(rank, size, rank, size, address, port, "torchrun") for rank in range(size)]


def meetings(ranks: list[LaunchedRank], files: list[dict[str, str]], timeout_s: float) -> list[AutoparError | None]:
    stores = []  # Kept, as by a process group: rank 0's store serves the others.

    def one(rank: LaunchedRank, brought: dict[str, str]) -> AutoparError | None:
        try:
            return stores.append(meet(rank, brought, timeout_s))
        except AutoparError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(one, ranks, files))


def test_all_meet_on_loopback_and_other_plans_and_versions_are_refused() -> None:
    assert meetings(ranks_of(3, "a-name-of-no-host"), [{"plan": "1"}] * 3, 60.0) == [None] * 3
    found = meetings(ranks_of(3), [{"plan": "aa"}, {"plan": "bb"}, {"plan": "aa"}], 60.0)
    assert isinstance(found[0], FileError)
    assert "the plan is not the same on all hosts, by SHA-256: aa on ranks 0, 2 (" in str(found[0])
    assert ", bb on rank 1 (" in str(found[0])
    assert [error.exit_code for error in found if error is not None] == [4, 4, 4]

    def arrivals(*places: tuple[str, int], torch: str = "2") -> list[Arrival]:
        known = [Arrival(host, local_rank, 2, {"torch": "2"}, {}) for host, local_rank in places]
        return [*known[:-1], known[-1]._replace(versions={"torch": torch})]

    assert disagreement(arrivals(("a", 0), ("a", 1), ("b", 0), ("b", 1))) is None
    dealt = disagreement(arrivals(("a", 0), ("b", 0), ("a", 1), ("b", 1)))
    other = disagreement(arrivals(("a", 0), ("a", 1), ("b", 0), ("b", 1), torch="3"))
    assert [type(each) for each in (dealt, other)] == [UsageError] * 2
    assert "rank 0 is number 0 of 2 on a, but the ranks of a host must follow each other" in str(dealt)
    assert "different versions of torch: 2 on ranks 0, 1, 2 (a, b), 3 on rank 3 (b)" in str(other)


def test_all_are_told_what_each_becomes_by_what_it_has_or_that_there_is_no_such_placement() -> None:
    def placements(place: Callable[[Sequence[Arrival]], Sequence[int]]) -> list[object]:
        ranks, stores = ranks_of(3), []

        def one(rank: LaunchedRank) -> object:
            try:
                met = meet(rank, {}, 60.0, None, FoundDevice("cuda", "ABC"[rank.rank], 2**40), place)
            except AutoparError as error:
                return error
            stores.append(met.store)
            return met.placement

        with ThreadPoolExecutor(3) as threads:
            return list(threads.map(one, ranks))

    def refuse(arrivals: Sequence[Arrival]) -> Sequence[int]:
        raise UsageError(f"no place for {[(each.local_rank, *each.device) for each in arrivals]}")

    found = placements(lambda arrivals: ["BCA".index(each.device.name) for each in arrivals])
    assert found == [(2, 0, 1)] * 3
    first, *others = placements(refuse)
    assert str(first) == f"no place for {[(at, 'cuda', name, 2**40) for at, name in enumerate('ABC')]}"
    assert [type(each) for each in others] == [SaidElsewhereError] * 2


@pytest.mark.reliability(30)
def test_ranks_that_never_come_or_whose_port_is_taken_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = ranks_of(1)[0]
    with socket.create_server(("127.0.0.1", rank.port)), pytest.raises(TrainingError, match=f"127.0.0.1:{rank.port}"):
        meet(rank, {}, 1.0)
    found = meetings(ranks_of(4)[:2], [{}] * 2, 1.0)
    assert isinstance(found[0], TrainingError)
    assert "ranks 2, 3 of 4 did not come to 127.0.0.1:" in str(found[0])
    assert isinstance(found[1], SaidElsewhereError)
    assert found[1].exit_code == 5
    monkeypatch.setattr(meeting, "PATIENCE_S", 0.2)
    first, alone = ranks_of(3)[0], ranks_of(3)[2]
    assert isinstance(meetings([first], [{}], 0.5)[0], TrainingError)
    assert capsys.readouterr().err == f"rank 0: waiting at 127.0.0.1:{first.port} for ranks 1, 2 of 3\n"
    assert isinstance(meetings([alone], [{}], 0.5)[0], TrainingError)
    assert f"rank 2: waiting for rank 0 at 127.0.0.1:{alone.port}\n" in capsys.readouterr().err


def test_who_is_not_there_or_refuses_is_named_and_hosts_without_a_name_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    for address, said in (
        ("no-such-host.invalid", "the host no-such-host.invalid, where rank 0 is to be, is not known here"),
        ("127.0.0.1", "nobody listens there, where rank 0 is to be"),
    ):
        launch = LaunchedRank(2, 4, 0, 2, address, port, "torchrun")
        began_s = time.monotonic()
        with pytest.raises(TrainingError, match=f"rank 2 could not join the others at {address}:{port}: {said}"):
            meet(launch, {}, 1.0)
        assert time.monotonic() - began_s < 30.0
        at_once = [line for line in capsys.readouterr().err.splitlines() if line.startswith("autopar: ")]
        assert len(at_once) == ("no-such" in address)
        assert all(line.startswith(f"autopar: rank 2: {said}") for line in at_once)


def test_ranks_that_nobody_hears_of_are_waited_for_as_long_as_one_of_the_host_works(tmp_path: Path) -> None:
    first, second, _ = ranks_of(3)
    with Board(tmp_path / "board", 3) as board, ThreadPoolExecutor(2) as threads:
        began_s = time.monotonic()
        found = [threads.submit(meet, rank, {}, 1.0, board) for rank in (first, second)]
        while time.monotonic() < began_s + 3.0:
            board.write_work(2)
            time.sleep(0.02)
        assert not any(each.done() for each in found)
        assert "rank 2 of 3 did not come" in str(found[0].exception(30.0))


@pytest.mark.parametrize("refusing", [0, 1, 2])
def test_a_rank_that_refuses_comes_to_say_so_and_the_others_hear_it_at_once(refusing: int) -> None:
    ranks, began_s = ranks_of(3), time.monotonic()
    why = FileError("none.json: no such file")

    def one(rank: LaunchedRank) -> AutoparError | None:
        if rank.rank == refusing:
            refuse(rank, why)
            return None
        return meetings([rank], [{}], 600.0)[0]

    with ThreadPoolExecutor(3) as threads:
        found = dict(enumerate(threads.map(one, ranks)))
    assert time.monotonic() - began_s < 60.0
    assert found.pop(refusing) is None
    assert [str(each) for each in found.values()] == [f"rank {refusing} refused: none.json: no such file"] * 2
    assert [type(each) for each in found.values()] == [TrainingError] * 2


def test_ranks_that_all_refuse_or_that_nobody_meets_end_soon() -> None:
    began_s = time.monotonic()
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(lambda rank: refuse(rank, UsageError(f"{rank}")), ranks_of(3))) == [None] * 3
    for rank in ranks_of(2):
        refuse(rank, UsageError("alone"), 0.5)
    assert time.monotonic() - began_s < 30.0
    refuse(ranks_of(1)[0], UsageError("the only one"))


@pytest.mark.slow
def test_a_listener_that_answers_nothing_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        launch = LaunchedRank(1, 2, 1, 2, "127.0.0.1", port, "torchrun")
        with pytest.raises(TrainingError, match=rf"rank 1 .* 127.0.0.1:{port}: what listens there has not answered"):
            meet(launch, {}, 1.0)


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's tables of sockets")


def connects(server: socket.socket) -> bool:
    with suppress(TimeoutError):
        socket.create_connection(server.getsockname(), timeout=0.2).close()
        return True
    return False


def test_nobody_connects_to_listeners_but_ranks_also_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with RankPool(3) as pool:
        for found in pool.run("jobs_for_ranks:listen_to_strangers"):
            # The default group and two others; one is made after strangers have come.
            assert found == {"listeners": 3, "connected": 0, "descriptors": 0, "sums": [3.0] * 4}
    with socket.create_server(("127.0.0.1", 0)) as before:
        with late_connections_dropped():
            new = socket.create_server(("127.0.0.1", 0))
        with new, socket.create_server(("127.0.0.1", 0)) as after:
            found = [connects(each) for each in (before, new, after)]
    assert found == [True, False, True]
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    with late_connections_dropped():
        new = socket.create_server(("127.0.0.1", 0))
    with new:
        assert connects(new)


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_who_listens_on_all_interfaces_is_found(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as server:
        assert listens_everywhere(server.getsockname()[1]) is (address in ("0.0.0.0", "::"))
