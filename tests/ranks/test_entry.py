"""A rank's process: jobs come as lines, answers go as lines, and it ends with who started it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paths import HARNESS


def serve(jobs: list[dict[str, Any]], parent: int) -> tuple[int, list[dict[str, Any]], str]:
    """Run a rank's process until it has served the jobs; return its exit code, its answers and its standard output."""
    read, write = os.pipe()
    job_reader, job_writer = os.pipe()
    reports_reader, reports = os.pipe()
    ends = {"reports": reports, "jobs": [job_reader], "answers": [write]}
    settings = json.dumps({"parent": parent, "threads": 1, "imports": [], **ends})
    command = [sys.executable, "-m", "autopar.ranks.entry", settings]
    path = os.pathsep.join(filter(None, [str(HARNESS), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    with os.fdopen(job_writer, "w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(job) + "\n" for job in jobs)
    inherited = [job_reader, write, reports]
    done = subprocess.run(
        command, pass_fds=inherited, env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    for each in (*inherited, reports_reader):
        os.close(each)
    with os.fdopen(read, encoding="utf-8") as answers:
        return done.returncode, [json.loads(line) for line in answers], done.stdout


def job(folder: Path, number: int, target: str, **arguments: object) -> dict[str, Any]:
    return {
        "rank": 0,
        "size": 1,
        "board": str(folder / f"board{number}"),
        "target": target,
        "rendezvous": str(folder / f"rendezvous{number}"),
        "device": "cpu",
        "timeout_s": 10.0,
        "share_gpus": False,
        "arguments": arguments,
    }


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends processes with their parents on Linux")
def test_jobs_are_answered_in_turn_whatever_becomes_of_the_ones_before(tmp_path: Path) -> None:
    targets = ("add_up", "misbehave", "no_such_function", "tell")
    jobs = [
        job(tmp_path, number, f"jobs_for_ranks:{target}", rank=0, how="raise") for number, target in enumerate(targets)
    ]
    code, answers, printed = serve(jobs, os.getpid())
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
    code, answers, _ = serve([job(tmp_path, 0, "jobs_for_ranks:add_up")], os.getppid())
    assert (code, answers) == (1, [])
