"""Prediction: a mini-batch's forwards see weights as they are expected to be when its own update comes.

Guan et al., "XPipe: Efficient Pipeline Model Parallelism for Multi-GPU DNN Training", arXiv 1911.04610. Just before the
first forward of a mini-batch, the newest weights w and the optimizer's state make what all its T forwards see:

    Adam, AdamW        w - d rate m / (sqrt(v) + eps), both moments without their bias; decay is left out
    SGD with momentum  w - d rate buffer

with d = ceil((K_s - 1) / T), the updates from there to the mini-batch's own: counted here, where the paper's constants
differ. Backwards see the newest weights.
"""

from __future__ import annotations

from autopar.policies.policy import Policy, StageDepths


class Predict(Policy):
    """See above."""

    prepares = "predict"

    def buffers(self, stage: StageDepths) -> int:
        """See :class:`.policy.Policy`."""
        return int(updates_ahead(stage) > 0)


def updates_ahead(stage: StageDepths) -> int:
    """Return d, the updates that a prediction is ahead."""
    return -(-(stage.depth + stage.lag - 1) // stage.micro_batches)
