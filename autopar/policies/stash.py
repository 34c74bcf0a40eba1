"""Weight stashing: forward and backward of a micro-batch see the weights that were the newest when it came.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, section 3.3. With K_s
micro-batches in flight and T of them between updates, micro-batch m sees max(0, floor((m - K_s + 1) / T)) updates; a
stage keeps 1 + ceil((K_s - 1) / T) versions. Stages see different versions.

Where n replicas take whole mini-batches in turn (T = 1), there is an update for every n of them, by the mean of their
gradients: mini-batch m sees max(0, floor(m / n) - K_s + 1) updates.
"""

from __future__ import annotations

from autopar.policies.policy import OneVersion


class Stash(OneVersion):
    """See above."""

    takes_turns = True
