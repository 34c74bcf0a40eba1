"""Supervision: what is said of ranks that fail, and the last actions of all; under launchers as under `autopar run`."""

import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from autopar import api
from autopar.errors import TrainingError
from autopar.formats.plan import Plan
from autopar.formats.program import Action, Program, RankProgram
from autopar.formats.report import BlackBox
from autopar.ranks.board import FINISHED, HISTORY, Board, Note
from autopar.runtime.checkpoint.folder import CheckpointFolder
from autopar.runtime.start.supervision import describe, say_slow, slowness, watch_of, write_black_box
from autopar.schedules.expand import expand
from launched import ended, launch, processes_in, torchrun, until
from suite import warm
from words_plans import copy_model, save_plan

LAST = "`autopar show report.blackbox.json` shows the last actions of every rank"


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """A plan of two stages, in a working folder with its model."""
    copy_model(tmp_path)
    monkeypatch.chdir(tmp_path)
    return save_plan(tmp_path, [1, 1], cuts=[1])


def is_training(folder: Path) -> bool:
    """Whether a run has saved a checkpoint."""
    return (folder / "parts").is_dir() and bool(CheckpointFolder(folder / "parts").steps())


def filled(folder: Path, writes: Callable[[Board], object], name: str = "box.json") -> tuple[str, Path]:
    """Have a board written to, and the last actions of its ranks be kept; return what is said, and the file."""
    plan = Plan.load(folder / "plan.json")
    program, file = expand(plan), folder / name
    with Board(folder / "board", 2) as board:
        writes(board)
        write = partial(write_black_box, file, program, plan, (0, 1))
        assert write is not None
        return write(board, TrainingError("why")), file


def test_the_last_actions_of_every_rank_are_kept_in_order(plan: Plan, tmp_path: Path) -> None:
    program = expand(plan)
    count = [len(program.ranks[rank]) for rank in (0, 1)]

    def writes(board: Board) -> None:
        for step in range(30):
            for position in range(count[0]):
                board.write_action(0, step, position)
        for position in range(3):
            board.write_action(1, 7, position)
        board.write(1, FINISHED)

    said, file = filled(tmp_path, writes)
    assert said == f"`autopar show {file}` " + LAST.split(" ", 3)[3]
    first, second = BlackBox.load(file).ranks
    every = [(step, str(action)) for step in range(30) for action in program.ranks[0]]
    assert [(each.step, each.action) for each in first.actions] == every[-HISTORY:]
    assert [each.action for each in second.actions] == [str(program.ranks[1][position]) for position in range(3)]
    assert second.doing == "finishing"
    ages = [each.before_s for each in first.actions]
    assert ages == sorted(ages, reverse=True)
    shown = str(api.show(file))
    assert "why" in shown
    assert f"29 {program.ranks[0][count[0] - 1]}" in shown


def test_actions_are_those_of_what_ranks_have_become(plan: Plan, tmp_path: Path) -> None:
    program = expand(plan)

    def writes(board: Board) -> None:
        for started, rank in enumerate((1, 0)):
            board.place(started, rank)
            board.write_action(started, rank, rank)

    _, file = filled(tmp_path, writes)
    found = [
        (each.rank, each.doing, [(last.step, last.action) for last in each.actions])
        for each in BlackBox.load(file).ranks
    ]
    own = [str(program.ranks[rank][rank]) for rank in (0, 1)]
    assert found == [(rank, f"stage {rank}, step {rank}, {own[rank]}", [(rank, own[rank])]) for rank in (0, 1)]


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_actions_of_ranks_with_several_stages_have_the_stage_that_each_was_of(
    plan: Plan, tmp_path: Path, schedule: str
) -> None:
    program = expand(save_plan(tmp_path, [1, 1], schedule=schedule, chunks=2))
    _, file = filled(
        tmp_path,
        lambda board: [
            board.write_action(rank, 0, position) for rank in (0, 1) for position in range(len(program.ranks[rank]))
        ],
    )
    for rank in BlackBox.load(file).ranks:
        every = [str(action) for action in program.ranks[rank.rank]]
        assert [each.action for each in rank.actions] == every[-HISTORY:]
        assert len({each.action.split("@")[1][0] for each in rank.actions}) == 2
        assert rank.doing.endswith(every[-1])


