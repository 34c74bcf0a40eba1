"""Record: one line per case, appended to a file as cases end, and what they come to."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Line", "append", "bad", "passed", "read", "summary"]

Line = dict[str, Any]
BAD = ("wrong", "crash", "hang", "taken", "false refusal")
"""Outcomes that say something of autopar."""
FALSE_REFUSALS = 0.02
"""Of all cases, at most."""


def read(path: Path, seed: int) -> dict[int, Line]:
    """Return the cases of a seed that are there, by number; a torn last line is left out."""
    found: dict[int, Line] = {}
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            line: Line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if line["seed"] == seed:
            found[line["case"]] = line
    return found


def append(path: Path, line: Mapping[str, object]) -> None:
    """Add a case."""
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def bad(line: Mapping[str, object]) -> bool:
    """Tell whether somebody should look at a case."""
    return line["outcome"] in BAD


def passed(lines: Sequence[Line]) -> bool:
    """Tell whether no case is wrong, and few refusals are not called for."""
    found = Counter(line["outcome"] for line in lines if bad(line))
    return found.total() == found["false refusal"] <= FALSE_REFUSALS * len(lines)


def summary(lines: Iterable[Line]) -> dict[str, object]:
    """Return what cases come to: how many of each outcome, where, and the refusals that were not called for."""
    every = [line for line in lines if line["outcome"] != "skipped"]
    outcomes = Counter(line["outcome"] for line in every)
    schedules = Counter(line["schedule"] for line in every if line["schedule"])
    return {
        "cases": len(every),
        "outcomes": dict(sorted(outcomes.items())),
        "with_ranks_as_processes": sum(line["ranks"] == "processes" for line in every),
        "sharded": sum(line["shard"] not in (None, "none") for line in every),
        "recomputed": sum(line["recompute"] == "full" for line in every),
        "schedules": dict(sorted(schedules.items())),
        "false_refusals": round(outcomes["false refusal"] / max(1, len(every)), 4),
        "seconds": round(sum(line["seconds"] for line in every)),
        "bad": [{key: line[key] for key in ("case", "outcome", "where", "said")} for line in every if bad(line)],
    }
