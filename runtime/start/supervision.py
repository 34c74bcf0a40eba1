"""Supervision of a training run: what its ranks' notes mean, and what is said of them.

In come a plan, its program, and the board on which ranks note their actions. Out come an action in words, a line about
a rank that is slow, and the black box of a run that fails. Nothing here needs torch: the process that watches over a
rank has none.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from autopar.errors import AutoparError, printable
from autopar.formats.plan import Plan
from autopar.formats.program import BACKWARD, BACKWARDS, FORWARD, PULL, RECEIVES, REDUCTIONS, Program, RankProgram
from autopar.formats.report import BeganAction, BlackBox, RankActions
from autopar.progress import SaidNote, said_once
from autopar.ranks.board import FINISHED, STEPPING, Board, Note
from autopar.ranks.monitor import SLOW, Describe, Doing, Watch

_PLAN_AGAIN = "if no other work there is why, `autopar plan {} --gpus {}` plans without its device"


def describe(program: Program, plan: Plan) -> Describe:
    """Return what puts the last note of a rank that performs a plan's program into words."""

    def words(rank: int, note: Note) -> Doing:
        if note.phase != STEPPING:
            # A rank that has finished waits for all others before it saves anything.
            return Doing(*("finishing", True) if note.phase == FINISHED else ("setting up", note.waiting))
        action = program.ranks[rank][note.position]
        # In an update, and within layers, ranks may wait for sums.
        waiting = note.waiting or action.kind in (*RECEIVES, *REDUCTIONS, PULL)
        return Doing(f"{plan.place_of(action.stage)}, step {note.step}, {program.text_of(action)}", waiting)

    return words


def slowness(plan: Plan, actions: RankProgram) -> Callable[[Sequence[tuple[float, float]]], float]:
    """Return what makes of the times of a step's actions how many times as long as planned a rank computed.

    Counted are forwards and backwards, against the plan's times of its stages; 0 where the plan has none.
    """
    computing = [index for index, action in enumerate(actions) if action.kind in (FORWARD, *BACKWARDS)]
    planned_s = 0.0
    for action in (actions[index] for index in computing):
        seconds = plan.predicted.forward_s if action.kind == FORWARD else plan.predicted.backward_s
        # Halves of a backward share its time.
        halves = 1 if action.kind in (FORWARD, BACKWARD) else 2
        planned_s += seconds[action.stage] / halves if action.stage < len(seconds) else 0.0

    def ratio(times_s: Sequence[tuple[float, float]]) -> float:
        took_s = sum(times_s[index][1] - times_s[index][0] for index in computing)
        return took_s / planned_s if planned_s > 0 else 0.0

    return ratio


def _note(about: str, text: str) -> None:
    sys.stderr.write(f"autopar: {text}\n")


def say_slow(plan: Plan, program: Program, rank: int, ratio: float, others: float, note: SaidNote = _note) -> None:
    """Say that a rank has become slow, and how to plan without its device; or that it no longer is."""
    stage = program.ranks[rank][0].stage
    place = f"rank {rank} ({plan.place_of(stage)})"
    now = f"{place} computes {ratio:.2g} times as long as planned, the others {others:.2g} times"
    if ratio < SLOW * others:
        note(f"rank {rank} is slow no longer", f"{now}: it is slow no longer")
        return
    fewer = len(plan.devices) - 1
    profile = "profile.json" if plan.profile is None else plan.profile.path
    note(f"rank {rank} is slow", f"{now}; {_PLAN_AGAIN.format(profile, fewer)}")


def watch_of(
    plan: Plan,
    program: Callable[[], Program],
    ranks: Sequence[int],
    timeout_s: float,
    black_box: Path | None,
    remedy: Callable[[AutoparError], str | None] = lambda error: None,
) -> Watch:
    """Return how ranks are watched over.

    Args:
        plan: what is carried out.
        program: returns what they perform.
        ranks: of the host, as they were started.
        timeout_s: longest that a rank may stand still.
        black_box: file for the last actions of the ranks, if the run fails.
        remedy: returns what is to be typed where there is something of it.
    """

    def say(board: Board, error: AutoparError) -> str:
        written = "" if black_box is None else write_black_box(black_box, program(), plan, ranks, board, error)
        return "; ".join(filter(None, (written, remedy(error))))

    note = said_once(partial(_note, ""))
    return Watch(
        timeout_s,
        describe=lambda rank, note: describe(program(), plan)(rank, note),
        on_slow=lambda rank, ratio, others: say_slow(plan, program(), rank, ratio, others, note),
        on_failure=say,
    )


def write_black_box(
    path: Path, program: Program, plan: Plan, ranks: Sequence[int], board: Board, error: AutoparError
) -> str:
    """Write the last actions of ranks to a file, in place of those of an earlier failure; return where they are.

    ``ranks`` are those that a board has, as they were started.

    Where no rank has begun any there is nothing to write.
    """
    now_s, words, found = time.monotonic(), describe(program, plan), []
    for rank, started in sorted((board.placed(each), each) for each in ranks):
        actions = tuple(
            BeganAction(
                step=note.step,
                action=program.text_of(program.ranks[rank][note.position]),
                before_s=max(0.0, now_s - note.time_s),
            )
            for note in board.history(started)
        )
        found.append(RankActions(rank=rank, doing=words(rank, board.read(started)).text, actions=actions))
    if not any(each.actions for each in found):
        return ""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        BlackBox(message=printable(str(error)), date=date, ranks=tuple(found)).save(path)
    except AutoparError as reason:
        return f"the last actions of every rank are lost: {reason}"
    return f"`autopar show {path}` shows the last actions of every rank"