def test_actions_are_put_into_words_and_unwritten_files_hide_no_failure(plan: Plan, tmp_path: Path) -> None:
    said, file = filled(tmp_path, lambda board: None)
    assert not said
    assert not file.exists()
    for name, why in (("none/box.json", "cannot write "), (".", f"{tmp_path} is not a regular file")):
        said, _ = filled(tmp_path, lambda board: board.write_action(0, 0, 0), name)
        assert said.startswith(f"the last actions of every rank are lost: {why}")
    program = expand(plan)
    words = describe(program, plan)
    assert words(0, Note(0, 0, 0, 0.0)).text == "setting up"
    receiving = next(at for at, action in enumerate(program.ranks[1]) if action.kind == "R")
    assert words(1, Note(1, 4, receiving, 0.0)) == (f"stage 1, step 4, {program.ranks[1][receiving]}", True)
    own = RankProgram.of(map(Action.parse, ("R0@0<1@1", "RG0@0<1@1", "A@0", "T0@0", "F0@0", "U@0")))
    waiting = [describe(Program((own,)), plan)(0, Note(1, 0, at, 0.0)).waiting for at in range(6)]
    assert waiting == [True] * 4 + [False] * 2
    # In an update, or within a layer, a rank may wait for sums.
    assert [describe(Program((own,)), plan)(0, Note(1, 0, at, 0.0, True)).waiting for at in (4, 5)] == [True] * 2
    assert words(0, Note(0, 0, 0, 0.0, True)) == ("setting up", True)
    predicted = plan.predicted.model_copy(update={"forward_s": (1.0, 2.0), "backward_s": (2.0, 4.0)})
    planned = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    halves = RankProgram.of(map(Action.parse, ("F0@0", "I0@0", "F1@0", "W0@0", "I1@0", "A@0", "W1@0")))
    for actions in (halves, expand(plan).ranks[0]):
        ratio = slowness(plan.model_copy(update={"predicted": predicted}), actions)
        times = [(0.0, 1.5 * planned.get(action.kind, 100.0)) for action in actions]
        assert ratio(times) == pytest.approx(1.5)
    unknown = plan.predicted.model_copy(update={"forward_s": (), "backward_s": ()})
    assert slowness(plan.model_copy(update={"predicted": unknown}), actions)(times) == 0.0


