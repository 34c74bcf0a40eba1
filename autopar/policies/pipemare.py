"""PipeMare: forwards and backwards see the newest weights, and what that costs in learning is corrected.

Yang et al., "PipeMare: Asynchronous Pipeline Parallel DNN Training", arXiv 1910.05124; at second hand. With tau_s the
mean over a mini-batch of the updates from a forward to its own update:

    T1  the rate of mini-batch t is multiplied by max(1, tau_s) ^ -(1 - min(t / N, 1))
    T2  backwards see w - tau_s delta; after an update, delta <- g delta + (1 - g) (new - old), g = 0.135 ^ (1 / tau_s)
    T3  the first N' steps are synchronous, and t counts from there
"""

from __future__ import annotations

from autopar.policies.policy import Policy, StageDepths

DECAY = 0.135
"""The paper's D: what is left of a difference after tau_s updates."""


class PipeMare(Policy):
    """See above."""

    prepares = "correct"
    # Each stage's rate is its own.
    shares_parameters = False

    def prepares_backwards(self, stage: StageDepths) -> bool:
        """See :class:`.policy.Policy`."""
        return delay(stage) > 0

    def buffers(self, stage: StageDepths) -> int:
        """See :class:`.policy.Policy`."""
        return 2 if delay(stage) else 0


def delay(stage: StageDepths) -> float:
    """Return tau_s.

    >>> [delay(StageDepths(depth, 5, 4)) for depth in (5, 3, 1)]
    [1.0, 0.5, 0.0]
    """
    every = range(stage.micro_batches)
    return sum(-stage.newest_at_forward(each) for each in every) / len(every)


def rate_factor(tau: float, step: int, anneal_steps: int) -> float:
    """Return what the rate of a step is multiplied by (T1)."""
    return float(max(1.0, tau) ** -(1 - min(step / anneal_steps, 1.0)))
