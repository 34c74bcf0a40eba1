"""Vertical sync: all stages see the version that the first stage sees of a micro-batch.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, section 3.3: as weight
stashing, with the first stage's K_0 in place of every stage's own depth, forth and back.
"""

from __future__ import annotations

from autopar.policies.place import StagePlace

PREPARES = ""


def forward_version(place: StagePlace, micro_batch: int) -> int:
    """See :class:`autopar.policies.Policy`."""
    return (micro_batch - place.first_depth + 1) // place.micro_batches


backward_version = forward_version


def least_micro_batches(first_depth: int) -> int:
    """See :class:`autopar.policies.Policy`."""
    return 1


def buffers(place: StagePlace) -> int:
    """See :class:`autopar.policies.Policy`."""
    return 0
