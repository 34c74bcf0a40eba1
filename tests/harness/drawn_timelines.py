"""Timelines drawn by hand."""

from __future__ import annotations

from autopar.formats.program import Action
from autopar.formats.timeline import Origin, Timeline


def timeline(origin: Origin, *rows: str) -> Timeline:
    """Return a timeline from rows of ``action start end``, one row per rank."""
    made = Timeline(origin)
    for rank, row in enumerate(rows):
        words = row.split()
        for text, start, end in zip(words[::3], words[1::3], words[2::3], strict=True):
            made.add(rank, Action.parse(text), float(start), float(end))
    return made
