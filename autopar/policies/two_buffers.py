"""PipeDream-2BW: all micro-batches of a mini-batch see the weights before the newest update of all, on every stage.

Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, section 3.1: W(t+1) = W(t) - rate x
gradient(W(t-1)). Mini-batch t sees max(0, t - 1) updates, with one stage, too; a stage keeps two versions. That the
weights which the first forward of a mini-batch is to see are there by then takes T >= K_0 - 1 micro-batches.
"""

from __future__ import annotations

from autopar.policies.policy import OneVersion, StageDepths


class TwoBuffers(OneVersion):
    """See above."""

    def forward_version(self, stage: StageDepths, micro_batch: int) -> int:
        """See :class:`.policy.Policy`."""
        return micro_batch // stage.micro_batches - 1

    def least_micro_batches(self, first_depth: int) -> int:
        """See :class:`.policy.Policy`."""
        return max(1, first_depth - 1)
