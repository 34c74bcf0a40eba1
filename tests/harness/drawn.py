"""Random candidates of a cost model, of any cuts, widths, shares, devices and depths; and random shapes."""

import random
from itertools import pairwise

from autopar.ownership import Replicas, even_shares, meetings, shards_of
from autopar.planner.candidate import Candidate, CandidateStage, Shape
from autopar.planner.costs.durations import Durations
from autopar.planner.costs.model import CostModel

Flows = list[tuple[int, int, bool]]
"""(producer, consumer, whether a gradient returns)."""


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
        stage = CandidateStage(cuts[index], cuts[index + 1], tuple(mine), shares_of(rng, rows, widths[index]), depth)
        stages.append(_varied(rng, stage, rows, micro_batches))
    return Candidate(micro_batches, rows, schedule, tuple(stages))


def _varied(rng: random.Random, stage: CandidateStage, rows: int, micro_batches: int) -> CandidateStage:
    """Recompute some layers; let replicas shard something, or take turns with as much in flight among them."""
    chosen = [layer for layer in range(stage.first, stage.stop) if rng.random() < 0.2]
    stage = stage._replace(recompute=tuple(chosen))
    width = len(stage.devices)
    if width > 1:
        stage = stage._replace(shard=rng.choice(["none", "none", "optimizer", "gradients", "parameters"]))
        if width <= micro_batches and rng.random() < 0.3:
            turned = -(-stage.warmup // width)
            shard = stage.shard if stage.shard in shards_of("round-robin") else "optimizer"
            stage = stage._replace(division="round-robin", shares=(rows,) * width, warmup=turned, shard=shard)
    return stage


def long_candidate(seed: int, turns: float = 0.3, skips: float = 0.05) -> tuple[Candidate, Durations, Flows]:
    """Return a long candidate of any shape, with durations of any size; some take no time, some messages skip stages.

    Replicas of some stages take as long as their shares are large, those of others anything, and so do messages.
    """
    rng = random.Random(seed)
    micro_batches, rows = rng.randint(1, 24), rng.randint(2, 8)
    allowed, stages, first = micro_batches, [], 0
    for index in range(rng.randint(1, 24)):
        stages.append(_long_stage(rng, index, first, rows, micro_batches, allowed, turns))
        first += len(stages[-1].devices)
        allowed = min(allowed, stages[-1].in_flight)
    times = Durations(0.01)
    wild = rng.choice([0.0, 0.0, 1.0])
    for index, stage in enumerate(stages):
        base_s = [rng.choice([0.0, 1.0, 1.0]) * rng.lognormvariate(0.0, 1.0) for _ in range(4)]
        for share in stage.shares:
            times.stage.append(index)
            times.reduce_s.append(1.0)
            for column, each in zip((times.forward_s, times.backward_s, times.exposed_s), base_s, strict=False):
                column.append(each * (share + wild * rng.random()))
            times.update_s.append(base_s[3])
    flows = [
        (producer, consumer, rng.random() < 0.9)
        for producer in range(len(stages))
        for consumer in range(producer + 1, len(stages))
        if rng.random() < (0.9 if consumer == producer + 1 else skips)
    ]
    for producer, consumer, gradient in flows:
        base_s = [rng.lognormvariate(-2.0, 1.0), rng.lognormvariate(-2.0, 1.0)]
        for sender, receiver, samples in meetings(stages[producer], stages[consumer]):
            pair = stages[producer].devices[sender], stages[consumer].devices[receiver]
            for ends, each in list(zip((pair, pair[::-1]), base_s, strict=True))[: 1 + gradient]:
                times.message_s[ends] = each * (samples.rows + wild * rng.random())
                if samples.period > 1:
                    times.turns[ends] = samples.first, samples.period
    return Candidate(micro_batches, rows, "1f1b", tuple(stages)), times, flows


def _long_stage(
    rng: random.Random, index: int, first: int, rows: int, micro_batches: int, allowed: int, turns: float
) -> CandidateStage:
    """A stage that keeps no more in flight than the stage before."""
    width = rng.randint(1, min(4, rows))
    devices = tuple(range(first, first + width))
    in_flight = max(1, allowed - rng.choice([0, 0, 1, 2, 7]))
    if 1 < width <= min(micro_batches, in_flight) and rng.random() < turns:
        depth = min(in_flight // width, -(-micro_batches // width))
        return CandidateStage(index, index + 1, devices, (rows,) * width, depth, division="round-robin")
    return CandidateStage(index, index + 1, devices, shares_of(rng, rows, width), in_flight)


def random_shape(rng: random.Random, layers: int, devices: int) -> Shape:
    """Return any cuts and widths; replicas split micro-batches."""
    count = rng.randint(1, min(layers, devices))
    cuts = (*sorted(rng.sample(range(1, layers), count - 1)), layers)
    widths = [1] * count
    for _ in range(rng.randint(0, devices - count)):
        widths[rng.randrange(count)] += 1
    return Shape(cuts, tuple(map(Replicas, widths)))
