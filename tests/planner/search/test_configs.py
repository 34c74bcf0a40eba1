"""Ways to run a stage against all that there are: ranges, widths, lengths and queues leave none out."""

import random

import numpy as np

from autopar.ownership import DIVISIONS, Replicas, meetings
from autopar.planner import PlanOptions
from autopar.planner.candidate import Family, families
from autopar.planner.costs.model import CostModel
from autopar.planner.search.configs import FINE, Fineness, RecomputeRange, configs_of, lengths_of, queues
from random_problems import random_cluster, random_profile
from stage_shares import FixedStageShares


def test_ranges_lengths_and_widths_hold_every_number() -> None:
    for parts in range(1, 8):
        for layers in range(20):
            ranges = [RecomputeRange(at, parts).of(np.array([layers])) for at in range(parts + 1)]
            numbers = [number for low, high in ranges for number in range(int(low[0]), int(high[0]) + 1)]
            assert numbers == list(range(layers + 1))
    for longest in (1, 7, 24, 25, 100, 1000):
        found = lengths_of(longest, Fineness(lengths=20, growth=1.3))
        assert lengths_of(longest) == list(range(1, longest + 1))
        assert found[: min(longest, 20)] == list(range(1, min(longest, 20) + 1))
        for length in range(1, longest + 1):
            below = max(each for each in found if each <= length)
            assert below == length or (length > 20 and length <= 1.3 * below), f"{length} of {longest}"
    together = 0
    for seed in range(40):
        rng = random.Random(seed)
        devices = rng.randint(1, 24)
        options = PlanOptions(gpus=devices, shard="auto", divisible=seed % 5 == 0)
        costs = CostModel(random_profile(seed, batches=(6, 12, 24)), random_cluster(seed, devices), options)
        family = rng.choice(families(costs.batch, options))
        for most in (None, 1000, 3):
            fineness = None if most is None else FINE._replace(classes=most)
            ways = configs_of(costs, family, options, (0,), seed % 2 == 0, fineness)
            kinds = {(*way.replicas[1:], way.recompute): [] for way in ways}
            for way in ways:
                kinds[*way.replicas[1:], way.recompute].append(way)
            for (division, shard, *_), own in kinds.items():
                each = [width for way in own for width in range(way.replicas.width, way.widths[-1] + 1)]
                possible = family.micro_batch_size if division == "split" else family.micro_batches
                least, last = 1 + ((division, shard) != ("split", "none")), devices if costs.divisible else possible
                assert each == list(range(least, min(last, devices) + 1)), f"seed {seed}: {most}"
                for way in own if most == 1000 else ():
                    every = [way.replicas._replace(width=width) for width in way.widths]
                    rows = [max(costs.shares(family.micro_batch_size, replicas)) for replicas in every]
                    counts = [replicas.most(family.micro_batches) for replicas in every]
                    assert len(set(rows if division == "split" else counts)) == 1
                    together += len(way.widths) > 1
    assert together > 20


def test_no_next_stage_has_smaller_messages_or_emptier_queues_than_are_counted_on() -> None:
    tight = 0
    for rows in range(1, 7):
        for micro_batches in range(1, 7):
            family = Family(micro_batches, rows, "1f1b")
            for division in DIVISIONS:
                for width in range(1, (rows if division == "split" else micro_batches) + 1):
                    known = queues(family, Replicas(width, division), 5)
                    sender = FixedStageShares(Replicas(width, division).shares(rows), division)
                    least = []
                    for behind in DIVISIONS:
                        for other in range(1, min(5, rows if behind == "split" else micro_batches) + 1):
                            receiver = FixedStageShares(Replicas(other, behind).shares(rows), behind)
                            # Messages and rows of all queues that carry the last rows of micro-batches.
                            last = [each for _, _, each in meetings(sender, receiver) if each.stop == rows]
                            found = [(len(each.of(micro_batches)), each.rows) for each in last]
                            assert min(size for _, size in found) >= min(size for _, size in known)
                            fullest = [(c, r) for c, r in found for a, b in known if c >= a and r >= b]
                            assert fullest, f"{family} {division} {width}: {behind} {other}"
                            least.append(max(count * size for count, size in found))
                    tight += min(least) == min(count * size for count, size in known)
    assert tight > 100
