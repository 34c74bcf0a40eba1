"""Seconds: forwards, backwards and reductions of stages and links, of many pipelines at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autopar.planner.peers.groups import Groups, Positions
from autopar.planner.peers.prices import Array, Prices

NEVER_S = 1e9
"""Of replicas of a layer that may have one only; finite, so that differences of sums stay numbers."""


class Seconds(NamedTuple):
    """Of consecutive stages and links, each ``[stage, group of devices, cut]``."""

    forward_s: Array
    backward_s: Array
    reduce_s: Array


def chained(parts: Sequence[Seconds]) -> Seconds:
    """Return all stages and links in a row; groups and cuts are broadcast.

    >>> chained([Seconds(*np.ones((3, 1, 1, 1))), Seconds(*np.ones((3, 2, 4, 5)))]).forward_s.shape
    (3, 4, 5)
    """
    shape = np.broadcast_shapes(*(part.forward_s.shape[1:] for part in parts))
    joined = np.empty((3, sum(len(part.forward_s) for part in parts), *shape))
    at = 0
    for part in parts:
        for kind, values in enumerate(part):
            joined[kind, at : at + len(values)] = values
        at += len(part.forward_s)
    return Seconds(*joined)


class StageSeconds:
    """Prices of stages and links by width, level and cut."""

    def __init__(self, prices: Prices) -> None:
        widths = range(1, prices.device_count + 1)
        levels = ["node", prices.outer] if len(prices.servers) > 1 else [prices.outer]
        # Width 0 does not occur; its row makes widths indices.
        self._forward = np.stack([prices.forward_s(max(1, width)) for width in (0, *widths)])
        self._backward = np.stack([prices.backward_s(max(1, width)) for width in (0, *widths)])
        self._forth = np.stack([[prices.forth_s(level, max(1, width)) for width in (0, *widths)] for level in levels])
        self._back = np.stack([[prices.back_s(level, max(1, width)) for width in (0, *widths)] for level in levels])
        self._rates = np.array(
            [[prices.reduce_rate(max(1, width), level) for width in (0, *widths)] for level in levels]
        )
        self._weights, self._single = prices.weights_bytes, prices.single

    def stage(self, groups: Groups, first: Positions, stop: Positions) -> Seconds:
        """Return a stage of layers ``first:stop`` on every group."""
        widths = groups.widths
        forward = self._forward[widths, stop] - self._forward[widths, first]
        forward = forward + np.where(widths > 1, NEVER_S, 0.0) * (self._single[stop] > self._single[first])
        backward = self._backward[widths, stop] - self._backward[widths, first]
        reduce = self._rates[groups.levels, widths] * (self._weights[stop] - self._weights[first])
        return Seconds(forward[None], backward[None], reduce[None])

    def link(self, ahead: Groups, behind: Groups, cut: Positions) -> Seconds:
        """Return the links between groups at a cut; the finer of two divisions makes the messages."""
        at = ahead.levels_to(behind), np.maximum(ahead.widths, behind.widths), cut
        return Seconds(self._forth[at][None], self._back[at][None], np.zeros((1, 1, 1)))
