"""Progress: how what takes a while tells what it is at. Nothing depends on what is told."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, float], None]
"""Called with what is being done, and about which share of it all lies behind; 0 where nobody knows."""


def no_progress(what: str, share: float) -> None:
    """Tell nobody."""
