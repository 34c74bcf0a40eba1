"""A rank that computes for longer than planned while others do not: it is said, with the ratio, while it lasts."""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import Mock

import pytest

from autopar.capture.export import capture
from autopar.capture.source import load
from autopar.formats.program import Fault
from autopar.ranks.board import Board
from autopar.ranks.monitor import RankMonitor, Watch
from autopar.ranks.pool import RankPool
from autopar.runtime.start.launch import RunOptions, run
from dictated import dictate
from paths import MODELS

FILE = str(MODELS / "words.py")


@pytest.mark.reliability(7)
def test_a_slow_rank_is_said_once_with_what_to_plan_and_when_it_ends(tmp_path: Path) -> None:
    said: list[tuple[int, float, float]] = []
    with Board(tmp_path / "board", 3) as board:
        links = {rank: Mock() for rank in range(3)}
        monitor = RankMonitor(links, board, Watch(5.0, on_slow=lambda *found: said.append(found)))
        for step in range(40):
            for rank in range(3):
                board.write_action(rank, step, 0)
                # One step is no sign; of several it is.
                slow = rank == 1 and (step == 3 or 10 <= step < 20)
                board.write_slowness(rank, 3.0 if slow else 1.1)
            monitor._check_slowness()
    assert said == [(1, 3.0, 1.1), (1, 1.1, 1.1)]


@pytest.mark.parametrize("ratios", [(2.0, 2.0, 2.1), (0.0, 3.0, 1.0), (1.0, 1.4, 1.0)])
def test_ranks_that_are_slow_alike_or_whose_plan_has_no_times_are_not_said(
    ratios: tuple[float, ...], tmp_path: Path
) -> None:
    said: list[tuple[int, float, float]] = []
    with Board(tmp_path / "board", 3) as board:
        monitor = RankMonitor(
            {rank: Mock() for rank in range(3)}, board, Watch(5.0, on_slow=lambda *found: said.append(found))
        )
        for step in range(20):
            for rank, ratio in enumerate(ratios):
                board.write_action(rank, step, 0)
                board.write_slowness(rank, ratio)
            monitor._check_slowness()
    assert not said


@pytest.mark.slow
@pytest.mark.reliability(7)
def test_a_rank_that_becomes_slow_is_said_of_a_run(pool: RankPool, capfd: pytest.CaptureFixture[str]) -> None:
    model = load(FILE)
    plan = dictate(capture(model, model.build(0)), model, [1, 1], 2, 4, cuts=[1])
    times = {"forward_s": (0.001, 0.001), "backward_s": (0.002, 0.002)}
    plan = plan.model_copy(update={"predicted": plan.predicted.model_copy(update=times)})
    run(plan, FILE, RunOptions(30, faults=(Fault.parse("slow@1:4"),)), pool=pool)
    lines = [line for line in capfd.readouterr().err.splitlines() if "times as long as planned" in line]
    (line,) = lines
    pattern = r"autopar: rank 1 \(stage 1\) computes [\d.e+]+ times as long as planned, the others [\d.]+ times; "
    assert re.fullmatch(
        pattern + "if no other work there is why, `autopar plan profile.json --gpus 1` plans without its device", line
    )