def test_a_slow_ranks_stage_is_named_and_slow_is_more_than_the_others_are(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = save_plan(tmp_path, [2, 1], cuts=[1])
    for others in (1.0, 2.5):
        say_slow(wide, expand(wide), 2, 3.0, others)
    first, second = capsys.readouterr().err.splitlines()
    assert re.match(
        r"autopar: rank 2 \(stage 1\) computes 3 times .*, the others 1 times; if .* --gpus 2` plans", first
    )
    assert second.endswith("the others 2.5 times: it is slow no longer")


def test_a_rank_that_is_slow_again_and_again_is_said_once_and_counted(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = save_plan(tmp_path, [2, 1], cuts=[1])
    watch = watch_of(wide, lambda: expand(wide), [0, 1, 2], 300.0, None)
    assert watch.on_slow is not None
    for turn in range(150):
        watch.on_slow(2, 3.0, 1.0)
        watch.on_slow(2, 3.0, 2.9 + turn / 1000)
    watch.on_slow(1, 3.0, 1.0)
    said = capsys.readouterr().err.splitlines()
    assert [re.findall(r"\((\d+) times by now\)", line) for line in said] == [
        [],
        [],
        ["10"],
        ["10"],
        ["100"],
        ["100"],
        [],
    ]
    assert [line.split()[2] for line in said] == ["2"] * 6 + ["1"]


WORKER = ["-m", "autopar", "--quiet", "worker", "plan.json"]


def lines(errors: str) -> list[str]:
    return [line for line in errors.splitlines() if line.startswith("autopar: ")]


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
def test_of_launched_ranks_one_line_says_what_failed(plan: Plan, tmp_path: Path, fault: str, said: str) -> None:
    found = ended(launch(2, [*WORKER, "--steps", "8", "--timeout", "3", "--inject-fault", fault]))
    assert all(code for code, _, _ in found)
    error = "".join(errors for _, _, errors in found)
    (line,) = lines(error)
    assert re.fullmatch(rf"autopar: {said}; {re.escape(LAST)}", line)
    box = BlackBox.load(tmp_path / "report.blackbox.json")
    assert [rank.rank for rank in box.ranks] == [0, 1]
    assert all(rank.actions for rank in box.ranks)
    assert error.count("Fatal Python error: Segmentation fault") == ("segfault" in fault)
    until(lambda: not processes_in(tmp_path))


@pytest.mark.slow
@pytest.mark.reliability(30)
def test_who_does_not_come_is_named_after_the_timeout(plan: Plan, tmp_path: Path) -> None:
    alone = launch(1, [*WORKER, "--steps", "8", "--timeout", "2"], WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    began_s = time.monotonic()
    ((code, _, error),) = ended(alone)
    assert code == 5
    (line,) = lines(error)
    assert re.match(r"autopar: rank 1 of 2 did not come to 127\.0\.0\.1:\d+ within 2 s; start a worker for each", line)
    assert time.monotonic() - began_s < 100.0
    until(lambda: not processes_in(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--stepz", "3"], 2, "No such option: --stepz"),
        (["--clip-norm", "-1"], 2, "--clip-norm must be"),
        (["--inject-fault", "kill@7:1"], 2, "the plan has 2 ranks, which count from 0"),
        (["--program", "none.json"], 4, "none.json: "),
    ],
)
@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.some(2)
def test_what_rank_0_refuses_before_it_meets_the_others_is_heard_by_them_at_once(
    words: list[str], code: int, said: str, hosts: int, plan: Plan, tmp_path: Path
) -> None:
    began_s = time.monotonic()
    found = ended(launch(2, [*WORKER, "--steps", "8"], hosts=hosts, of_rank_0=words))
    assert time.monotonic() - began_s < 100.0
    assert [each for each, _, _ in found] == [code, 5]
    (first,), (other,) = (lines(error) for _, _, error in found)
    assert said in first
    assert other.startswith("autopar: rank 0 refused: ")
    assert said in other
    until(lambda: not processes_in(tmp_path))


LONG = ["--steps", "100000", "--checkpoint", "parts", "--every", "100", "--report", "other.json"]


def ended_where_saved(folder: Path) -> str:
    """Hold a run that was told to end against the step that it has saved; return its report."""
    step = CheckpointFolder(folder / "parts").steps()[-1]
    report = " ".join(str(api.show(folder / "other.json")).split())
    assert f"was asked to end, and has trained {step} of 100000 steps" in report
    until(lambda: not processes_in(folder))
    return report


@pytest.mark.slow
@pytest.mark.reliability(27)
def test_under_torchrun_a_run_that_is_told_to_end_ends_behind_its_step_and_saves(plan: Plan, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    # The agent is forked; its workers are started.
    with warm.Popen(
        [*torchrun(2, is_warm=False), *WORKER, *LONG], stderr=-1, text=True, env=environment, start_new_session=True
    ) as running:
        until(lambda: is_training(tmp_path))
        running.send_signal(signal.SIGTERM)
        _, error = running.communicate(timeout=200)
    assert sum("ending behind this step" in line for line in lines(error)) == 2
    # The agent's port, which it opens everywhere.
    assert "of this host, at which the ranks met, is open on all interfaces" in ended_where_saved(tmp_path)


@pytest.mark.slow
@pytest.mark.reliability(27)
def test_hosts_end_behind_the_same_step_where_one_is_told_to(plan: Plan, tmp_path: Path) -> None:
    """Each rank is a host of its own, as far as it knows."""
    hosts = launch(2, [*WORKER, *LONG], hosts=2)
    until(lambda: is_training(tmp_path), running=hosts)
    hosts[1].send_signal(signal.SIGTERM)
    assert [code for code, _, _ in ended(hosts)] == [0, 143]
    ended_where_saved(tmp_path)
