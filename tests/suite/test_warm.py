"""Tests of warm: what is forked behaves as what is started, down to its end; and nothing outlives who asked for it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from suite import warm

SAYS = """
import os, sys
print(sys.argv, __name__, os.getcwd(), os.environ.get("WORD"), sys.path[:2], input(), flush=True)
print("to stderr", file=sys.stderr)
import atexit
atexit.register(print, "at the end")
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("form", ["-c", "a file", "-m"])
def test_a_command_sees_and_says_what_it_does_under_subprocess(form: str, tmp_path: Path) -> None:
    (tmp_path / "says.py").write_text(SAYS)
    start = {"-c": ["-c", SAYS], "a file": ["says.py"], "-m": ["-m", "says"]}[form]
    command = [sys.executable, *start, "3", "x"]
    environment = {**os.environ, "WORD": "w", "PYTHONPATH": "/nowhere"}
    options = {"cwd": tmp_path, "env": environment, "input": "typed\n", "capture_output": True, "text": True}
    forked, begun = warm.run(command, **options), subprocess.run(command, check=False, **options)  # type: ignore[call-overload]
    assert (forked.returncode, forked.stdout, forked.stderr) == (3, begun.stdout, begun.stderr)
    assert forked.stdout.endswith("at the end\n")


def test_processes_know_nothing_of_each_other_and_end_by_signals() -> None:
    says = "import sys, torch; print('autopar.cli' in sys.modules, torch.initial_seed(), end=' ')"
    command = [sys.executable, "-c", says]
    changed = [sys.executable, "-c", "import os, torch; torch.manual_seed(1); os.environ['WORD'] = '1'"]
    first = warm.run(command, capture_output=True, text=True).stdout
    warm.run(changed, check=True)
    assert first == warm.run(command, capture_output=True, text=True).stdout
    assert first.startswith("True ")
    with pytest.raises(subprocess.CalledProcessError) as raised:
        warm.run([sys.executable, "-c", "1 / 0"], capture_output=True, text=True, check=True)
    assert raised.value.returncode == 1
    assert raised.value.stderr.endswith("ZeroDivisionError: division by zero\n")
    command = [sys.executable, "-c", "import signal; print('there', flush=True); signal.pause()"]
    with warm.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        assert os.getpgid(process.pid) == process.pid
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait() == process.poll() == -signal.SIGTERM


RANKS = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from autopar.ranks.pool import RankPool
pool = RankPool(2)
print(*pool.run("jobs_for_ranks:add_up"), *[link.process.pid for link in pool._server.links], flush=True)
time.sleep(600)
"""


def test_ranks_of_a_command_compute_and_end_with_it_whatever_ends_it() -> None:
    harness = str(warm.TESTS / "harness")
    command, environment = [sys.executable, "-c", RANKS, harness], {**os.environ, "PYTHONPATH": harness}
    with warm.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        *sums, first, second = process.stdout.readline().rsplit(maxsplit=2)
        ranks = [psutil.Process(int(each)) for each in (first, second)]
        assert sums == ["[0, 1.0] [1, 1.0]"]
        assert all(each.is_running() for each in ranks)
        process.kill()
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive
