"""Prediction: a mini-batch's forwards see weights as they are expected to be when its own update comes.

Guan et al., "XPipe: Efficient Pipeline Model Parallelism for Multi-GPU DNN Training", arXiv 1911.04610. Just before the
first forward of a mini-batch, the newest weights w and the optimizer's state make what all its T forwards see:

    Adam, AdamW        w - d rate m / (sqrt(v) + eps), both moments without their bias; decay is left out
    SGD with momentum  w - d rate buffer

with d = ceil((K_s - 1) / T), the updates from there to the mini-batch's own: counted here, where the paper's constants
differ. Backwards see the newest weights.
"""

from __future__ import annotations

from autopar.policies.place import StagePlace

PREPARES = "predict"


def forward_version(place: StagePlace, micro_batch: int) -> int:
    """See :class:`autopar.policies.Policy`."""
    return place.newest_at_forward(micro_batch)


def backward_version(place: StagePlace, micro_batch: int) -> int:
    """See :class:`autopar.policies.Policy`."""
    return place.newest_at_backward(micro_batch)


def least_micro_batches(first_depth: int) -> int:
    """See :class:`autopar.policies.Policy`."""
    return 1


def updates_ahead(place: StagePlace) -> int:
    """Return d, the updates that a prediction is ahead."""
    return -(-(place.depth - 1) // place.micro_batches)


def buffers(place: StagePlace) -> int:
    """See :class:`autopar.policies.Policy`."""
    return int(updates_ahead(place) > 0)
