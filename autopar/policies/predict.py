"""Prediction: forwards, and backwards if so asked, see weights as they are expected to be after the next updates.

Guan et al., "XPipe: Efficient Pipeline Model Parallelism for Multi-GPU DNN Training", arXiv 1911.04610. Just before the
first forward of a mini-batch, the newest weights w and the optimizer's state make what all its T forwards see:

    Adam, AdamW        w - d rate m / (sqrt(v) + eps), both moments without their bias; decay is left out
    SGD with momentum  w - d rate buffer

How far ahead, d, is

    counted   forwards ceil((K_s - 1) / T), the updates from there to the mini-batch's own; backwards 0: the newest
    xpipe     forwards round((S + T - s/2 - 2) / T); backwards round((T + floor(s/2) - 1) / T)

of stage s of S, from 0, halves rounded up. What backwards see is made behind each update: of the weights and the state
that there are at the first backward of the next mini-batch, XPipe's bellwether, for all T of them. Only where the
update is late (parameters that stages share) do those before it see what the update before has left.

XPipe's constants are known here at third hand only. Under PA, of all stages of S = 2..8 and T = 1..8, they agree with
what is counted for 34 % of forwards, and for 5 % of backwards (those with T = 1 and s = 0 or 1).
"""

from __future__ import annotations

from typing import Literal

from autopar.policies.policy import Policy, StageDepths, UpdatesAhead

Ahead = Literal["counted", "xpipe"]
"""Where d is from."""


class Predict(Policy):
    """See above."""

    prepares = "predict"

    def prepares_forwards(self, stage: StageDepths) -> bool:
        """See :class:`.policy.Policy`."""
        return updates_ahead(stage).forward > 0

    def prepares_backwards(self, stage: StageDepths) -> bool:
        """See :class:`.policy.Policy`."""
        return updates_ahead(stage).backward > 0

    def buffers(self, stage: StageDepths) -> int:
        """See :class:`.policy.Policy`."""
        return self.prepares_forwards(stage) + self.prepares_backwards(stage)


def updates_ahead(stage: StageDepths) -> UpdatesAhead:
    """Return d: the stage's own, or what is counted."""
    return stage.ahead or UpdatesAhead(-(-(stage.depth + stage.lag - 1) // stage.micro_batches), 0)


def xpipe_constants(stage: int, stages: int, micro_batches: int) -> UpdatesAhead:
    """Return XPipe's d of a stage.

    >>> [xpipe_constants(stage, 4, 4) for stage in range(2)]
    [UpdatesAhead(forward=2, backward=1), UpdatesAhead(forward=1, backward=1)]
    """
    twice = 2 * micro_batches
    forward = 2 * (stages + micro_batches - 2) - stage
    backward = 2 * (micro_batches + stage // 2 - 1)
    return UpdatesAhead((forward + micro_batches) // twice, (backward + micro_batches) // twice)
