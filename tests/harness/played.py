"""Small plans, and timelines made by playing their programs with given durations (a stand-in for the simulator)."""

from __future__ import annotations

import random

from autopar.formats.plan import Crossing, Plan, Stage, group_of, layout_of
from autopar.formats.prediction import Prediction
from autopar.formats.profile import ModelSource
from autopar.formats.program import (
    BACKWARD,
    FORWARD,
    INPUT_BACKWARD,
    RECEIVE,
    RECEIVE_GRADIENT,
    SEND,
    SEND_GRADIENT,
    WEIGHT_BACKWARD,
    Action,
)
from autopar.formats.timeline import Origin, Timeline
from autopar.schedules import SCHEDULES
from autopar.schedules.expand import expand
from autopar.schedules.route import even_shares

_SENT = {RECEIVE: SEND, RECEIVE_GRADIENT: SEND_GRADIENT}


def small_plan(widths: tuple[int, ...], micro_batches: int, schedule: str = "1f1b") -> Plan:
    """Return a plan of groups of the given widths, with stages of one layer each; a vee has two stages per group."""
    groups, layout = len(widths), layout_of(schedule)
    count = groups * (2 if layout == "vee" else 1)
    depths = next(iter(SCHEDULES[schedule].warmups(groups, count // groups, micro_batches).values()))
    held = [group_of(layout, stage, groups) for stage in range(count)]
    first = [sum(widths[:group]) for group in held]
    widths = tuple(widths[group] for group in held)
    stages = tuple(
        Stage(
            layers=(f"layer{stage}",),
            devices=tuple(range(first[stage], first[stage] + width)),
            shares=tuple(even_shares(8, width)),
            warmup=depths[stage],
        )
        for stage, width in enumerate(widths)
    )
    tensors = tuple(
        Crossing(name=f"t{i}", producer=i, consumers=(i + 1,), bytes_per_sample=64, dtype="float32", gradient=True)
        for i in range(len(widths) - 1)
    )
    return Plan.model_validate(
        {
            "model": ModelSource(source="model.py", sha256="0" * 64),
            "batch": 8 * micro_batches,
            "precision": "fp32",
            "schedule": schedule,
            "micro_batches": micro_batches,
            "micro_batch_size": 8,
            "stages": stages,
            "tensors": tensors,
            "predicted": Prediction(step_s=1.0, lower_bound_s=0.9, bubble=0.25, peak_bytes=(2**20,) * len(widths)),
        }
    )


def play(
    plan: Plan, origin: Origin = "simulated", jitter: float = 0.0, seed: int = 0, unit_s: float = 0.01
) -> Timeline:
    """Play a plan's program: a forward takes one unit, a backward two, everything else a fifth of one."""
    noise = random.Random(seed)
    timeline = Timeline(origin)
    programs = [list(rank) for rank in expand(plan).ranks]
    position, clock = [0] * len(programs), [0.0] * len(programs)
    arrival: dict[Action, float] = {}
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while position[rank] < len(program):
                action = program[position[rank]]
                length = {FORWARD: 1.0, BACKWARD: 2.0, INPUT_BACKWARD: 1.0, WEIGHT_BACKWARD: 1.0}.get(
                    action.kind, 0.2
                ) * unit_s
                length *= 1 + jitter * noise.random()
                start = clock[rank]
                if action.kind in _SENT:
                    back = (action.micro_batch, rank, action.stage)
                    sent = arrival.get(Action(_SENT[action.kind], action.peer_stage, *back))
                    if sent is None:
                        break
                    start, end = sent - length, sent
                    clock[rank] = max(clock[rank], sent)
                else:
                    end = start + length
                    if action.kind in _SENT.values():
                        arrival[action] = end
                    else:
                        clock[rank] = end
                timeline.add(rank, action, max(start, 0.0), max(end, 0.0))
                position[rank] += 1
                moved = True
    return timeline
