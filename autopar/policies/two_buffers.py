"""PipeDream-2BW: all micro-batches of a mini-batch see the weights before the newest update of all, on every stage.

Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, section 3.1: W(t+1) = W(t) - rate x
gradient(W(t-1)). Mini-batch t sees max(0, t - 1) updates, with one stage, too; a stage keeps two versions. That the
weights which the first forward of a mini-batch is to see are there by then takes T >= K_0 - 1 micro-batches.

The update of mini-batch t may come any time before the first forward of mini-batch t + 2, which is T - K_s + 1
micro-batches behind its last backward. It comes as late: sums over replicas, and of norms and counts over all ranks,
end meanwhile, and nobody waits for them. Gradients of two mini-batches are kept.
"""

from __future__ import annotations

from autopar.policies.policy import OneVersion, StageDepths


class TwoBuffers(OneVersion):
    """See above."""

    sums_gradients = True

    def forward_version(self, stage: StageDepths, micro_batch: int) -> int:
        """See :class:`.policy.Policy`."""
        return micro_batch // stage.micro_batches - 1

    def lag(self, stage: StageDepths) -> int:
        """See :class:`.policy.Policy`."""
        return min(stage.micro_batches - stage.depth, stage.micro_batches - 2 + sum_lag(stage)) + 1

    def least_micro_batches(self, first_depth: int) -> int:
        """See :class:`.policy.Policy`."""
        return max(1, first_depth - 1)


def sum_lag(stage: StageDepths) -> int:
    """Return how many micro-batches behind its last backward a stage begins the sum over all ranks.

    That is when the first stage, whose last backward is the last of all, does: a micro-batch before its own update.
    Between stages, backwards of a micro-batch are half as many others apart as the stages' depths.

    >>> [sum_lag(StageDepths(depth, 4, 4)) for depth in (4, 3, 2, 1)]
    [0, 0, 1, 1]
    """
    own = max(0, stage.first_depth - stage.depth)
    return max(0, stage.micro_batches - stage.first_depth) + own // 2
