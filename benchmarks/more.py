"""More: questions of which the second has more memory, bandwidth or devices, and bounds beside the rows of plans.

    python benchmarks/more.py --json benchmarks/results/more.json [--pairs 100] [--questions 200]

No plan of a second question should be slower than the first one's, and no row that a question admits be below the bound
of all plans. Recorded are by how much the slowest ones are, with ``--exact`` and without, and how many rows are below.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from autopar.errors import InfeasibleError
from autopar.formats.cluster import Cluster
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from autopar.planner import PlanOptions, plan
from instances import instance
from machine import Watch

MOST_LAYERS, MOST_DEVICES = 24, 16
ROUNDING = 1e-9


class Pair(NamedTuple):
    """Two questions, the second with more of something."""

    what: str
    profile: Profile
    cluster: Cluster
    less: PlanOptions
    more: PlanOptions


def pair(seed: int) -> Pair:
    """Return the questions of a seed."""
    draw = random.Random(seed)
    layers, devices = draw.randint(4, MOST_LAYERS), draw.randint(2, MOST_DEVICES)
    profile, cluster, options = instance(seed, layers, devices, repeated=draw.random() < 0.3)
    assert options.memory_bytes is not None
    memory = int(options.memory_bytes * draw.choice((0.9, 1.0, 1.5, 3.0)))
    count = draw.choice((None, options.micro_batches))
    shard = draw.choice(("none", "auto"))
    rate = draw.choice((None, 1e9, 5e9, 25e9))
    options = replace(options, memory_bytes=memory, micro_batches=count, shard=shard, bytes_per_s=rate)
    what = draw.choice(("memory", "bandwidth", "devices"))
    if what == "memory":
        more = replace(options, memory_bytes=int(memory * draw.choice((1.05, 1.3, 2.0, 4.0))))
    elif what == "bandwidth":
        options = replace(options, bytes_per_s=rate or 5e9)
        more = replace(options, bytes_per_s=(rate or 5e9) * draw.choice((1.2, 2.0, 8.0)))
    else:
        more = options
        options = replace(options, gpus=draw.randint(max(1, devices // 2), devices - 1))
    return Pair(what, profile, cluster, options, more)


def pairs(count: int) -> Iterator[tuple[int, Pair]]:
    """Yield pairs of which the first question has a plan."""
    seed = 0
    while count:
        asked = pair(seed)
        if answer(asked, asked.less) is not None:
            yield seed, asked
            count -= 1
        seed += 1


def answer(asked: Pair, options: PlanOptions) -> Plan | None:
    """Return the plan; none where nothing fits."""
    try:
        return plan(asked.profile, asked.cluster, options)
    except InfeasibleError:
        return None


def rows_below(made: Plan) -> int:
    """Return how many rows that the question admits are below the bound of all plans."""
    assert made.predicted.bounds is not None
    least_s = made.predicted.bounds.work_s * (1 - ROUNDING)
    rows = [row for row in made.alternatives if row.step_s is not None and row.excluded is None]
    return sum(row.step_s < least_s for row in rows if row.step_s is not None) + (made.predicted.step_s < least_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--questions", type=int, default=200, help="of whose rows the bounds are looked at")
    arguments = parser.parse_args()
    watch = Watch()
    found: list[dict[str, Any]] = []
    looked = below = 0
    for seed, asked in pairs(arguments.pairs):
        row: dict[str, Any] = {"seed": seed, "more": asked.what}
        for exact in (True, False):
            made = [answer(asked, replace(each, exact=exact)) for each in (asked.less, asked.more)]
            steps = [float("inf") if each is None else each.predicted.step_s for each in made]
            row["exact" if exact else "usual"] = steps[1] / steps[0] - 1
            for each in made:
                if each is not None and looked < arguments.questions:
                    looked, below = looked + 1, below + rows_below(each)
        found.append(row)
        sys.stderr.write(f"{row}\n")
    summary = {
        "pairs": len(found),
        "slower_by_over_0.1_percent_exact": sum(row["exact"] > 0.001 for row in found),
        "slower_by_over_1_percent": sum(row["usual"] > 0.01 for row in found),
        "most_exact": max(row["exact"] for row in found),
        "most_usual": max(row["usual"] for row in found),
        "questions": looked,
        "rows_below_their_bound": below,
    }
    watch.record({"summary": summary, "found": found}, arguments.json)


if __name__ == "__main__":
    main()
