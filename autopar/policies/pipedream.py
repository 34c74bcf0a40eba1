"""PipeDream's policies: weight stashing, vertical sync, and the two buffers of PipeDream-2BW.

Of all three, a backward sees the version that its forward has seen.
"""

from __future__ import annotations

from autopar.policies.policy import OneVersion, StageDepths


class Stash(OneVersion):
    """Weight stashing: a micro-batch sees the weights that were the newest when it came.

    Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, section 3.3. With K_s
    micro-batches in flight and T of them between updates, micro-batch m sees max(0, floor((m - K_s + 1) / T)) updates;
    a stage keeps 1 + ceil((K_s - 1) / T) versions. Stages see different versions.

    Where n replicas take whole mini-batches in turn (T = 1), there is an update for every n of them, by the mean of
    their gradients: mini-batch m sees max(0, floor(m / n) - K_s + 1) updates.
    """

    takes_turns = True


class VerticalSync(OneVersion):
    """Vertical sync: all stages see the version that the first stage sees of a micro-batch.

    Narayanan et al., as above: as weight stashing, with the first stage's K_0 in place of every stage's own depth,
    forth and back.
    """

    def forward_version(self, stage: StageDepths, micro_batch: int) -> int:
        """See :class:`.policy.Policy`."""
        return (micro_batch - stage.first_depth + 1) // stage.micro_batches


class TwoBuffers(OneVersion):
    """PipeDream-2BW: all micro-batches of a mini-batch see the weights before the newest update of all, on every stage.

    Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, section 3.1: W(t+1) = W(t) - rate x
    gradient(W(t-1)). Mini-batch t sees max(0, t - 1) updates, with one stage, too; a stage keeps two versions. That the
    weights which the first forward of a mini-batch is to see are there by then takes T >= K_0 - 1 micro-batches.

    The update of mini-batch t may come any time before the first forward of mini-batch t + 2, which is T - K_s + 1
    micro-batches behind its last backward. It comes as late: sums over replicas, and of norms and counts over all
    ranks, end meanwhile, and nobody waits for them. Gradients of two mini-batches are kept.
    """

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
