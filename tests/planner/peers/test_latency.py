"""DAPPLE's latency against cases worked by hand, its formulas in a plain loop, and the simulator."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from autopar.formats.cluster import Cluster, Device, Link
from autopar.formats.profile import Layer, Profile, Tensor
from autopar.planner.candidate import Candidate
from autopar.planner.costs.model import CostModel
from autopar.planner.options import PlanOptions
from autopar.planner.peers.dapple import latency_s, pivots
from autopar.planner.simulator.simulate import Simulator
from autopar.schedules.one_forward_one_backward import warmups
from oracles.exhaustive import everything
from priced import cost, profile_of


def _column(*values: float) -> np.ndarray:
    return np.array(values)[:, None]


def _loop(forward: list[float], backward: list[float], reduce: list[float], count: int) -> tuple[float, int]:
    """The formulas of the module's docstring, one pipeline at a time."""
    both = [one + other for one, other in zip(forward, backward, strict=True)]
    pivot = len(both) - 1
    for stage in range(len(both) - 2, -1, -1):
        if (count - 1) * both[stage] > (count - 1) * both[pivot] + sum(both[stage + 1 : pivot]):
            pivot = stage
    ending = max(
        reduce[s] + (sum(backward[s : pivot + 1]) if s <= pivot else -sum(backward[pivot + 1 : s]))
        for s in range(len(both))
    )
    return sum(forward[: pivot + 1]) + (count - 1) * both[pivot] + ending, pivot


@pytest.mark.parametrize(
    ("forward", "backward", "reduce", "count", "pivot", "seconds"),
    [
        # One stage: every micro-batch in turn, then the reduction.
        ((2.0,), (3.0,), (4.0,), 5, 0, 5 * 5 + 4),
        # The last stage is the slowest: F0 F1 | 3 (F1 + B1) | B1 B0.
        ((1.0, 2.0), (1.0, 4.0), (0.0, 0.0), 4, 1, 3 + 18 + 5),
        # The first is: F0 | 3 (F0 + B0) | B0.
        ((2.0, 1.0), (4.0, 1.0), (0.0, 0.0), 4, 0, 2 + 18 + 4),
        # The last stage's last backward ended when the pivot's began, so that its long reduction began there.
        ((2.0, 1.0), (4.0, 1.0), (0.0, 9.0), 4, 0, 2 + 18 + 9),
        # The first stage's reduction begins after everything else.
        ((1.0, 2.0), (1.0, 4.0), (7.0, 0.0), 4, 1, 3 + 18 + 5 + 7),
        # A link slower than both stages is the pivot.
        ((1.0, 3.0, 1.0), (1.0, 3.0, 1.0), (0.0, 0.0, 0.0), 4, 1, 4 + 18 + 4),
        # An earlier stage that is slower by less than what lies between does not become the pivot.
        ((1.1, 5.0, 1.0), (1.0, 0.0, 1.0), (0.0, 0.0, 0.0), 2, 1, 6.1 + 5 + 1),
    ],
)
def test_latencies_are_those_worked_by_hand(
    forward: tuple[float, ...],
    backward: tuple[float, ...],
    reduce: tuple[float, ...],
    count: int,
    pivot: int,
    seconds: float,
) -> None:
    assert pivots(_column(*forward), _column(*backward), count).tolist() == [pivot]
    assert latency_s(_column(*forward), _column(*backward), _column(*reduce), count).tolist() == [
        pytest.approx(seconds)
    ]


def test_many_pipelines_at_once_have_the_latencies_of_the_plain_loop() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        stages, count = rng.randint(1, 7), rng.randint(1, 9)
        tables = [
            [[rng.choice([0, rng.randint(1, 64)]) / 64 for _ in range(6)] for _ in range(stages)] for _ in range(3)
        ]
        found = latency_s(*map(np.array, tables), count)
        chosen = pivots(*map(np.array, tables[:2]), count)
        for column in range(6):
            seconds, pivot = _loop(*([row[column] for row in table] for table in tables), count)
            assert chosen[column] == pivot, f"seed {seed}"
            assert found[column] == pytest.approx(seconds), f"seed {seed}"


def test_equal_stages_take_the_closed_form() -> None:
    for stages in range(1, 6):
        for count in range(1, 6):
            ones = np.ones((stages, 1))
            assert latency_s(ones, 2 * ones, 0 * ones, count)[0] == 3 * (count + stages - 1)


def test_no_simulated_pipeline_takes_less_and_most_are_in_the_order_of_their_latencies() -> None:
    pairs = agreeing = compared = 0
    for seed in range(40):
        costs = CostModel(_chain(seed), _free_cluster(4), PlanOptions())
        simulator = Simulator(costs)
        options = PlanOptions(micro_batches=4, schedule="1f1b", recompute="none")
        timed = [
            (_estimate(costs, candidate), simulator.step_s(candidate))
            for candidate in everything(costs, options)
            if all(len(stage.devices) == 1 for stage in candidate.stages)
            and tuple(stage.warmup for stage in candidate.stages)
            in warmups(len(candidate.stages), 1, candidate.micro_batches).values()
        ]
        compared += len(timed)
        for index, (estimate, simulated) in enumerate(timed):
            assert estimate <= simulated * (1 + 1e-9), f"seed {seed}"
            for other_estimate, other_simulated in timed[:index]:
                if abs(estimate - other_estimate) > 0.1 * estimate:
                    pairs += 1
                    agreeing += (estimate < other_estimate) == (simulated < other_simulated)
    assert compared > 500
    assert pairs > 1000
    assert agreeing > 0.95 * pairs


def _estimate(costs: CostModel, candidate: Candidate) -> float:
    count, rows = candidate.micro_batches, candidate.micro_batch_size
    sums = costs.sums.forward(rows), costs.sums.backward(rows, costs.adding(count, 1))
    forward, backward = (
        np.array([[total[stage.stop] - total[stage.first]] for stage in candidate.stages]) for total in sums
    )
    return float(latency_s(forward, backward, np.zeros_like(forward), count)[0])


def _chain(seed: int) -> Profile:
    """Layers of random times, each of which reads what the one before makes."""
    rng = random.Random(seed)
    names = [f"layer.{index}" for index in range(rng.randint(2, 6))]
    times = [[cost(1, rng.random(), rng.random(), {}, 0, 4)] for _ in names]
    none = dict.fromkeys(("parameters_bytes", "trainable_bytes", "gradient_bytes", "optimizer_bytes"), 0)
    layers = [
        Layer(name=name, modules=(name,), **none, costs=tuple(costs)) for name, costs in zip(names, times, strict=True)
    ]
    tensors = [
        Tensor(name=f"after {made}", producer=made, consumers=(read,), bytes_per_sample=4, dtype="f32", gradient=True)
        for made, read in pairwise(names)
    ]
    return profile_of(layers, tensors, batch=4)


def _free_cluster(devices: int) -> Cluster:
    link = Link(level="node", latency_s=0.0, bytes_per_s=1e18)
    return Cluster(devices=(Device(type="cpu", memory_bytes=2**34),) * devices, links=(link,))
