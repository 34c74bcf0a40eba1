"""BlackBox: the last actions of every rank of a run that has failed."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from autopar.formats.document import Document, Index, Name, Record, Seconds


class BeganAction(Record):
    """An action that a rank had begun."""

    step: Index
    """From the run's first."""
    action: Name
    """As in a program's text, with the stage: ``B2@1``."""
    before_s: Seconds
    """How long before the failure was noticed."""


class RankActions(Record):
    """A rank's last actions, oldest first."""

    rank: Index
    doing: Name
    """What it was doing when the failure was noticed, in words."""
    actions: tuple[BeganAction, ...] = ()


class BlackBox(Document):
    """What the ranks of a host had last done when a run failed."""

    KIND: ClassVar[str] = "blackbox"

    format: Literal["autopar.blackbox"] = "autopar.blackbox"
    version: Literal[1] = 1
    message: Name
    """What was said of the failure."""
    date: Name
    """When it was noticed: UTC, ISO 8601."""
    ranks: tuple[RankActions, ...] = Field(min_length=1)
