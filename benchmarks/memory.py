"""How well is a stage's peak memory predicted? The planner's formula and a rehearsal against training processes.

    python benchmarks/memory.py --json benchmarks/results/memory.json

Every model is profiled and cut into stages by the planner, one process each, and trained for two steps under `gpipe`
and `1f1b`; the second step counts. On the CPU, what a process holds is the bytes of all tensors that are alive at
once; on CUDA, `torch.cuda.max_memory_allocated`. Prints and writes, per stage, predicted and rehearsed over held, and
whether the largest error of a prediction is within its bound.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from autopar.capture import load
from autopar.capture.model.effects import StorageTracker
from autopar.formats.plan import Plan
from autopar.hardware.kinds import estimated_cluster
from autopar.options.profile import ProfileOptions
from autopar.planner import PlanOptions, plan
from autopar.profiler import profile
from autopar.profiler.device import choose
from autopar.ranks.context import RankContext
from autopar.ranks.pool import RankPool
from autopar.runtime.rehearsal.memory import rehearse_model
from autopar.runtime.start.worker import build
from autopar.runtime.start.workspace import Workspace
from machine import Watch

FOLDER = Path(__file__).parent
MODELS = FOLDER / "models"
PEAK_BOUND = 0.03
"""How far off the peak of a stage may be predicted, over what its process held."""


def main() -> None:
    arguments = _arguments()
    watch = Watch()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    device = choose(arguments.device).type
    with RankPool(arguments.stages, device_type=device) as pool:
        rows = [row for name in arguments.models.split(",") for row in _model(name, arguments, pool)]
    worst = max(abs(row["predicted_over_held"] - 1) for row in rows)
    within = {"peak": worst <= PEAK_BOUND}
    figures = {"largest_error": round(worst, 4), "within_bounds": within, "stages": rows}
    watch.record({"batch": arguments.batch, **figures}, arguments.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default="gpt2,bert,resnet", help="names in benchmarks/models, or model files")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _model(name: str, arguments: argparse.Namespace, pool: RankPool) -> list[dict[str, Any]]:
    path = MODELS / f"{name}.py"
    model = str(path if path.exists() else name)
    user = load(model)
    measured = profile(user, ProfileOptions(batch=arguments.batch, device=arguments.device, budget_s=2.0))
    cluster = estimated_cluster(measured, arguments.stages)
    rows = []
    for schedule in ("gpipe", "1f1b"):
        options = PlanOptions(
            min_stages=arguments.stages, micro_batches=arguments.micro_batches, schedule=schedule, use_all=True
        )
        planned = plan(measured, cluster, options)
        sys.stderr.write(f"{name}, {schedule}\n")
        rehearsed = rehearse_model(planned, model, None)
        with tempfile.TemporaryDirectory() as folder:
            Workspace(Path(folder)).prepare(load(model), planned, None)
            held = pool.run("memory:hold", {"plan": planned.dumps(), "model": model, "workspace": folder})
        for index, (peak, rehearsal, real) in enumerate(
            zip(planned.predicted.peak_bytes, rehearsed, held, strict=True)
        ):
            rows.append(
                {
                    "model": name,
                    "schedule": schedule,
                    "stage": index,
                    "held_bytes": real,
                    "predicted_over_held": round(peak / real, 4),
                    "rehearsed_over_held": round(rehearsal / real, 4),
                }
            )
    return rows


def hold(context: RankContext, arguments: Mapping[str, Any]) -> int:
    """Train two steps as a rank; return the most bytes of tensors that were alive in the second."""
    planned = Plan.parse(arguments["plan"], Path("plan.json"))
    user, workspace = load(arguments["model"]), Workspace(Path(arguments["workspace"]))
    graph = workspace.graph(user, planned)
    # A rank also keeps the order of the samples, eight bytes each, on the host.
    samples = torch.utils.data.Subset(user.dataset(), range(planned.batch))
    user = replace(user, functions={**user.functions, "dataset": lambda: samples})
    with StorageTracker() as tracker:
        job = build(context, planned, user, graph, workspace)
        job.step(0)
        tracker.peak_bytes = tracker.alive_bytes
        if context.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(context.device)
        job.step(1)
        job.finish()
    if context.device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(context.device))
    return int(tracker.peak_bytes)


if __name__ == "__main__":
    main()
