"""PipeDream: the pipeline whose slowest stage is fastest, stages replicated where that helps.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019, section 3.1. With T_l the
forward and backward of layer l, a_l what it sends on, w_l its parameters, B_k the bandwidth at level k of the cluster,
whose components have m_(k-1) of the level below, and A^0(i -> j, m) = sum of T_l:

    T^k(i -> j, m) = 1/m max( A^(k-1)(i -> j, m_(k-1)),  2 (m - 1) sum of w_l / B_k )
    A^k(i -> j, m) = min( T^k(i -> j, m),
                          min over s, m' of max( A^k(i -> s, m - m'),  2 a_s / B_k,  T^k(s+1 -> j, m') ) )
    A^k(i -> j, 1) = A^(k-1)(i -> j, m_(k-1))

A is the time of the slowest stage per mini-batch of PipeDream's, which is a micro-batch here: its replicas take turns
and reduce their gradients after every one. What it chooses is then run synchronously.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autopar.formats.cluster import Level
from autopar.planner.costs.activations import between
from autopar.planner.peers.prices import Array, Indices, Prices, Proposal, in_cluster_order


class BestSplits(NamedTuple):
    """The best pipelines, each ``[components - 1, first, stop]``."""

    slowest_s: Array
    """A^k, infinite where there are no layers."""
    last: Indices
    """First layer of the last stage; the pipeline's own where it is a single stage."""
    width: Indices
    """Components of the last stage."""


def propose(prices: Prices) -> list[Proposal]:
    """Return PipeDream's plan for devices on one level, and for nodes of as many devices each the one by levels."""
    return [flat(prices), *([hierarchical(prices)] if prices.servers_alike else [])]


def work(prices: Prices) -> int:
    """Return how many array elements the proposals take."""
    positions, servers = prices.layer_count + 1, prices.servers
    total = positions**2 * prices.device_count**2
    if prices.servers_alike:
        total += positions**3 * len(servers[0]) ** 2 + positions**2 * len(servers) ** 2
    return 2 * total


def flat(prices: Prices) -> Proposal:
    """Return PipeDream's plan for all devices on one level, the slowest that connects them."""
    _, cuts, widths = zip(*_stages(flat_splits(prices), 0, prices.layer_count, prices.device_count), strict=True)
    return in_cluster_order(cuts, widths)


def hierarchical(prices: Prices) -> Proposal:
    """Return its plan for nodes with equal numbers of devices: pipelines within nodes, replicated and chained."""
    inner, outer = splits_by_level(prices)
    per_server = len(prices.servers[0])
    cuts: list[int] = []
    devices: list[tuple[int, ...]] = []
    taken = 0
    for start, end, count in _stages(outer, 0, prices.layer_count, len(prices.servers)):
        servers = prices.servers[taken : taken + count]
        taken += count
        used = 0
        for _, stop, width in _stages(inner, start, end, per_server):
            cuts.append(stop)
            devices.append(tuple(sorted(each for server in servers for each in server[used : used + width])))
            used += width
    return Proposal(tuple(cuts), tuple(devices))


def flat_splits(prices: Prices) -> BestSplits:
    """Return the best pipelines of all devices on one level."""
    return _solve(prices, _alone(prices), prices.outer, prices.device_count, whole=True)


def splits_by_level(prices: Prices) -> tuple[BestSplits, BestSplits]:
    """Return the best pipelines within a node, and of nodes."""
    inner = _solve(prices, _alone(prices), "node", len(prices.servers[0]), whole=False)
    return inner, _solve(prices, inner.slowest_s[-1], prices.outer, len(prices.servers), whole=True)


def _alone(prices: Prices) -> Array:
    """A^0: the seconds of layers ``[first, stop]`` on one device."""
    return between(np.concatenate(([0.0], np.cumsum(prices.layer_s))))


def _solve(prices: Prices, below: Array, level: Level, components: int, *, whole: bool) -> BestSplits:
    """Return the best pipelines on up to so many components; of ``whole`` models only those that begin with layer 0."""
    weights = prices.weights_bytes[None, :] - prices.weights_bytes[:, None]
    widths = np.arange(1, components + 1)
    # 2 (m - 1) w / B is m times the seconds of reducing w bytes among m, so that 1/m of it is those seconds.
    reduced = (prices.reduce_rate(width, level) * weights for width in widths.tolist())
    stages = np.stack([np.maximum(below / width, each) for width, each in zip(widths, reduced, strict=True)])
    stages[1:, prices.single[None, :] > prices.single[:, None]] = np.inf
    sent = 2 * prices.forth_s(level)
    firsts = np.arange(1 if whole else len(below))
    single = stages[:, firsts]
    best = BestSplits(single, np.empty(single.shape, np.int64), np.empty(single.shape, np.int64))
    best.last[:], best.width[:] = firsts[:, None], widths[:, None, None]
    for count in range(2, components + 1):
        for first in range(len(firsts)):
            ahead = np.maximum(best.slowest_s[count - 2 :: -1, first], sent)
            _improve(best, (count - 1, first), np.maximum(ahead[:, :, None], stages[: count - 1]))
    return best


def _improve(best: BestSplits, at: tuple[int, int], slowest_s: Array) -> None:
    """Take pipelines ``[width - 1, cut, stop]`` whose last stage begins at the cut, where they are better."""
    positions = slowest_s.shape[-1]
    every = slowest_s.reshape(-1, positions)
    chosen = every.argmin(axis=0)
    least = every[chosen, np.arange(positions)]
    better = least < best.slowest_s[at]
    best.slowest_s[at][better] = least[better]
    best.width[at][better] = chosen[better] // positions + 1
    best.last[at][better] = chosen[better] % positions


def _stages(best: BestSplits, first: int, stop: int, components: int) -> list[tuple[int, int, int]]:
    """Return the (first layer, stop, width) of the stages of the best pipeline of layers ``first:stop``."""
    stages: list[tuple[int, int, int]] = []
    while components:
        at = components - 1, first, stop
        last, width = int(best.last[at]), int(best.width[at])
        stages.insert(0, (last, stop, width))
        stop, components = last, components - width
    return stages
