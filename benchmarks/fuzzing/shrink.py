"""Shrink: leaves parts of a model out, and simplifies its plan, as long as a case ends the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from autopar.ranks.pool import RankPool
from fuzzing.asks import Ask
from fuzzing.cases import Case, Model, Result, attempt
from fuzzing.grammar import smaller, write
from fuzzing.truth import trains

__all__ = ["shrunk"]

MOST = 60
"""Cases that are tried."""


def shrunk(
    case: Case, ask: Ask | None, result: Result, folder: Path, pool: Callable[[], RankPool]
) -> tuple[Case, Ask | None, Result]:
    """Return the smallest case found that ends as the given one does."""
    tried = 0
    progress = True
    while progress and tried < MOST:
        progress = False
        for candidate in _smaller(case, ask):
            tried += 1
            if not trains(write(candidate.recipe)):
                continue
            place = folder / f"tried-{tried}"
            again, found = attempt(candidate, Model(candidate.recipe, place), place / "plan", pool)
            if (found.outcome, found.where) == (result.outcome, result.where):
                case, ask, result, progress = candidate, again, found, True
                break
            if tried >= MOST:
                break
    return case, ask, result


def _smaller(case: Case, ask: Ask | None) -> Iterator[Case]:
    if case.processes and ask is not None and ask.shard == "none":
        yield replace(case, processes=False)
    for recipe in smaller(case.recipe):
        yield replace(case, recipe=recipe, ask=ask)
    if ask is not None:
        plainer = {"edits": 0, "recompute": "none", "shard": "none", "schedule": "gpipe"}
        for name, value in plainer.items():
            if getattr(ask, name) != value and (name != "schedule" or ask.chunks == 1):
                yield replace(case, ask=replace(ask, **{name: value}))  # type: ignore[arg-type]
