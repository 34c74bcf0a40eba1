"""Small plans, and runs of them without a simulator or ranks: timelines, and what ranks would bring back."""

import random
from collections import deque
from collections.abc import Callable
from typing import Any

from autopar.formats.plan import Plan
from autopar.formats.prediction import Prediction
from autopar.formats.program import Action
from autopar.formats.stage import layout_of
from autopar.formats.timeline import Origin, Timeline
from autopar.ownership import even_shares
from autopar.runtime.outcome import RankResult
from autopar.schedules import SCHEDULES
from autopar.schedules.expand import expand
from drawn_plans import chain, make

_SENT = {"R": "S", "RG": "SG"}
_UNITS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def small_plan(widths: tuple[int, ...], micro_batches: int, schedule: str = "1f1b", chunks: int = 1) -> Plan:
    """Return a plan of groups of the given widths, with stages of one layer each; a vee has two stages per group."""
    chunks = 2 if layout_of(schedule) == "vee" else chunks
    depths = next(iter(SCHEDULES[schedule].warmups(len(widths), chunks, micro_batches).values()))
    rows = max(8, *widths)
    plan = make(schedule, micro_batches, [even_shares(rows, width) for width in widths], depths, chain(len(depths)))
    predicted = Prediction(step_s=1.0, lower_bound_s=0.9, bubble=0.25, peak_bytes=(2**20,) * len(depths))
    return plan.model_copy(update={"predicted": predicted})


def play(plan: Plan, origin: Origin = "simulated", jitter: float = 0.0, unit_s: float = 0.01) -> Timeline:
    """Play a plan's program: a forward takes one unit, a backward two, everything else a fifth of one."""
    noise, timeline = random.Random(0), Timeline(origin)
    programs = [deque(rank) for rank in expand(plan).ranks]
    clock, arrival = [0.0] * len(programs), dict[Action, float]()
    left = 0
    while left != (left := sum(map(len, programs))):
        for rank, program in enumerate(programs):
            while program:
                action = program[0]
                length = _UNITS.get(action.kind, 0.2) * unit_s * (1 + jitter * noise.random())
                start = clock[rank]
                end = start + length
                if action.kind in _SENT:
                    back = (action.micro_batch, rank, action.stage)
                    sent = arrival.get(Action(_SENT[action.kind], action.peer_stage, *back))
                    if sent is None:
                        break
                    start, end = sent - length, sent
                    clock[rank] = max(clock[rank], sent)
                elif action.kind in _SENT.values():
                    arrival[action] = end
                else:
                    clock[rank] = end
                timeline.add(rank, action, max(start, 0.0), max(end, 0.0))
                program.popleft()
    return timeline


def timeline(origin: Origin, *rows: str) -> Timeline:
    """Return a timeline from rows of ``action start end``, one row per rank."""
    made = Timeline(origin)
    for rank, row in enumerate(rows):
        words = row.split()
        for text, start, end in zip(words[::3], words[1::3], words[2::3], strict=True):
            made.add(rank, Action.parse(text), float(start), float(end))
    return made


def plan_of(schedule: str, widths: tuple[int, ...], chunks: int = 1) -> Plan:
    """Return a small plan of four micro-batches, for whose stages other times are predicted than of a played one."""
    plan = small_plan(widths, 4, schedule, chunks)
    count = len(plan.stages)
    times = {"step_s": 10.0, "bubble": 0.0, "forward_s": (0.5,) * count, "backward_s": (2.0,) * count}
    predicted = plan.predicted.model_copy(update={**times, "peak_bytes": tuple(range(100, 100 + count))})
    return plan.model_copy(update={"predicted": predicted})


def results_of(plan: Plan, steps: int, length: Callable[[int, int, Action], float]) -> list[RankResult]:
    """Return what ranks would bring back that do one action after the other without waiting, a second between steps."""
    program, found = expand(plan), []
    for rank, actions in enumerate(program.ranks):
        stages, replica = plan.ownership.ranks[rank].stages, plan.ownership.ranks[rank].replica
        starts, ends, times, now = [], [], {}, 0.0
        for step in range(steps):
            starts.append(now)
            now, spans = now + 1.0, []
            for action in actions:
                spans.append((now, now + length(step, rank, action)))
                now = spans[-1][1]
            times[str(step)] = spans
            ends.append(now)
        own: dict[str, Any] = {"rank": rank, "stages": list(stages), "replica": replica, "samples": 16}
        own |= {"loss": [1.0] * steps, "count": [0.0] * steps, "terms": [{}] * steps}
        own |= {"starts_s": starts, "ends_s": ends, "times_s": times, "pauses_s": [0.0] * steps, "evaluations": {}}
        own |= {"host": 0, "loaders": 0, "loading_s": {step: [] for step in times}, "loading_work_s": [0.0] * steps}
        own |= {"gradient_norm": [None] * steps, "overflow": [False] * steps, "layers_s": {}, "forward_flops": 10**12}
        own |= {"backend": "gloo", "peak_bytes": 7, "peak_kind": "resident", "peak_flops_per_s": None}
        found.append(RankResult(**own, checkpoints=[], buffers_bytes=0, saved_files={}))
    return found
