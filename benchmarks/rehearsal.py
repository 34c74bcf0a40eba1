"""Rehearsal: published V100 profiles planned for 16 devices, and performed in virtual time by the executor.

    python benchmarks/rehearsal.py --data DIR --json benchmarks/results/rehearsal.json [--only gnmt8]

The folder is that of ``published.py``. Of every profile, autopar's plan and the plans of ``compare``'s peers are
simulated, and performed: who is faster, executed and not only computed, and what stages hold over what was predicted.
autopar's own is performed by 16 processes, and the seconds of their steps and the memory of all together are recorded;
peers' by threads. ``64 ranks`` is a plan of as many, by threads, with the memory of this process. ``teams`` are 200
plans that are drawn, with several ranks for each replica: the largest difference between a step as simulated and as the
ranks perform it. ``real time`` is 8 processes that sleep 20 ms a forward and 40 ms a backward. What is recorded already
is kept.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from autopar.formats.cluster import Cluster
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from autopar.interop.pipedream import pipedream_profile
from autopar.planner import PlanOptions, action_prices, plan, simulate
from autopar.planner.assemble import assemble
from autopar.planner.constraints import Question
from autopar.planner.peers import peers
from autopar.planner.search.judge import references
from autopar.ranks.pool import RankPool
from autopar.runtime.rehearsal.steps import rehearse_steps
from emulation import profile_of
from instances import instance
from machine import Watch
from published import Topology, cluster_of
from sleeping import Pace

HARNESS = Path(__file__).parents[1] / "tests" / "harness"
STEPS = 3
TEAM_PLANS = 200


class Published(NamedTuple):
    """A published profile, and what a step is of."""

    file: str
    rows: int
    """Samples of the mini-batch that was profiled, and of a micro-batch."""
    batch: int


PROFILES = {
    "vgg16": Published("pipedream/vgg16.txt", 64, 2048),
    "resnet50": Published("pipedream/resnet50.txt", 128, 2048),
    "gnmt8": Published("pipedream/gnmt8.txt", 64, 2048),
    "bert-48": Published("dapple/bert-48-pbs-2.txt", 2, 64),
    "xlnet-36": Published("dapple/xlnet-36-pbs-1.txt", 1, 128),
}
CLUSTER = Topology(4, 4, 10e9, 1.25e9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the published profiles")
    parser.add_argument("--only", default="", help="parts whose names hold this")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    watch = Watch()
    parts: dict[str, Callable[[], dict[str, Any]]] = {"real time": _real_time, "64 ranks": _large, "teams": _teams}
    parts |= {name: partial(_published, name, arguments.data) for name in PROFILES}
    known: dict[str, Any] = {}
    if arguments.json is not None and arguments.json.exists():
        known = json.loads(arguments.json.read_text())
    for name, part in parts.items():
        if arguments.only in name and name not in known:
            known[name] = part()
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(known, indent=1) + "\n")
    watch.record({name: known[name] for name in parts if name in known}, arguments.json)


def _published(name: str, folder: Path) -> dict[str, Any]:
    of, cluster = PROFILES[name], cluster_of(CLUSTER, 2**60)
    path = folder / of.file
    profile = pipedream_profile(path.read_text(), path, of.rows)
    count = of.batch // of.rows
    options = PlanOptions(batch=of.batch, gpus=16, micro_batches=count, exact=True, memory_bytes=16 * 10**9)
    own = plan(profile, cluster, options)
    with RankPool(len(own.devices)) as pool:
        rows = {"autopar": _performed(own, profile, cluster, pool)}
    question = Question.of(profile, cluster, options)
    compared = references(question.simulator, question.families, question.options)
    for peer in peers(question.simulator, question.options, compared):
        if peer.candidate is not None and peer.reason is None:
            made = assemble(question.costs, peer.candidate, question.options, 0.0, (), ())
            rows[peer.name] = _performed(made, profile, cluster)
        else:
            rows[peer.name] = {"infeasible": peer.reason}
    return rows


def _performed(made: Plan, profile: Profile, cluster: Cluster, pool: RankPool | None = None) -> dict[str, Any]:
    """Return what a plan takes, simulated and performed: by processes, if there are some, and otherwise by threads."""
    simulated, prices, began_s = (
        simulate(made, profile, cluster),
        action_prices(made, profile, cluster),
        time.monotonic(),
    )
    moments: list[float] = []

    def note(what: str, share: float) -> None:
        moments.append(time.monotonic())

    with _memory(pool) as memory:
        found = rehearse_steps(made, profile, prices, STEPS, threads=pool is None, pool=pool, progress=note)
    sys.stderr.write(f"{made.schedule} of {len(simulated):,} actions: {found.steps_s[-1]:.6g} s\n")
    worst = max(abs(each / simulated.end_s - 1) for each in found.steps_s)
    held = found.timeline.peaks_bytes()
    # Of a stage's replicas, the one that holds most is predicted.
    most = [max(held[made.devices.index(device)] for device in stage.devices) for stage in made.stages]
    ratios = [each / max(1, predicted) for each, predicted in zip(most, made.predicted.peak_bytes, strict=True)]
    step = {"simulated_s": simulated.end_s, "performed_s": found.steps_s[-1], "worst_difference": worst}
    return {
        **step,
        "ranks": len(made.devices),
        "stages": ",".join(str(stage.replicas) for stage in made.stages),
        "schedule": made.schedule,
        "actions": len(simulated),
        "held_over_predicted": [round(min(ratios), 3), round(max(ratios), 3)],
        "until_first_step_s": round(moments[1 if pool else 0] - began_s, 2),
        "own_s_per_step": round((moments[-1] - moments[-STEPS]) / (STEPS - 1), 3),
        "memory_gib": round(max(memory) / 2**30, 2),
    }


@contextmanager
def _memory(pool: RankPool | None) -> Iterator[list[int]]:
    """Yield what the ranks' processes take together, sampled twice a second: their proportional shares of pages."""
    found, over = [0], threading.Event()

    def watch() -> None:
        while pool is not None and not over.wait(0.5):
            rollups = (Path(f"/proc/{each.process.pid}/smaps_rollup") for each in pool._links)
            lines = (line for each in rollups for line in each.read_text().splitlines() if line.startswith("Pss:"))
            found.append(1024 * sum(int(line.split()[1]) for line in lines))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
        if pool is None:
            found.append(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def _large() -> dict[str, Any]:
    profile, cluster, options = instance(0, 128, 64)
    return _performed(plan(profile, cluster, options), profile, cluster)


def _teams() -> dict[str, Any]:
    plans, worst = list[Plan](), 0.0
    sys.path.append(str(HARNESS))
    from in_parts import dictated_teams

    for seed in itertools.count():
        drawn = dictated_teams(seed)
        if drawn is None:
            continue
        end_s, prices = simulate(*drawn).end_s, action_prices(*drawn)
        found = rehearse_steps(*drawn[:2], prices, 2, threads=True)
        worst = max(worst, *(abs(each - end_s) / (end_s or 1.0) for each in found.steps_s))
        plans.append(drawn[0])
        if len(plans) == TEAM_PLANS:
            break
    sizes = [{stage.tensor_parallel for stage in made.stages} for made in plans]
    return {
        "plans": len(plans),
        "worst_difference": worst,
        "schedules": dict(Counter(made.schedule for made in plans)),
        "teams of several sizes": sum(len(each) > 1 for each in sizes),
        "slices of the sequence": sum(any(stage.sequence for stage in made.stages) for made in plans),
        "recompute": sum(any(stage.recompute for stage in made.stages) for made in plans),
        "shard": sum(any(stage.shard != "none" for stage in made.stages) for made in plans),
        "turns": sum(any(stage.period > 1 for stage in made.stages) for made in plans),
        "most ranks": max(len(made.devices) for made in plans),
    }


def _real_time() -> dict[str, Any]:
    paces = [Pace(0.005, 0.010, 1024)] * 8
    profile = profile_of(paces, 4, 4 * 32, 0.0, split=False)
    cluster = cluster_of(Topology(1, 8, 10e9, 10e9), 2**40)
    options = PlanOptions(gpus=8, micro_batches=32, stages="0:1,1:1,2:1,3:1,4:1,5:1,6:1,7:1", recompute="none")
    made = plan(profile, cluster, options)
    simulated, prices = simulate(made, profile, cluster), action_prices(made, profile, cluster)
    with RankPool(8) as pool:
        found = rehearse_steps(made, profile, prices, 8, real_time=True, pool=pool)
    ratios = sorted(each / simulated.end_s for each in found.steps_s)
    return {"simulated_s": simulated.end_s, "slept_s": found.steps_s, "least": ratios[0], "most": ratios[-1]}


if __name__ == "__main__":
    main()
