"""Where ranks listen while they train, and what they take from each other."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autopar.capture.export import capture
from autopar.capture.source import load
from autopar.formats.plan import Plan
from autopar.ranks.pool import RankPool
from autopar.runtime.start.workspace import Workspace
from dictated import dictate
from listening import descendants, listening_places
from paths import HARNESS
from script_jobs import described
from words_plans import copy_model, save_plan

LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """A plan of replicas and stages, in a working folder with its model."""
    copy_model(tmp_path)
    monkeypatch.chdir(tmp_path)
    plan = save_plan(tmp_path, [2, 1], cuts=[1])
    user = described()
    dictate(capture(user, user.build()), user, [2, 1], 2, 6).save(tmp_path / "script.json")
    return plan


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's tables of sockets")
@pytest.mark.parametrize("start", ["run", "torchrun", "a launcher", "a script"])
def test_ranks_of_one_host_listen_on_loopback_only(start: str, plan: Plan) -> None:
    python, long = [sys.executable, "-m"], ["--steps", "1000000", "--checkpoint", "saved", "--every", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # Where nothing else says so, Gloo listens where the host's name leads.
    environment.pop("GLOO_SOCKET_IFNAME", None)
    torchrun = [*python, "torch.distributed.run", "--nproc-per-node", "3", "--master-port", "29617"]
    commands = {
        "run": [[*python, "autopar", "run", *long]],
        "torchrun": [[*torchrun, "-m", "autopar", "worker", *long]],
        "a launcher": [[*python, "autopar", "worker", *long]] * 3,
        "a script": [[*torchrun, str(HARNESS / "endless_job.py"), "script.json"]],
    }[start]
    if start == "a launcher":
        environment |= {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29618"}
    own = [{"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"} if len(commands) > 1 else {} for rank in range(len(commands))]
    started = [
        subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**environment, **each})
        for command, each in zip(commands, own, strict=True)
    ]
    try:
        while not (Path("stepping").exists() or [*Path("saved").glob("step-*[0-9]")]):
            assert all(each.poll() is None for each in started)
            time.sleep(0.1)
        # The agent of torchrun listens, too, and where it likes.
        agents = {started[0].pid} if "torch.distributed.run" in commands[0] else set()
        every = set().union(*(descendants(each.pid) for each in started)) - agents
        places = {process: found for process in every if (found := listening_places(process))}
        assert len(places) == 3
        assert {address for each in places.values() for address, _ in each} <= LOOPBACK, places
    finally:
        for each in started:
            each.terminate()
        for each in started:
            each.wait(timeout=60)


@pytest.mark.reliability(21)
def test_ranks_train_without_unpickling_anything(plan: Plan, pool: RankPool, tmp_path: Path) -> None:
    model = load("words.py")
    plan = dictate(capture(model, model.build(0)), model, [2, 2], 2, 4, shard="parameters")
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    Workspace(workspace).prepare(model, plan, None)
    arguments = {"plan": plan.dumps(), "model": str(tmp_path / "words.py"), "workspace": str(workspace), "steps": 3}
    assert all(pool.run("rank_jobs:train_without_pickles", arguments, ranks=4))
