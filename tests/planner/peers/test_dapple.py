"""DAPPLE's latency against cases worked by hand, and its planner against its recursion in plain dictionaries."""

from itertools import pairwise

import numpy as np
import pytest

from autopar.formats.cluster import Level
from autopar.planner.peers import dapple
from autopar.planner.peers.dapple import latency_s, pivots
from autopar.planner.peers.prices import Prices
from autopar.planner.pool import policy_choices
from priced import prices_of

Times = tuple[float, ...]
Stages = list[tuple[int, tuple[int, ...]]]
"""(end, devices of every node) of every stage."""


def _level(*groups: tuple[int, ...]) -> Level:
    return "node" if sum(any(counts) for counts in zip(*groups, strict=True)) < 2 else "network"


def _latency(prices: Prices, stages: Stages) -> float:
    """L of a plan, stage by stage and link by link."""
    rows: list[tuple[float, float, float]] = []
    first = 0
    for index, (stop, group) in enumerate(stages):
        width = sum(group)
        if index:
            before = stages[index - 1][1]
            level, finer = _level(before, group), max(width, sum(before))
            rows.append((prices.forth_s(level, finer)[first], prices.back_s(level, finer)[first], 0.0))
        forward, backward = prices.forward_s(width), prices.backward_s(width)
        weights = prices.weights_bytes[stop] - prices.weights_bytes[first]
        reduce = prices.reduce_rate(width, _level(group)) * weights
        rows.append((forward[stop] - forward[first], backward[stop] - backward[first], reduce))
        first = stop
    forward_s, backward_s, reduce_s = (np.array(column)[:, None] for column in zip(*rows, strict=True))
    return float(latency_s(forward_s, backward_s, reduce_s, prices.micro_batches)[0])


def _state(sizes: tuple[int, ...], free: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted(zip(sizes, free, strict=True)))


def _plain(prices: Prices, *, splits: int) -> float:
    """TPL by formula (5) with dictionaries, or all plans of at most two stages where ``splits`` is 1."""
    sizes = tuple(map(len, prices.servers))
    count = prices.layer_count
    best: dict[tuple[int, tuple[tuple[int, int], ...]], tuple[float, Stages, tuple[int, ...]]] = {}
    best[0, _state(sizes, sizes)] = (_latency(prices, [(count, sizes)]), [], sizes)
    for first in range(count - 1):
        for state in sorted(state for start, state in best if start == first):
            _, stages, free = best[first, state]
            if len(stages) == splits:
                continue
            for stop in range(first + 1, count):
                for width in range(1, min(prices.rows, sum(free) - 1) + 1):
                    for taken in policy_choices(free, sizes, width):
                        left = tuple(one - other for one, other in zip(free, taken, strict=True))
                        planned = [*stages, (stop, taken)]
                        latency = _latency(prices, [*planned, (count, left)])
                        key = stop, _state(sizes, left)
                        if key not in best or latency < best[key][0] * (1 - 1e-12):
                            best[key] = (latency, planned, left)
    placeable = [latency for latency, _, free in best.values() if sum(free) <= prices.rows]
    return min(placeable, default=float("inf"))


SIZES = ((1,), (2,), (4,), (2, 2), (3, 1), (2, 1, 2))


def test_the_planner_finds_what_its_recursion_finds() -> None:
    """No plan of one or two stages has less latency, and what is proposed has what was found, on every device once."""
    planned = 0
    for seed in range(90):
        prices = prices_of(seed, SIZES[seed % len(SIZES)])
        found = dapple.DappleSearch(prices).go()
        expected = _plain(prices, splits=99)
        assert (float("inf") if found is None else found.latency_s) == pytest.approx(expected, rel=1e-9)
        proposals = dapple.propose(prices)
        assert found is not None or not proposals
        if found is None:
            continue
        planned += 1
        assert found.latency_s <= _plain(prices, splits=1) * (1 + 1e-9), f"seed {seed}"
        for proposal in proposals:
            nodes = [[prices.costs.devices[device].node for device in group] for group in proposal.devices]
            groups = [tuple(each.count(node) for node in range(len(prices.servers))) for each in nodes]
            stages = list(zip(proposal.cuts, groups, strict=True))
            assert _latency(prices, stages) == pytest.approx(found.latency_s, rel=1e-9), f"seed {seed}"
            assert sorted(sum(proposal.devices, ())) == list(range(prices.device_count))
            assert all(stop > start for start, stop in pairwise((0, *proposal.cuts)))
    assert planned > 60


WORKED = [
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
]
"""Seconds of forwards, backwards and reductions, micro-batches; the pivot, and the latency."""


@pytest.mark.parametrize(("forward_s", "backward_s", "reduce_s", "count", "pivot", "seconds"), WORKED)
def test_latencies_are_those_worked_by_hand(
    forward_s: Times, backward_s: Times, reduce_s: Times, count: int, pivot: int, seconds: float
) -> None:
    columns = [np.array(each)[:, None] for each in (forward_s, backward_s, reduce_s)]
    assert pivots(*columns[:2], count).tolist() == [pivot]
    assert latency_s(*columns, count).tolist() == [pytest.approx(seconds)]
