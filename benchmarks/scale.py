"""How long does planning take as layers and devices grow, and how close to the best does it come?

    python benchmarks/scale.py --json benchmarks/results/scale.json --png benchmarks/results/scale.png

Plans the instances of `instances.py`: ten of 1,000 layers on 1,024 devices, 100 blocks that are all alike on as many,
and smaller ones for the picture, all with `--exact` and `--shard none`; and the first one with all sorts of sharding.
Every instance is planned in a process of its own, on one core; seconds are of the process' own CPU time within
`plan()`, the gap is of the plan's step to its lower bound, and `fits` says whether every stage keeps within the memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import matplotlib

if TYPE_CHECKING:
    from autopar.ownership import Shard

matplotlib.use("Agg")
from matplotlib import pyplot as plt

LAYERS, DEVICES = 1000, 1024
SEEDS = range(10)
GROWTH = ((125, 1024), (250, 1024), (500, 1024), (1000, 128), (1000, 256), (1000, 512))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case is not None:
        sys.stdout.write(json.dumps(_case(*json.loads(arguments.case))))
        return
    # Imports torch, which a case's memory should not count.
    from machine import Watch

    watch = Watch()
    large = [_apart(seed, LAYERS, DEVICES, False) for seed in SEEDS[: arguments.seeds]]
    repeated = _apart(0, 100, DEVICES, True)
    growth = [_apart(0, *size, False) for size in GROWTH]
    sharded = _apart(0, LAYERS, DEVICES, False, "auto")
    found = {
        "median_gap": statistics.median(each["gap"] for each in large),
        "median_s": statistics.median(each["plan_s"] for each in large),
        "large": large,
        "repeated": repeated,
        "growth": [*growth, large[0]],
        "sharded": sharded,
    }
    watch.record(found, arguments.json)
    if arguments.png:
        _draw([*growth, large[0]], arguments.png)


def _apart(seed: int, layers: int, devices: int, repeated: bool, shard: str = "none") -> dict[str, float]:
    case = json.dumps([seed, layers, devices, repeated, shard])
    one = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--case", case]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **one})
    found: dict[str, float] = json.loads(done.stdout)
    sys.stderr.write(f"{found}\n")
    return found


def _case(seed: int, layers: int, devices: int, repeated: bool, shard: Shard | Literal["auto"]) -> dict[str, object]:
    from autopar.planner import plan
    from instances import instance

    made = instance(seed, layers, devices, repeated=repeated)
    begun = time.process_time()
    found = plan(made.profile, made.cluster, replace(made.options, shard=shard, exact=True))
    seconds = time.process_time() - begun
    predicted = found.predicted
    return {
        "seed": seed,
        "layers": layers,
        "devices": devices,
        "repeated": repeated,
        "shard": shard,
        "micro_batches": found.micro_batches,
        "memory_bytes": made.options.memory_bytes,
        "plan_s": round(seconds, 2),
        "stages": len(found.stages),
        "step_s": predicted.step_s,
        "lower_bound_s": predicted.lower_bound_s,
        "gap": round(predicted.step_s / predicted.lower_bound_s - 1, 4),
        "fits": max(predicted.peak_bytes) <= (made.options.memory_bytes or 0),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _draw(cases: list[dict[str, float]], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for axis, by, fixed, at in zip(axes, ("layers", "devices"), ("devices", "layers"), (DEVICES, LAYERS), strict=True):
        some = sorted((case for case in cases if case[fixed] == at), key=lambda case: case[by])
        axis.plot([case[by] for case in some], [case["plan_s"] for case in some], marker="o", color="tab:blue")
        axis.set_xlabel(f"{by} ({at:,} {fixed})")
        axis.set_xlim(0)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("seconds to plan")
    axes[0].set_ylim(0, 1.05 * max(case["plan_s"] for case in cases))
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
