"""Shares of a stage's replicas, without a stage."""

from typing import NamedTuple

from autopar.ownership import Division


class FixedStageShares(NamedTuple):
    """The least that routes go by."""

    shares: tuple[float, ...]
    division: Division = "split"
