"""PipeDream's dynamic program against the enumeration of all its pipelines, priced by its formulas."""

from collections import Counter
from collections.abc import Iterator
from itertools import combinations, pairwise

import pytest

from autopar.formats.cluster import Level
from autopar.planner.peers import pipedream
from autopar.planner.peers.prices import Prices
from priced import prices_of

Pipeline = list[tuple[int, int, int]]


def _pipelines(first: int, stop: int, components: int) -> Iterator[Pipeline]:
    """Every (first, stop, width) of stages that use all components."""
    for stages in range(1, min(stop - first, components) + 1):
        for cuts in combinations(range(first + 1, stop), stages - 1):
            for ends in combinations(range(1, components), stages - 1):
                widths = [end - start for start, end in pairwise((0, *ends, components))]
                spans = pairwise((first, *cuts, stop))
                yield [(start, end, width) for (start, end), width in zip(spans, widths, strict=True)]


def _bottleneck(prices: Prices, pipeline: Pipeline, level: Level, below: dict[tuple[int, int], float]) -> float:
    slowest = [2 * float(prices.forth_s(level)[stop]) for _, stop, _ in pipeline[:-1]]
    for first, stop, width in pipeline:
        weights = sum(layer.trainable_bytes for layer in prices.costs.profile.layers[first:stop])
        slowest.append(max(below[first, stop], width * prices.reduce_rate(width, level) * weights) / width)
    return max(slowest)


def _alone(prices: Prices) -> dict[tuple[int, int], float]:
    """The seconds of every span of layers on one device."""
    spans = combinations(range(prices.layer_count + 1), 2)
    return {(first, stop): float(prices.layer_s[first:stop].sum()) for first, stop in spans}


def test_plans_have_the_least_bottleneck_flat_and_by_levels() -> None:
    for seed in range(100):
        prices = prices_of(seed, (seed % 5 + 1,) if seed % 3 else (2, seed % 3 + 1))
        level = prices.costs.links.level(range(prices.device_count))
        below = _alone(prices)
        every = _pipelines(0, prices.layer_count, prices.device_count)
        least = min(_bottleneck(prices, pipeline, level, below) for pipeline in every)
        assert pipedream.flat_splits(prices).slowest_s[-1, 0, -1] == pytest.approx(least, rel=1e-9, abs=1e-15)
        proposal = pipedream.flat(prices)
        chosen = [*zip((0, *proposal.cuts[:-1]), proposal.cuts, map(len, proposal.devices), strict=True)]
        assert _bottleneck(prices, chosen, level, below) == pytest.approx(least, rel=1e-9, abs=1e-15), f"seed {seed}"
    assert [len(pipedream.propose(prices_of(1, sizes))) for sizes in ((4,), (2, 2), (3, 1), (1, 1))] == [1, 2, 1, 1]
    for seed in range(50):
        sizes = ((2, 2), (3, 3), (2, 2, 2))[seed % 3]
        prices = prices_of(seed, sizes)
        below = _alone(prices)
        inner = {
            span: min(_bottleneck(prices, pipeline, "node", below) for pipeline in _pipelines(*span, sizes[0]))
            for span in below
        }
        every = _pipelines(0, prices.layer_count, len(sizes))
        least = min(_bottleneck(prices, pipeline, "network", inner) for pipeline in every)
        assert pipedream.splits_by_level(prices)[1].slowest_s[-1, 0, -1] == pytest.approx(least, rel=1e-9, abs=1e-15)
        proposal = pipedream.hierarchical(prices)
        assert proposal.cuts[-1] == prices.layer_count
        assert sorted(device for group in proposal.devices for device in group) == list(range(prices.device_count))
        for group in proposal.devices:
            counts = Counter(prices.costs.devices[device].node for device in group)
            assert len(set(counts.values())) == 1, "a stage takes the same number of each of its nodes"
