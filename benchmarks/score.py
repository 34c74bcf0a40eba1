"""Score: what a race's laps say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median, quantiles
from typing import Any

from race import Lap

__all__ = ["Laps", "row", "steps_s"]

Laps = Mapping[str, Sequence[Sequence[Lap]]]
"""By contestant, by rank."""


def steps_s(laps: Sequence[Sequence[Lap]]) -> list[float]:
    """Return the seconds of every round: from the first rank's start to the last one's end."""
    return [
        max(end_s for _, end_s, _ in moment) - min(start_s for start_s, _, _ in moment)
        for moment in zip(*laps, strict=True)
    ]


def row(
    case: str,
    name: str,
    laps: Laps,
    actions: int,
    ideal_s: Sequence[float] | None = None,
    single_s: Sequence[float] | None = None,
    counterpart: str | None = None,
    predicted_s: Sequence[float] | None = None,
) -> dict[str, Any]:
    """Return a contestant's figures.

    Args:
        case: what raced.
        name: the contestant.
        laps: everyone's.
        actions: forwards and backwards of a step, over all ranks.
        ideal_s: the least seconds of every round.
        single_s: those of one process.
        counterpart: whom the contestant is held against.
        predicted_s: the step that the simulator predicts from what was measured in every round.
    """
    mine = steps_s(laps[name])
    low, *_, high = quantiles(mine, n=10, method="inclusive") if len(mine) > 1 else (mine[0], mine[0])
    cpu_s = median(sum(cpu_s for _, _, cpu_s in moment) for moment in zip(*laps[name], strict=True))
    other_s = steps_s(laps[counterpart]) if counterpart in laps else None
    return {
        "case": case,
        "contestant": name,
        "step_s_median": round(median(mine), 4),
        "step_s_p10": round(low, 4),
        "step_s_p90": round(high, 4),
        "over_ideal": _over(mine, ideal_s),
        "over_single": _over(mine, single_s),
        "over_torch": _over(mine, other_s),
        "cpu_s": round(cpu_s, 4),
        "cpu_ms_per_action": round(1e3 * cpu_s / actions, 4),
        "predicted_s": None if predicted_s is None else round(median(predicted_s), 4),
        "error": None if predicted_s is None else round(median(_ratios(predicted_s, mine)) - 1, 4),
    }


def _over(mine: Sequence[float], others: Sequence[float] | None) -> float | None:
    """Return the median ratio over rounds."""
    if others is None:
        return None
    return round(median(_ratios(mine, others)), 4)


def _ratios(some: Sequence[float], others: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(some, others, strict=True)]
