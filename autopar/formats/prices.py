"""Prices: how long every action of a program takes by itself, and what layers hold, to perform it without its devices.

Who predicts makes them; who performs a program in virtual time is told them, and knows nothing of how they were found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.formats.program import REDUCE_TIED, Action


@dataclass(frozen=True)
class RankPrices:
    """Seconds of one rank's actions, by :func:`price_key`."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    """Of forwards, backwards and their halves, updates, and messages, which occupy their queue and not the rank; of a
    reduction of gradients, how far apart the ends of two at least are. What is not listed takes no time."""
    exposed_s: Mapping[str, float] = field(default_factory=dict)
    """Of reductions of gradients: from the end of this rank's last backward of the stage to that of its part."""


@dataclass(frozen=True)
class LayerBytes:
    """What a layer holds of one micro-batch of its rank's rows."""

    saved: int
    """Kept for its backward, beside tensors that other layers make or read."""
    saved_tensors: tuple[str, ...]
    """Those of them that are kept, too."""
    transient: int
    """Held for a while in its forward, or its backward, beside that."""
    pending: int
    """Between the halves of its backward."""
    gradients: int
    """Of its parameters, where no reduction holds them throughout."""


@dataclass(frozen=True)
class RankBytes:
    """What one rank holds."""

    state: int
    """Throughout a step: parameters, buffers, the optimizer's state, model inputs, and what gradients stay."""
    update: int
    """While the optimizer steps."""
    layers: Mapping[str, LayerBytes] = field(default_factory=dict)
    """By the rank's layers."""
    limit: int | None = None
    """What its device has for all this; none: no limit."""


@dataclass(frozen=True)
class ActionPrices:
    """Seconds of the actions of all ranks."""

    overhead_s: float
    """Before a step's first action."""
    ranks: tuple[RankPrices, ...]
    holds: tuple[RankBytes, ...] = ()
    """By rank; empty where nobody asked."""
    slowed: bool = False
    """Whether actions may take longer beside others, which no price says: devices share links, or computing and
    communicating slow each other."""


def price_key(action: Action) -> str:
    """Return what tells apart actions of a rank that differ in their price: all but the micro-batch does.

    >>> price_key(Action("F", 2, 5)), price_key(Action("S", 2, 5, 7, 3)), price_key(Action("T", 0, 1))
    ('F@2', 'S@2>7@3', 'T1')
    """
    kind, stage, index, peer, peer_stage, *_ = action
    if kind == REDUCE_TIED:
        return f"{kind}{index}"
    return f"{kind}@{stage}" if peer < 0 else f"{kind}@{stage}>{peer}@{peer_stage}"
