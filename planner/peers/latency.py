"""Latency: DAPPLE's estimate of a step, from the stage that is idle least.

Fan et al., "DAPPLE: A Pipelined Data Parallel Approach for Training Large Models", 2021, sections 4.1 and 4.3. A stage
s is one of the model's or the link between two, with forward F_s, backward B_s (of a link: its transfers) and reduction
AR_s (of a link: 0). With M micro-batches and the pivot stage Q:

    L  = Tw + Ts + Te
    Tw = sum of F_s for s <= Q                         until the pivot's first forward is done
    Ts = (M - 1) (F_Q + B_Q)                           the pivot's steady phase, without bubbles
    Te = max over s of AR_s + (sum of B_s .. B_Q for s <= Q, less the sum of B_(Q+1) .. B_(s-1) for s > Q)

Te counts from the start of the pivot's last backward to the end of every stage's reduction, which begins when the
stage's own last backward ends: behind the pivot, that is before the pivot's. The pivot is found from the last stage
on: s takes Q's place if (M - 1) (F_s + B_s) > (M - 1) (F_Q + B_Q) + sum of F + B of the stages between them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from autopar.planner.peers.prices import Array


def pivots(forward_s: Array, backward_s: Array, micro_batches: int) -> npt.NDArray[np.int64]:
    """Return the pivot stage of pipelines whose stages' seconds are ``[stage, pipeline]``.

    >>> pivots(np.array([[1.0], [3.0], [1.0]]), np.array([[1.0], [3.0], [1.0]]), 4)
    array([1])
    """
    both = forward_s + backward_s
    steady = (micro_batches - 1) * both
    before = np.concatenate((np.zeros((1, both.shape[1])), np.cumsum(both, axis=0)))
    pivot = np.full(both.shape[1], len(both) - 1)
    # What lies between s and Q is before[Q] - before[s + 1].
    least = steady[-1] + before[-2]
    for stage in range(len(both) - 2, -1, -1):
        takes = steady[stage] + before[stage + 1] > least
        pivot[takes] = stage
        least = np.where(takes, steady[stage] + before[stage], least)
    return pivot


def latency_s(forward_s: Array, backward_s: Array, reduce_s: Array, micro_batches: int) -> Array:
    """Return L of pipelines whose stages' seconds are ``[stage, pipeline]``.

    >>> one = np.ones((3, 1))
    >>> latency_s(one, one, 0 * one, 4)
    array([12.])
    """
    pivot = pivots(forward_s, backward_s, micro_batches)
    at = (pivot, np.arange(len(pivot)))
    back = np.cumsum(backward_s, axis=0)
    warmup_s = np.cumsum(forward_s, axis=0)[at]
    steady_s = (micro_batches - 1) * (forward_s + backward_s)[at]
    # Both cases of Te are the difference of two sums from the first stage on.
    ending_s = back[at] + (reduce_s - (back - backward_s)).max(axis=0)
    return np.asarray(warmup_s + steady_s + ending_s)
