"""Same plans: does a change of the planner's code leave every plan as it was, byte for byte?

    python benchmarks/same_plans.py --record plans.json [--every 3] [--data DIR]
    python benchmarks/same_plans.py --against plans.json [--every 3] [--data DIR]

Record before the change, compare behind it. Planned are the instances of medium.py (every so many of them), the
published pipelines where ``--data`` has their folder, and chains of scale.py; a plan is known by the SHA-256 of its
file's text. What is recorded already is kept: run it again to go on where it ended.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import medium
import published
from autopar.formats.plan import Plan
from autopar.interop.pipedream import pipedream_profile
from autopar.planner import PlanOptions, plan
from instances import instance

CHAINS = ((1, 250, 64), (2, 250, 256), (1, 500, 128))
"""Seed, layers, devices."""


def planners(every: int, data: Path | None) -> Iterator[tuple[str, Callable[[], Plan]]]:
    """Yield names of questions, and what plans them."""
    names = [each for each in medium.names() if each not in medium.TRANSFORMERS]
    for name in names[::every]:
        yield name, partial(_medium, name)
    for seed, layers, devices in CHAINS:
        yield f"chain {seed} {layers}x{devices}", partial(_chain, seed, layers, devices)
    if data is not None:
        for model, rows, micro_batches in published.STEPS:
            for bytes_per_s in published.BANDWIDTHS:
                named = f"{model} {rows}x{micro_batches} {bytes_per_s:g}"
                yield named, partial(_published, data, model, rows, micro_batches, bytes_per_s)


def _medium(name: str) -> Plan:
    asked = medium.question(name)
    return plan(asked.profile, asked.cluster, replace(asked.options, exact=False))


def _chain(seed: int, layers: int, devices: int) -> Plan:
    made = instance(seed, layers, devices, repeated=True)
    return plan(made.profile, made.cluster, made.options)


def _published(data: Path, model: str, rows: int, micro_batches: int, bytes_per_s: float) -> Plan:
    path = data / "dapple" / f"{model}.txt"
    options = PlanOptions(
        batch=rows * micro_batches,
        memory_bytes=published.NO_LIMIT,
        bytes_per_s=bytes_per_s,
        micro_batches=micro_batches,
    )
    cluster = published.cluster_of(published.Topology(1, 16, 1e9, 1e9))
    return plan(pipedream_profile(path.read_text(), path, rows), cluster, options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--record", type=Path)
    what.add_argument("--against", type=Path)
    parser.add_argument("--every", type=int, default=1, help="of medium.py's instances")
    parser.add_argument("--data", type=Path, help="folder of the published profiles")
    arguments = parser.parse_args()
    path = arguments.record or arguments.against
    known = json.loads(path.read_text()) if path.exists() else {}
    other, same = [], 0
    for name, make in planners(arguments.every, arguments.data):
        if (name in known) == (arguments.record is not None):
            continue
        found = hashlib.sha256(make().dumps().encode()).hexdigest()
        if arguments.record is not None:
            path.write_text(json.dumps(known := {**known, name: found}, indent=1))
        elif found == known[name]:
            same += 1
        else:
            other.append(name)
            sys.stderr.write(f"another plan: {name}\n")
    if arguments.against is not None:
        sys.stdout.write(f"{same} plans are the same, {len(other)} are not\n")
        raise SystemExit(bool(other))


if __name__ == "__main__":
    main()
