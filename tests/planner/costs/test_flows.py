"""What travels between stages, and between their replicas, against counting tensor by tensor and row by row."""

from __future__ import annotations

import random

from autopar.planner import PlanOptions
from autopar.planner.costs.model import CostModel
from autopar.schedules.route import FixedStageShares, routes
from drawn import random_candidate, shares_of
from random_problems import random_cluster, random_profile


def test_exchanges_are_what_every_pair_of_stages_has_between_them() -> None:
    exchanged = 0
    for seed in range(150):
        profile = random_profile(seed, most_layers=12, skips=random.Random(seed).choice([0.0, 0.1, 0.4]))
        costs = CostModel(profile, random_cluster(seed, 6), PlanOptions(gpus=6))
        stages = random_candidate(random.Random(seed), costs).stages
        expected = []
        for producer, sending in enumerate(stages):
            for consumer in range(producer + 1, len(stages)):
                flow = costs.flows.between(sending.first, sending.stop, *stages[consumer][:2])
                if flow.tensors:
                    expected.append((producer, consumer, flow))
        assert costs.flows.exchanges([stage.stop for stage in stages]) == expected
        exchanged += len(expected)
    assert exchanged > 150


def test_routes_carry_every_row_of_a_micro_batch_from_its_sender_to_its_receiver() -> None:
    rng = random.Random(5)
    for _ in range(200):
        rows = rng.randint(1, 9)
        ends = []
        for _ in range(2):
            width = rng.randint(1, min(5, rows))
            turning = rng.random() < 0.4
            ends.append(
                FixedStageShares((rows,) * width, "round-robin")
                if turning
                else FixedStageShares(shares_of(rng, rows, width))
            )
        for micro_batch in range(8):
            owners = [_owners(end, rows, micro_batch) for end in ends]
            expected: dict[tuple[int, int], list[int]] = {}
            for row, pair in enumerate(zip(*owners, strict=True)):
                expected.setdefault(pair, []).append(row)
            found = {
                (route.sender, route.receiver): list(range(int(route.start), int(route.stop)))
                for route in routes(*ends)
                if route.carries(micro_batch)
            }
            assert found == expected


def _owners(stage: FixedStageShares, rows: int, micro_batch: int) -> list[int]:
    """The replica of every row."""
    if stage.division == "round-robin":
        return [micro_batch % len(stage.shares)] * rows
    return [replica for replica, share in enumerate(stage.shares) for _ in range(int(share))]
