"""The server that ranks are forked from, and each rank's loop: jobs, answers, and the end with who started them."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from autopar.errors import TrainingError
from autopar.ranks.fork_server import ForkServer, command_of
from autopar.ranks.pool import RankPool
from launched import alive, until
from pooled import process_ids
from strays import lay, marks

OF_RUNS = ["autopar.runtime.start.worker", "autopar.runtime.rehearsal.steps", "autopar.profiler.probe"]


def test_servers_share_what_was_imported_and_are_closed_while_they_start(capfd: pytest.CaptureFixture[str]) -> None:
    """At every moment between a start and the ranks' first answer."""
    with RankPool(3, imports=["jobs_for_ranks"]) as pool:
        found = pool.run("jobs_for_ranks:fresh_numbers")
        pipes = []
        for pid in process_ids(pool):
            files = [os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir() if each.name > "2"]
            pipes.append({each for each in files if each.startswith("pipe:")})
    assert len({str(each) for each in found}) == 3
    assert all(modules == found[0][0] for modules, *_ in found)  # type: ignore[index]
    # The end of the server's reports is shared by all.
    (shared,) = pipes[0] & pipes[1] & pipes[2]
    assert not (pipes[0] & pipes[1] | pipes[1] & pipes[2] | pipes[0] & pipes[2]) - {shared}
    for tenth in range(5):
        server = ForkServer(2, 1)
        time.sleep(tenth / 10)
        pids = [each for link in server.links if (each := link.process.pid)]
        server.close()
        assert not any(map(alive, pids))
    # Whoever watches a rank that is not there yet watches the server's imports.
    with patch.object(ForkServer, "look", return_value=True), closing(ForkServer(2, 1)) as server:
        assert [link.process.pid for link in server.links] == [server.pid] * 2
    said = "^the process that ranks are forked from ended by itself with exit code 1"
    with RankPool(2, imports=["no_such_module"]) as pool, pytest.raises(TrainingError, match=said):
        pool.run("jobs_for_ranks:add_up")
    assert "No module named 'no_such_module'" in capfd.readouterr().err


@pytest.mark.slow
def test_what_is_imported_keeps_no_thread_behind_a_fork_and_asks_for_no_gpu() -> None:
    """CUDA cannot be used behind a fork once it was asked how many GPUs there are."""
    script = (
        "import importlib, os, sys, torch\n"
        "def asked(*_, **__):\n"
        "    raise SystemExit('asked for a GPU')\n"
        "torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = asked\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "if os.fork():\n"
        "    sys.exit(os.wait()[1])\n"
        "print(len(os.listdir('/proc/self/task')))\n"
    )
    command = [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", script, *OF_RUNS]
    environment = {**os.environ, "OMP_NUM_THREADS": "4"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=100)
    assert (done.stdout, done.stderr) == ("1\n", "")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_ranks_end_with_a_server_that_is_killed_or_stopped(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.ranks.fork_server.END_S", 0.5)
    pool = RankPool(2)
    ranks = process_ids(pool)
    assert pool._server is not None
    os.kill(pool._server.pid, number)
    pool.close()
    until(lambda: not any(map(alive, ranks)))


def serve(jobs: list[dict[str, Any]], parent: int, folder: Path) -> tuple[int, list[dict[str, Any]], str]:
    """Run a rank's process until it has served the jobs; return its exit code, its answers and its standard output.

    Nothing in its working folder runs, whatever it is called.
    """
    lay(folder, sys.stdlib_module_names | {"autopar", "torch"})
    (read, write), (job_reader, job_writer), (reports_reader, reports) = os.pipe(), os.pipe(), os.pipe()
    ends = {"reports": reports, "jobs": [job_reader], "answers": [write]}
    settings = json.dumps({"parent": parent, "threads": 1, "imports": [], **ends})
    command = command_of("autopar.ranks.fork_server", settings)
    with os.fdopen(job_writer, "w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(job) + "\n" for job in jobs)
    inherited, given = [job_reader, write, reports], {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    options: dict[str, Any] = {"pass_fds": inherited, "env": given, "cwd": folder, "timeout": 60}
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert not marks(folder)
    for each in (*inherited, reports_reader):
        os.close(each)
    with os.fdopen(read, encoding="utf-8") as answers:
        return done.returncode, [json.loads(line) for line in answers], done.stdout


def job(folder: Path, number: int, target: str, **arguments: object) -> dict[str, Any]:
    places = {name: str(folder / f"{name}{number}") for name in ("board", "rendezvous")}
    common = {"rank": 0, "index": 0, "size": 1, "device": "cpu", "timeout_s": 10.0, "share_gpus": False}
    return {**places, **common, "target": target, "arguments": arguments}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends processes with their parents on Linux")
def test_jobs_are_answered_in_turn_whatever_becomes_of_the_ones_before(tmp_path: Path) -> None:
    targets = enumerate(f"jobs_for_ranks:{name}" for name in ("add_up", "misbehave", "no_such_function", "tell"))
    jobs = [job(tmp_path, number, target, rank=0, how="raise") for number, target in targets]
    code, answers, printed = serve(jobs, os.getpid(), tmp_path)
    assert (code, printed) == (0, "")
    ready, added, *failed = answers
    assert (ready, added) == ({"ready": True}, {"result": [0, 0.0]})
    assert failed[-2:] == [{"message": {"from": 0}}, {"result": [""]}]
    messages = [each["failure"]["message"] for each in failed[:-2]]
    # A failure in a job is said at once, and once more when the peers have been left.
    assert [message.split(":")[0] for message in messages] == ["ValueError", "ValueError", "AttributeError"]
    assert messages[0].startswith("ValueError: two lines of trouble (")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends processes with their parents on Linux")
def test_a_process_whose_parent_is_gone_before_it_began_serves_nothing(tmp_path: Path) -> None:
    code, answers, _ = serve([job(tmp_path, 0, "jobs_for_ranks:add_up")], os.getppid(), tmp_path)
    assert (code, answers) == (1, [])


FORKING = """
import os, sys, threading, torch
from autopar.ranks.fork_server import can_fork, forked_servers
from autopar.ranks.pool import RankPool
held = open(sys.argv[0])
with forked_servers():
    before = can_fork()
    with RankPool(2, imports=["jobs_for_ranks"]) as pool:
        server = pool._server._process
        pool.run("jobs_for_ranks:add_up")
        pids = list(pool._server.pids.values())
        files = [os.readlink(f"/proc/{pid}/fd/{each}") for pid in pids for each in os.listdir(f"/proc/{pid}/fd")]
        print(before, not hasattr(server, "args"), can_fork(), sys.argv[0] in files, *pids, flush=True)
        if "die" in sys.argv:
            os.kill(os.getpid(), 9)
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    print(can_fork(), server.wait(), flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="servers are forked on Linux")
@pytest.mark.parametrize("end", ["close", "die"])
def test_a_command_forks_its_server_which_has_nothing_of_it_and_ends_with_it(end: str, tmp_path: Path) -> None:
    script = tmp_path / "command.py"
    script.write_text(FORKING)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, str(script), end]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100, check=False)
    first, *rest = done.stdout.splitlines()
    *told, one, other = first.split()
    assert told == ["True", "True", "True", "False"], done.stderr
    until(lambda: not alive(int(one)) and not alive(int(other)))
    assert (done.returncode, rest) == ((0, ["False 0"]) if end == "close" else (-9, []))
