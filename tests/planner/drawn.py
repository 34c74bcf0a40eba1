"""Random candidates of a cost model: any cuts, widths, shares, devices and depths that a program may have."""

from __future__ import annotations

import random
from itertools import pairwise

from autopar.planner.candidate import Candidate, Placed
from autopar.planner.costs import CostModel
from autopar.schedules.route import even_shares


def shares_of(rng: random.Random, rows: int, replicas: int) -> tuple[int, ...]:
    """Even shares, or any positive ones."""
    if rng.random() < 0.5:
        return even_shares(rows, replicas)
    edges = [0, *sorted(rng.sample(range(1, rows), replicas - 1)), rows]
    return tuple(after - before for before, after in pairwise(edges))


def random_candidate(rng: random.Random, costs: CostModel) -> Candidate:
    """Return a candidate with non-increasing depths and devices in any order."""
    layers, devices = costs.layer_count, len(costs.devices)
    count = rng.randint(1, min(layers, devices))
    micro_batches = rng.choice([number for number in range(1, costs.batch + 1) if costs.batch % number == 0])
    rows = costs.batch // micro_batches
    cuts = [0, *sorted(rng.sample(range(1, layers), count - 1)), layers]
    widths = [1] * count
    while sum(widths) < devices and rng.random() < 0.7:
        index = rng.randrange(count)
        widths[index] = min(rows, widths[index] + 1)
    schedule = rng.choice(["gpipe", "1f1b"])
    depths = sorted((rng.randint(1, micro_batches) for _ in range(count)), reverse=True)
    order = list(range(devices))
    if rng.random() < 0.3:
        rng.shuffle(order)
    stages = []
    for index in range(count):
        mine, order = order[: widths[index]], order[widths[index] :]
        depth = depths[index] if schedule == "1f1b" else micro_batches
        stage = Placed(cuts[index], cuts[index + 1], tuple(mine), shares_of(rng, rows, widths[index]), depth)
        stages.append(_varied(rng, stage, rows, micro_batches))
    return Candidate(micro_batches, rows, schedule, tuple(stages))


def _varied(rng: random.Random, stage: Placed, rows: int, micro_batches: int) -> Placed:
    """Recompute some layers; let replicas shard something, or take turns with as much in flight among them."""
    chosen = [layer for layer in range(stage.first, stage.stop) if rng.random() < 0.2]
    stage = stage._replace(recompute=tuple(chosen))
    width = len(stage.devices)
    if width > 1:
        stage = stage._replace(shard=rng.choice(["none", "none", "optimizer", "gradients", "parameters"]))
        if width <= micro_batches and rng.random() < 0.3:
            turned = -(-stage.warmup // width)
            stage = stage._replace(division="round-robin", shares=(rows,) * width, warmup=turned)
    return stage
