"""Where ranks listen while they train, and what they take from each other."""

import sys
from pathlib import Path

import psutil
import pytest

from autopar.capture.layers.export import capture
from autopar.capture.model.source import load
from autopar.formats.plan import Plan
from autopar.options.train import RunOptions
from autopar.ranks.pool import RankPool
from autopar.runtime.checkpoint.training import Attempt
from autopar.runtime.start.worker import RunFacts, TrainTask
from autopar.runtime.start.workspace import Workspace
from dictated import dictate
from jobs_for_ranks import listening_places
from launched import launch, processes_in, until
from paths import HARNESS
from script_jobs import script_plan
from suite import warm
from words_plans import copy_model, save_plan

LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """A plan of replicas and stages, in a working folder with its model."""
    copy_model(tmp_path)
    monkeypatch.chdir(tmp_path)
    return save_plan(tmp_path, [2, 1], cuts=[1])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's tables of sockets")
@pytest.mark.parametrize("start", ["run", "a launcher", "a script"])
def test_ranks_of_one_host_listen_on_loopback_only(
    start: str, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where nothing else says so, Gloo listens where the host's name leads.
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    long = ["--steps", "1000000", "--checkpoint", "saved", "--every", "1"]
    if start == "run":
        started = [warm.Popen([sys.executable, "-m", "autopar", "run", *long], stdout=-1, stderr=-1)]
    else:
        script_plan([2, 1]).save(tmp_path / "script.json")
        script = [str(HARNESS / "endless_job.py"), "script.json"]
        started = launch(3, script if start == "a script" else ["-m", "autopar", "worker", *long], interface=None)
    try:
        until(lambda: Path("stepping").exists() or [*Path("saved").glob("step-*[0-9]")])
        every = [psutil.Process(each.pid) for each in started]
        every += [process for each in every for process in each.children(recursive=True)]
        places = {each.pid: found for each in every if (found := listening_places(each.pid))}
        assert len(places) == 3
        assert {address for each in places.values() for address, _ in each} <= LOOPBACK, places
    finally:
        for each in started:
            each.terminate()
        for each in started:
            each.communicate(timeout=200)
    until(lambda: not processes_in(tmp_path))


@pytest.mark.reliability(21)
def test_ranks_train_without_unpickling_anything(plan: Plan, pool: RankPool, tmp_path: Path) -> None:
    model = load("words.py")
    plan = dictate(capture(model, model.build(0)), model, [2, 2], 2, 4, shard="parameters")
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    Workspace(workspace).prepare(model, plan, None)
    facts = RunFacts(3, "", Attempt(""))
    task = TrainTask(plan.dumps(), None, str(tmp_path / "words.py"), workspace, RunOptions(3), facts, None)
    assert all(pool.run("rank_jobs:train_without_pickles", task.as_data(), ranks=4))
