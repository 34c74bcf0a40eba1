"""PipeDream's pipeline for VGG-16, which is never flushed, beside data parallelism.

    python benchmarks/unflushed.py --data DIR --json benchmarks/results/unflushed.json

The folder is that of ``published.py``: V100 profiles with mini-batches of 64 samples a device. Of 4 x 4 devices of
64 GB with 10 GB/s within nodes, and less and less between them, every row compares samples per second: plain data
parallelism, flushed after every step of all 16 devices' samples; PipeDream's 15 replicas of the layers before the first
fully connected one, which take mini-batches of 64 samples in turn, and one device with the rest, under ``stash``; and
what autopar plans instead. All are rehearsed by the executor in virtual time, and hold what was simulated to 1e-6.
PipeDream's paper has 5.3 times data parallelism for 4 x 4 V100 with 25 Gbps between nodes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from autopar.formats.cluster import Cluster
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from autopar.interop.pipedream import pipedream_profile
from autopar.planner import PlanOptions, action_prices, plan, simulate
from autopar.planner.simulator.simulate import CYCLE, mini_batches, pipeline_times
from autopar.runtime.rehearsal.steps import rehearse_steps
from machine import Watch
from published import Topology, cluster_of

SAMPLES = 64
"""Of a device's mini-batch."""
CUT = 25
"""The first fully connected layer of VGG-16's profile."""
BETWEEN = (10e9, 3e9, 1.25e9, 0.5e9, 0.28e9)
MEMORY_BYTES = 64 * 10**9
SAME = 1e-6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the published profiles")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    watch, rows = Watch(), []
    path = arguments.data / "pipedream" / "vgg16.txt"
    profile = pipedream_profile(path.read_text(), path, SAMPLES)
    for bytes_per_s in BETWEEN:
        rows.append(
            {"bytes_per_s": bytes_per_s, **_row(profile, cluster_of(Topology(4, 4, 10e9, bytes_per_s), MEMORY_BYTES))}
        )
        sys.stderr.write(f"{rows[-1]}\n")
    watch.record({"rows": rows}, arguments.json)


def _row(profile: Profile, cluster: Cluster) -> dict[str, Any]:
    parallel = PlanOptions(batch=16 * SAMPLES, max_stages=1, micro_batches=1, use_all=True)
    stages = f"0-{CUT - 1}:15,{CUT}-{len(profile.layers) - 1}:1"
    piped = PlanOptions(batch=SAMPLES, micro_batches=1, stages=stages, policy="stash")
    best = PlanOptions(batch=SAMPLES, policy="stash")
    plans = [plan(profile, cluster, each) for each in (parallel, piped, best)]
    assert [stage.period for stage in plans[1].stages] == [15, 1]
    one, other, own = (_samples_per_s(each, profile, cluster) for each in plans)
    widths = "-".join(f"{stage.replicas}" for stage in plans[2].stages)
    return {"data_parallel": one, "15-1": other, "ratio": round(other / one, 3), "best": own, "best_stages": widths}


def _samples_per_s(made: Plan, profile: Profile, cluster: Cluster) -> float:
    """Return what a plan trains a second, performed by the executor in virtual time and as it was simulated."""
    prices, simulated = action_prices(made, profile, cluster), simulate(made, profile, cluster)
    unflushed = made.weight_policy != "sync"
    steps = mini_batches(made) if unflushed else 1
    rehearsed = rehearse_steps(made, profile, prices, steps, threads=True)
    if unflushed:
        middle = rehearsed.timeline
        period_s, expected_s = (pipeline_times(each, made).period_s for each in (middle, simulated))
    else:
        period_s, expected_s = rehearsed.steps_s[-1], simulated.end_s
    if abs(period_s / expected_s - 1) > SAME:
        sys.exit(f"rehearsed {period_s} s, simulated {expected_s} s ({CYCLE} mini-batches)")
    return round(made.batch / period_s, 1)


if __name__ == "__main__":
    main()
