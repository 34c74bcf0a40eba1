"""Plans of one model, run side by side: is the best one best, and is what was predicted what is measured?

    python benchmarks/side_by_side.py examples/gpt.py --batch 16 --gpus 2 --json benchmarks/results/side_by_side.json

Profiles the model, plans it, and runs the plan, pure data parallelism and the equal split in turn, round after round,
on the same processes with one thread each. Prints and writes per contestant the predicted step, the measured median,
10th and 90th percentile, the error of the prediction, and the ratio of the medians to the plan's; and how busy the
machine was with other work.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles

from autopar.capture import load
from autopar.formats.cluster import Cluster
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from autopar.options.profile import ProfileOptions
from autopar.options.train import RunOptions
from autopar.planner import PlanOptions, plan
from autopar.profiler import local_cluster, measure_links, profile
from autopar.profiler.device import choose, count
from autopar.ranks.pool import RankPool
from autopar.runtime.start.launch import run
from machine import Watch


def main() -> None:
    arguments = _arguments()
    watch = Watch()
    profiled, cluster = _measure(arguments.model, arguments.batch, arguments.gpus)
    contestants = _contestants(profiled, cluster, arguments.gpus)
    steps: dict[str, list[float]] = {name: [] for name in contestants}
    with RankPool(arguments.gpus, threads=1) as pool:
        for number in range(arguments.rounds):
            for name, chosen in contestants.items():
                outcome = run(chosen, arguments.model, RunOptions(steps=arguments.steps), pool=pool)
                steps[name].append(outcome.report.step_s.median)
                sys.stderr.write(f"round {number + 1}: {name}: {outcome.report.step_s.median:.3f} s\n")
    result = {
        "model": arguments.model,
        "batch": arguments.batch,
        "ranks": arguments.gpus,
        "rounds": arguments.rounds,
        "steps_per_round": arguments.steps,
        "noise": profiled.noise.model_dump(),
        "contestants": _rows(contestants, steps),
    }
    watch.record(result, arguments.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _measure(model: str, batch: int, ranks: int) -> tuple[Profile, Cluster]:
    chosen = choose("auto")
    measured = profile(load(model), ProfileOptions(batch=batch), lambda what, share: None)
    links = measure_links(ranks, chosen.type, 1)
    return measured, local_cluster(links, measured.device, count(chosen))


def _contestants(profiled: Profile, cluster: Cluster, gpus: int) -> dict[str, Plan]:
    """The plan, and what people would do without one; references as the planner itself lists them."""
    options = PlanOptions(gpus=gpus)
    best = plan(profiled, cluster, options)
    found = {"plan": best}
    for alternative in best.alternatives:
        if alternative.name in ("pure data parallelism", "equal split") and alternative.step_s is not None:
            dictated = replace(
                options,
                stages=alternative.stages,
                micro_batches=alternative.micro_batches,
                schedule=alternative.schedule or "auto",
            )
            found[alternative.name] = plan(profiled, cluster, dictated)
    return found


def _rows(contestants: dict[str, Plan], steps: dict[str, list[float]]) -> list[dict[str, object]]:
    rows = []
    for name, chosen in contestants.items():
        measured = median(steps[name])
        low, *_, high = quantiles(steps[name], n=10, method="inclusive")
        ratios = [one / own for one, own in zip(steps[name], steps["plan"], strict=True)]
        rows.append(
            {
                "contestant": name,
                "stages": "+".join(str(stage.replicas) for stage in chosen.stages),
                "micro_batches": chosen.micro_batches,
                "schedule": chosen.schedule,
                "predicted_s": round(chosen.predicted.step_s, 4),
                "step_s_median": round(measured, 4),
                "step_s_p10": round(low, 4),
                "step_s_p90": round(high, 4),
                "error": round(chosen.predicted.step_s / measured - 1, 4),
                "over_plan": round(median(ratios), 4),
            }
        )
    return rows


if __name__ == "__main__":
    main()
