"""Supervision: what is said of ranks that fail, and the last actions of all; under launchers as under `autopar run`."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autopar import api
from autopar.errors import TrainingError
from autopar.formats.plan import Plan
from autopar.formats.report import BlackBox
from autopar.ranks.board import FINISHED, HISTORY, Board, Note
from autopar.runtime.checkpoint.folder import CheckpointFolder
from autopar.runtime.start.supervision import black_box_of, describe, slowness
from autopar.schedules.expand import expand
from words_plans import copy_model, save_plan

LAST = "`autopar show report.blackbox.json` shows the last actions of every rank"


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """A plan of two stages, in a working folder with its model."""
    copy_model(tmp_path)
    monkeypatch.chdir(tmp_path)
    return save_plan(tmp_path, [1, 1], cuts=[1])


def started(*arguments: str, agent: bool = True) -> subprocess.Popen[str]:
    """Start two ranks, by an agent or each by itself."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    start = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"]
    command = [sys.executable, *(start if agent else ["-m"]), "autopar", "--quiet", "worker", "plan.json", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True)


def lines(error: str) -> list[str]:
    return [line for line in error.splitlines() if line.startswith("autopar: ")]


def workers() -> list[int]:
    """Return the processes of workers, supervisors and ranks."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            arguments = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if b"--quiet\0worker\0plan.json" in arguments:
            found.append(int(entry.name))
    return found


def until(happens: object, seconds: float = 60.0) -> None:
    assert callable(happens)
    until_s = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def is_training(folder: Path) -> bool:
    """Whether a run has saved a checkpoint."""
    return (folder / "parts").is_dir() and bool(CheckpointFolder(folder / "parts").steps())


def test_the_last_actions_of_every_rank_are_kept_in_order(plan: Plan, tmp_path: Path) -> None:
    program = expand(plan)
    count = [len(program.ranks[rank]) for rank in (0, 1)]
    with Board(tmp_path / "board", 2) as board:
        for step in range(30):
            for position in range(count[0]):
                board.write_action(0, step, position)
        for position in range(3):
            board.write_action(1, 7, position)
        board.write(1, FINISHED)
        write = black_box_of(tmp_path / "box.json", program, (0, 1))
        assert write is not None
        assert write(board, TrainingError("why")) == f"`autopar show {tmp_path / 'box.json'}` " + LAST.split(" ", 3)[3]
    box = BlackBox.load(tmp_path / "box.json")
    first, second = box.ranks
    every = [(step, str(action)) for step in range(30) for action in program.ranks[0]]
    assert [(each.step, each.action) for each in first.actions] == every[-HISTORY:]
    assert [each.action for each in second.actions] == [str(program.ranks[1][position]) for position in range(3)]
    assert second.doing == "finishing"
    ages = [each.before_s for each in first.actions]
    assert ages == sorted(ages, reverse=True)
    shown = str(api.show(tmp_path / "box.json"))
    assert "why" in shown
    assert f"29 {program.ranks[0][count[0] - 1]}" in shown


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_actions_of_ranks_with_several_stages_have_the_stage_that_each_was_of(
    plan: Plan, tmp_path: Path, schedule: str
) -> None:
    program = expand(save_plan(tmp_path, [1, 1], schedule=schedule, chunks=2))
    with Board(tmp_path / "board", 2) as board:
        for rank in (0, 1):
            for position in range(len(program.ranks[rank])):
                board.write_action(rank, 0, position)
        write = black_box_of(tmp_path / "box.json", program, (0, 1))
        assert write is not None
        write(board, TrainingError("why"))
    for rank in BlackBox.load(tmp_path / "box.json").ranks:
        every = [str(action) for action in program.ranks[rank.rank]]
        assert [each.action for each in rank.actions] == every[-HISTORY:]
        assert len({each.action.split("@")[1][0] for each in rank.actions}) == 2
        assert rank.doing.endswith(every[-1])


def test_of_ranks_that_have_begun_nothing_nothing_is_written(plan: Plan, tmp_path: Path) -> None:
    write = black_box_of(tmp_path / "box.json", expand(plan), (0, 1))
    with Board(tmp_path / "board", 2) as board:
        assert write is not None
        assert not write(board, TrainingError("why"))
    assert not (tmp_path / "box.json").exists()
    assert black_box_of(None, expand(plan), (0, 1)) is None


def test_a_file_that_cannot_be_written_hides_no_failure(plan: Plan, tmp_path: Path) -> None:
    write = black_box_of(tmp_path / "none" / "box.json", expand(plan), (0, 1))
    with Board(tmp_path / "board", 2) as board:
        board.write_action(0, 0, 0)
        assert write is not None
        assert write(board, TrainingError("why")).startswith("the last actions of every rank are lost: cannot write ")


def test_notes_are_put_into_words(plan: Plan) -> None:
    program = expand(plan)
    words = describe(program)
    assert words(0, Note(0, 0, 0, 0.0)).text == "setting up"
    receiving = next(at for at, action in enumerate(program.ranks[1]) if action.kind == "R")
    assert words(1, Note(1, 4, receiving, 0.0)) == (f"stage 1, step 4, {program.ranks[1][receiving]}", True)


def test_slowness_is_computing_over_what_was_planned(plan: Plan) -> None:
    predicted = plan.predicted.model_copy(update={"forward_s": (1.0, 2.0), "backward_s": (2.0, 4.0)})
    actions = expand(plan).ranks[0]
    ratio = slowness(plan.model_copy(update={"predicted": predicted}), actions)
    planned = {"F": 1.0, "B": 2.0}
    times = [(0.0, 1.5 * planned.get(action.kind, 100.0)) for action in actions]
    assert ratio(times) == pytest.approx(1.5)
    unknown = plan.predicted.model_copy(update={"forward_s": (), "backward_s": ()})
    assert slowness(plan.model_copy(update={"predicted": unknown}), actions)(times) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("kill@1:4:B0", r"rank 1 \(stage 1, step 4, B0@1\) was killed by SIGKILL; the system may have .*"),
        ("exception@0:4:F1", r"rank 0 \(stage 0, step 4, F1@0\): RuntimeError: injected: exception@0:4:F1"),
        ("stop@1:4:B0", r"rank 1 \(stage 1, step 4, B0@1\) is stopped; the others waited 3 s for it"),
        ("segfault@0:4", r"rank 0 \(stage 0, step 4, F0@0\) was killed by SIGSEGV"),
    ],
)
@pytest.mark.reliability(1, 2, 6, 8)
def test_under_torchrun_one_line_says_what_failed(plan: Plan, tmp_path: Path, fault: str, said: str) -> None:
    running = started("--steps", "8", "--timeout", "3", "--inject-fault", fault)
    _, error = running.communicate(timeout=200)
    assert running.returncode
    (line,) = lines(error)
    assert re.fullmatch(rf"autopar: {said}; {re.escape(LAST)}", line)
    box = BlackBox.load(tmp_path / "report.blackbox.json")
    assert [rank.rank for rank in box.ranks] == [0, 1]
    assert all(rank.actions for rank in box.ranks)
    assert error.count("Fatal Python error: Segmentation fault") == ("segfault" in fault)
    assert not workers()


@pytest.mark.slow
def test_under_torchrun_a_run_that_is_told_to_end_ends_behind_its_step_and_saves(plan: Plan, tmp_path: Path) -> None:
    running = started("--steps", "100000", "--checkpoint", "parts", "--every", "100", "--report", "other.json")
    until(lambda: is_training(tmp_path), 150.0)
    running.send_signal(signal.SIGTERM)
    _, error = running.communicate(timeout=100)
    assert sum("ending behind this step" in line for line in lines(error)) == 2
    report = api.show(tmp_path / "other.json")
    step = CheckpointFolder(tmp_path / "parts").steps()[-1]
    assert f"was asked to end, and has trained {step} of 100000 steps" in str(report).replace("\n", " ")
    assert not workers()


@pytest.mark.slow
def test_hosts_end_behind_the_same_step_where_one_is_told_to(plan: Plan, tmp_path: Path) -> None:
    """Each rank is a host of its own, as far as it knows."""
    common = ("--steps", "100000", "--checkpoint", "parts", "--every", "100", "--report", "other.json")
    command = [sys.executable, "-m", "autopar", "--quiet", "worker", "plan.json", *common]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": "2"}
    place |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    hosts = [
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **place, "RANK": str(rank)})
        for rank in (0, 1)
    ]
    until(lambda: is_training(tmp_path), 150.0)
    hosts[1].send_signal(signal.SIGTERM)
    errors = [host.communicate(timeout=100)[1] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 143], errors
    step = CheckpointFolder(tmp_path / "parts").steps()[-1]
    report = str(api.show(tmp_path / "other.json")).replace("\n", " ")
    assert f"was asked to end, and has trained {step} of 100000 steps" in report
    assert not workers()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@pytest.mark.slow
@pytest.mark.reliability(29)
def test_workers_of_an_agent_that_is_killed_go_with_it(plan: Plan) -> None:
    running = started("--steps", "100000")
    # Two supervisors, two ranks, and the agent.
    until(lambda: len(workers()) >= 5)
    running.kill()
    running.wait()
    until(lambda: not workers(), 10.0)
    assert running.stderr is not None
    running.stderr.close()
