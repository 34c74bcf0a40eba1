"""Vertical sync: all stages see the version that the first stage sees of a micro-batch.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, section 3.3: as weight
stashing, with the first stage's K_0 in place of every stage's own depth, forth and back.
"""

from __future__ import annotations

from autopar.policies.policy import OneVersion, StageDepths


class VerticalSync(OneVersion):
    """See above."""

    def forward_version(self, stage: StageDepths, micro_batch: int) -> int:
        """See :class:`.policy.Policy`."""
        return (micro_batch - stage.first_depth + 1) // stage.micro_batches
