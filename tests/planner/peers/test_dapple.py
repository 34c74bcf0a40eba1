"""DAPPLE's planner against its recursion in plain dictionaries, and the enumeration of two-stage plans."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from autopar.formats.cluster import Level
from autopar.planner.peers import dapple
from autopar.planner.peers.dapple import latency_s
from autopar.planner.peers.prices import Prices
from autopar.planner.placement import choices
from priced import prices_of

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


def _less(free: tuple[int, ...], taken: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(one - other for one, other in zip(free, taken, strict=True))


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
                    for taken in choices(free, sizes, width):
                        left = _less(free, taken)
                        planned = [*stages, (stop, taken)]
                        latency = _latency(prices, [*planned, (count, left)])
                        key = stop, _state(sizes, left)
                        if key not in best or latency < best[key][0] * (1 - 1e-12):
                            best[key] = (latency, planned, left)
    placeable = [latency for latency, _, free in best.values() if sum(free) <= prices.rows]
    return min(placeable, default=float("inf"))


SIZES = ((1,), (2,), (4,), (2, 2), (3, 1), (2, 1, 2))


def test_the_planner_finds_what_its_recursion_finds() -> None:
    planned = 0
    for seed in range(120):
        prices = prices_of(seed, SIZES[seed % len(SIZES)])
        found = dapple.DappleSearch(prices).go()
        expected = _plain(prices, splits=99)
        assert (float("inf") if found is None else found.latency_s) == pytest.approx(expected, rel=1e-9)
        planned += found is not None
    assert planned > 80


def test_no_plan_of_one_or_two_stages_has_less_latency() -> None:
    for seed in range(120):
        prices = prices_of(seed, SIZES[seed % len(SIZES)])
        found = dapple.DappleSearch(prices).go()
        if found is not None:
            assert found.latency_s <= _plain(prices, splits=1) * (1 + 1e-9), f"seed {seed}"


def test_a_proposal_has_the_latency_that_was_found_and_uses_every_device_once() -> None:
    for seed in range(120):
        prices = prices_of(seed, SIZES[seed % len(SIZES)])
        found = dapple.DappleSearch(prices).go()
        for proposal in dapple.propose(prices):
            assert found is not None
            nodes = [[prices.costs.devices[device].node for device in group] for group in proposal.devices]
            groups = [tuple(each.count(node) for node in range(len(prices.servers))) for each in nodes]
            stages = list(zip(proposal.cuts, groups, strict=True))
            assert _latency(prices, stages) == pytest.approx(found.latency_s, rel=1e-9), f"seed {seed}"
            assert sorted(sum(proposal.devices, ())) == list(range(prices.device_count))
            assert all(stop > start for start, stop in pairwise((0, *proposal.cuts)))
