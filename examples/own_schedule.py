"""A schedule of your own: kFkB, k forwards and k backwards in turn, drawn, and simulated over a slow network.

    python examples/own_schedule.py

A message then has the time of k computations to arrive, for k times the activations (Wang et al., "Ada-Grouper:
Accelerating Pipeline Parallelism in Preempted Network by Adaptive Group-Scheduling for Micro-Batches", 2023).
"""

import tempfile
from collections.abc import Iterator
from functools import partial

import autopar
from autopar.examples.own_costs import profile
from autopar.formats.program import BACKWARD, FORWARD
from autopar.schedules.expand import expand
from autopar.schedules.order import Computation, RankPlace
from autopar.schedules.timetable import draw


def kfkb(place: RankPlace, k: int) -> Iterator[Computation]:
    """Yield what one rank computes: what 1F1B does with a micro-batch is done with k, one after the other."""
    (stage,) = place.stages
    turns = [range(first, min(first + k, place.micro_batches)) for first in range(0, place.micro_batches, k)]
    ahead = place.groups - place.group
    for turn in turns[:ahead]:
        yield from ((FORWARD, stage, micro_batch) for micro_batch in turn)
    for turn, later in zip(turns, turns[ahead:] + [range(0)] * ahead, strict=False):
        yield from ((BACKWARD, stage, micro_batch) for micro_batch in turn)
        yield from ((FORWARD, stage, micro_batch) for micro_batch in later)


if __name__ == "__main__":
    print(draw(partial(kfkb, k=2), stages=3, micro_batches=6))
    cluster = autopar.Cluster.of("3x1xA100:2Gbps")
    for schedule in ("1f1b", "gpipe"):
        plan = autopar.plan(profile(), cluster, schedule=schedule, stages="0-1:1,2:1,3-4:1", micro_batches=16)
        depths = ", ".join(str(stage.warmup) for stage in plan.stages)
        print(f"{schedule}: {plan.timeline().end_s:.2f} s, with {depths} micro-batches in flight")
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        for k in (1, 2, 4):
            expand(plan, partial(kfkb, k=k)).save(file.name)
            print(f"{k}F{k}B: {autopar.simulate(plan, program=file.name).end_s:.2f} s")
