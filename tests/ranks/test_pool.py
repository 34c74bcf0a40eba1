"""Rank processes: they run jobs; when one goes wrong, the right one is named and none is left; freed pages stay."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from autopar.errors import FileError, TrainingError
from autopar.ranks.board import Note
from autopar.ranks.monitor import Doing, Watch
from autopar.ranks.pool import RankPool
from launched import alive, until
from pooled import process_ids, server_id
from suite import warm


@pytest.fixture
def pool() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


@pytest.mark.reliability(30)
def test_jobs_follow_each_other_on_the_same_processes_and_two_runs_do_not_meet(pool: RankPool) -> None:
    before = process_ids(pool)
    assert pool.run("jobs_for_ranks:add_up") == [[0, 1.0], [1, 1.0]]
    assert pool.run("jobs_for_ranks:add_up", ranks=1) == [[0, 0.0]]
    heard = []
    texts = pool.run("jobs_for_ranks:tell", watch=Watch(on_message=lambda rank, message: heard.append((rank, message))))
    assert texts == [["", "rank 1"]] * 2
    assert sorted(heard) == [(0, {"from": 0}), (1, {"from": 1})]
    assert process_ids(pool) == before
    with RankPool(2) as other, ThreadPoolExecutor(2) as threads:
        for _ in range(2):
            found = list(threads.map(lambda each: each.run("jobs_for_ranks:tell"), [pool, other]))
            assert found == [[["", "rank 1"]] * 2] * 2


@pytest.mark.parametrize(
    ("how", "error", "said"),
    [
        ("raise", TrainingError, r"^rank 1 \(step 7, action 3\): ValueError: two lines of trouble \(.*jobs_for_ranks"),
        ("file", FileError, r"^plan.json: \$.stages: no"),
        ("kill", TrainingError, r"^rank 1 \(step 7, action 3\) was killed by SIGKILL; .* may have run out of memory$"),
        ("stop", TrainingError, r"^rank 1 \(step 7, action 3\) is stopped"),
        ("exit", TrainingError, r"^rank 1 \(step 7, action 3\) ended by itself with exit code 3"),
        ("hang", TrainingError, r"^rank 1 \(step 7, action 3\) made no progress for 1 s"),
    ],
)
@pytest.mark.reliability(6, 9, 10, 14)
def test_a_rank_that_goes_wrong_is_named_and_none_is_left(pool: RankPool, how: str, error: type, said: str) -> None:
    processes = process_ids(pool)

    def describe(rank: int, note: Note) -> Doing:
        return Doing(f"step {note.step}, action {note.position}", note.waiting)

    with pytest.raises(error, match=said) as caught:
        pool.run("jobs_for_ranks:misbehave", {"rank": 1, "how": how}, watch=Watch(1.0, describe))
    assert pool.is_closed
    assert not any(map(alive, processes))
    # One traceback, of the rank that raised, for --debug.
    notes = getattr(caught.value, "__notes__", [])
    assert [note.count("Traceback") for note in notes] == ([1] if how in ("raise", "file") else [])


@pytest.mark.parametrize("started", [True, False])
@pytest.mark.reliability(14)
def test_a_killed_process_that_ranks_are_forked_from_is_named(started: bool) -> None:
    with RankPool(2) as pool:
        if started:
            process_ids(pool)
        assert pool._server is not None
        os.kill(server_id(pool), signal.SIGKILL)
        said = "^the process that ranks are forked from was killed by SIGKILL; .*, and all ranks with it$"
        with pytest.raises(TrainingError, match=said):
            pool.run("jobs_for_ranks:misbehave", {"rank": 1, "how": "hang"})


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's table of sockets")
def test_ranks_of_one_host_listen_on_loopback_only(pool: RankPool) -> None:
    for addresses in pool.run("jobs_for_ranks:listening"):
        assert isinstance(addresses, list)
        assert addresses
        assert set(addresses) <= {"127.0.0.1", "::1"}


@pytest.mark.reliability(8)
def test_crashes_say_where_and_processes_outlive_threads(capfd: pytest.CaptureFixture[str]) -> None:
    with RankPool(2) as pool, pytest.raises(TrainingError, match=r"^rank 1 \(.*\) was killed by SIGSEGV$"):
        pool.run("jobs_for_ranks:misbehave", {"rank": 1, "how": "segfault"})
    written = capfd.readouterr().err
    assert written.count("Fatal Python error: Segmentation fault") == 1
    assert re.search(r'jobs_for_ranks.py", line \d+ in misbehave', written)
    pools: list[RankPool] = []
    # Once a job has run, they have asked the kernel to end with who started them.
    thread = threading.Thread(target=lambda: [pools.append(RankPool(2)), pools[0].run("jobs_for_ranks:add_up")])
    thread.start()
    thread.join()
    while Path(f"/proc/self/task/{thread.native_id}").exists():
        os.sched_yield()
    with pools[0] as pool:
        assert pool.run("jobs_for_ranks:add_up") == [[0, 1.0], [1, 1.0]]


@pytest.mark.parametrize("told", ["many", "-1", "64"])
@pytest.mark.reliability(58)
def test_ranks_have_the_threads_asked_for_not_the_environment_s(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", told)
    with RankPool(1, threads=2) as pool:
        assert pool.run("jobs_for_ranks:threads") == [[2, 2]]


@pytest.mark.slow
def test_a_process_that_was_forked_starts_processes_too() -> None:
    script = (
        "import os\n"
        "from autopar.ranks.pool import RankPool\n"
        "RankPool(1).close()\n"
        "if not os.fork():\n"
        "    with RankPool(1) as pool:\n"
        "        os._exit(pool.run('jobs_for_ranks:add_up') != [[0, 0.0]])\n"
        "os._exit(os.waitstatus_to_exitcode(os.wait()[1]))\n"
    )
    done = warm.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit()"])
@pytest.mark.reliability(29)
def test_processes_end_with_their_parent_however_it_ends(end: str) -> None:
    script = (
        "import os, signal, sys, threading\n"
        "from autopar.ranks.pool import RankPool\n"
        "from pooled import process_ids\n"
        "pools = []\n"
        "ask = lambda: [pools.append(RankPool(2)), pools[0].run('jobs_for_ranks:add_up')]\n"
        "thread = threading.Thread(target=ask)\n"
        "thread.start()\n"
        "thread.join()\n"
        "print(*process_ids(pools[0]), flush=True)\n"
        f"{end}\n"
    )
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    processes = [int(word) for word in done.stdout.split()]
    assert len(processes) == 2
    until(lambda: not any(map(alive, processes)))


FAULTS = """
import resource, sys
from autopar.ranks.allocator import keep_pages, kept_pages
import torch

def taken():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.empty(16 * 2**20).fill_(1.0) for _ in range(3)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def faults():
    # The heap grows for a few steps, until all pieces fit into what was freed.
    return min([taken() for _ in range(6)][3:])

found = [faults()]
with kept_pages():
    found.append(faults())
found.append(faults())
keep_pages()
with kept_pages():
    pass
found.append(faults())
print(*found)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_pages_of_what_is_freed_are_kept_where_asked_for_and_nobody_has_said_how_to_allocate() -> None:
    (usual, kept, _, lasting), (left, left_kept, _, left_lasting) = (
        map(int, warm.run([sys.executable, "-c", FAULTS], env=each, capture_output=True, check=True).stdout.split())
        for each in ({}, {"MALLOC_ARENA_MAX": "4"})
    )
    # 192 MB in pieces of 64: 4 KiB a page, or 2 MiB where the kernel has huge ones.
    assert usual > 90
    # What is kept for good is kept behind a context, too.
    assert max(kept, lasting) < usual / 10
    assert min(left_kept, left_lasting) > left / 2
