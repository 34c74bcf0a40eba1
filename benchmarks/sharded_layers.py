"""What does a layer cost beyond computing where replicas divide it, and what is that priced at?

    python benchmarks/sharded_layers.py --json benchmarks/results/sharded_layers.json

Two ranks on CPUs of one thread each train a few layers that are alike: whole replicas, and such that divide the
optimizer's state, gradients, or parameters, a step each in turn. Between the steps they gather and scatter one such
layer as the probe of links does, and, for comparison, by the bare collectives. Rows give what a forward and a backward
take beyond those of whole replicas, per layer; what gathering and scattering are priced at; and the ratio: medians over
rounds, and the first decile, which other processes disturb less.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from autopar.capture import load
from autopar.capture.layers.export import capture
from autopar.formats.plan import Plan
from autopar.ownership import SHARDS
from autopar.profiler.operations import Computing, gathering, scattering
from autopar.ranks.context import RankContext
from autopar.ranks.pool import RankPool
from autopar.runtime.start.worker import build
from autopar.runtime.start.workspace import Workspace
from cut import cut
from machine import Watch

RANKS, MICRO_BATCHES, CALLS, WARM_UP = 2, 2, 4, 2
# Renamed in torch 2.13, which warns of the names that torch 2.11 has.
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
MODELS = Path(__file__).parent / "models"
# Layers and samples of a micro-batch.
CASES = {"transformer": (3, 4), "narrow_transformer": (4, 8), "small_layers": (12, 64), "large_layers": (2, 16)}


def train(context: RankContext, field: dict[str, Any]) -> dict[str, list[Any]]:
    """Step everyone in turn, and time one layer between; what every rank runs."""
    torch.set_num_threads(1)
    user, workspace = load(field["model"]), Workspace(Path(field["workspace"]))
    plans = {name: Plan.parse(text, Path("plan.json")) for name, text in field["plans"].items()}
    jobs = {name: build(context, plan, user, workspace.graph(user, plan), workspace) for name, plan in plans.items()}
    group, size = dist.new_group(list(range(context.size))), field["bytes"]
    works = {"gather": gathering(size, group), "scatter": scattering(size, group), **_bare(size, group)}
    computing = Computing(context.device)
    (count,) = computing.counts([min(works["gather"]() for _ in range(5))])
    found: dict[str, list[Any]] = defaultdict(list)
    for number in range(WARM_UP + field["rounds"]):
        for name, work in works.items():
            for _ in range(CALLS):
                dist.barrier(group)
                computing(count)
                seconds = work()
                if number >= WARM_UP:
                    found[name].append(seconds)
        for name, job in jobs.items():
            context.barrier()
            times = job.step(number).times_s
            if number >= WARM_UP:
                found[name].append([end_s - start_s for start_s, end_s in times])
    return found


def _bare(size: int, group: dist.ProcessGroup) -> dict[str, Callable[[], float]]:
    part = torch.ones(size // 4 // RANKS)
    whole = torch.ones(part.numel() * RANKS)
    return {
        "bare gather": _timed(lambda: _GATHER(whole, part, group=group)),
        "bare scatter": _timed(lambda: _SCATTER(part, whole, group=group)),
    }


def _timed(work: Callable[[], object]) -> Callable[[], float]:
    def timed() -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", default=",".join(CASES), help="models, by commas")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(MODELS.parent), os.environ.get("PYTHONPATH", "")])
    watch = Watch()
    rows = [row for case in arguments.cases.split(",") for row in _case(case, arguments.rounds)]
    watch.record({"rounds": arguments.rounds, "rows": rows}, arguments.json)


def _case(case: str, rounds: int) -> list[dict[str, Any]]:
    layers, samples = CASES[case]
    with tempfile.TemporaryDirectory() as folder, RankPool(RANKS) as pool:
        model = Path(folder) / f"few_{case}.py"
        model.write_text(_few(case, layers))
        user = load(str(model))
        graph = capture(user, user.build(0))
        plans = {shard: cut(graph, user, "1f1b", (RANKS,), MICRO_BATCHES, samples, shard=shard) for shard in SHARDS}
        Workspace(Path(folder)).prepare(user, plans["none"], None)
        size = sum(each.nbytes for each in graph.layers[0].module.parameters())
        texts = {name: plan.dumps() for name, plan in plans.items()}
        field = {"model": str(model), "workspace": folder, "plans": texts, "rounds": rounds, "bytes": size}
        told: Any = pool.run("sharded_layers:train", field)
    times = {name: np.mean([np.array(each[name]) for each in told], axis=0) for name in told[0]}
    return [
        _row(case, size, len(graph.layers), shard, name, quantile, times)
        for name, quantile in (("median", 0.5), ("p10", 0.1))
        for shard in SHARDS[1:]
    ]


def _few(case: str, layers: int) -> str:
    """Return a model of some layers of a case's."""
    return (
        f"import sys\nsys.path.insert(0, {str(MODELS)!r})\nfrom torch import nn\nimport {case} as all_of\n"
        f"from {case} import dataset, loss, optimizer\n"
        f"def model():\n    return nn.Sequential(*list(all_of.model())[:{layers}])\n"
    )


def _row(
    case: str, size: int, layers: int, shard: str, name: str, quantile: float, times: dict[str, Any]
) -> dict[str, Any]:
    found = {key: np.quantile(each, quantile, axis=0) for key, each in times.items()}
    forwards, backwards = slice(0, 2 * MICRO_BATCHES, 2), slice(1, 2 * MICRO_BATCHES, 2)
    more = [(found[shard][each] - found["none"][each]).sum() / layers for each in (forwards, backwards)]
    every = MICRO_BATCHES if shard == "parameters" else 0
    gathers, scatters = (every or 1), (1 if shard == "optimizer" else MICRO_BATCHES)
    priced = gathers * found["gather"], every * found["gather"] + scatters * found["scatter"]
    bare = gathers * found["bare gather"], every * found["bare gather"] + scatters * found["bare scatter"]
    row = {
        "case": case,
        "layer_bytes": size,
        "shard": shard,
        "of_rounds": name,
        "forward_more_ms": round(1e3 * float(more[0]), 2),
        "backward_more_ms": round(1e3 * float(more[1]), 2),
        "priced_over_measured": round(float(sum(priced) / sum(more)), 3),
        "bare_over_measured": round(float(sum(bare) / sum(more)), 3),
        "step_ms": round(1e3 * float(found[shard].sum()), 1),
    }
    sys.stderr.write(f"{row}\n")
    return row


if __name__ == "__main__":
    main()
