"""What does a step take whose layers two ranks divide, beside torch's `parallelize_module`?

    python benchmarks/tensor_parallel.py --json benchmarks/results/tensor_parallel.json

Two ranks on CPUs of one thread each train four transformer blocks of width 512 with separate projections, two
micro-batches of four samples of 64 tokens: by autopar, which finds by itself what to divide; by `parallelize_module`,
told of every projection whether it is divided by columns or rows. Both have the same weights and samples. They make a
step each, round after round; a row gives the median step, and the median, 10th and 90th percentile of the ratio to
`parallelize_module` in the same round. Losses must agree.
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
from statistics import median, quantiles
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from autopar.capture import load
from autopar.capture.layers.export import capture
from autopar.capture.model.source import UserModel
from autopar.formats.plan import Plan
from autopar.profiler.subject import SplitSurvey
from autopar.ranks.context import RankContext
from autopar.ranks.pool import RankPool
from autopar.runtime.data import sample_order
from autopar.runtime.start.worker import build
from autopar.runtime.start.workspace import Workspace
from cut import cut
from machine import Watch

RANKS, MICRO_BATCHES, ROWS, WARM_UP = 2, 2, 4, 3
MODEL = Path(__file__).parent / "models" / "separate_heads.py"
STYLES = {"q": ColwiseParallel, "k": ColwiseParallel, "v": ColwiseParallel, "o": RowwiseParallel}
STYLES |= {"up": ColwiseParallel, "down": RowwiseParallel}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(MODEL.parents[1]), os.environ.get("PYTHONPATH", "")])
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder, RankPool(RANKS) as pool:
        user = load(str(MODEL))
        graph = capture(user, user.build(0))
        plan = cut(graph, user, "1f1b", (1,), MICRO_BATCHES, ROWS)
        splits = SplitSurvey(graph).splits(RANKS)
        cuts = {cut.parameter: cut for split in splits.values() for cut in split.cuts}
        fields = {"devices": tuple(range(RANKS)), "tensor_parallel": RANKS, "cuts": tuple(cuts.values())}
        stage = plan.stages[0].model_copy(update=fields)
        team = plan.model_copy(update={"stages": (stage,), "nodes": ()})
        Workspace(Path(folder)).prepare(user, plan, None)
        field = {"workspace": folder, "plan": team.dumps(), "rounds": arguments.rounds}
        told: Any = pool.run("tensor_parallel:train", field)
    times = {name: [max(each) for each in zip(*(rank[name] for rank in told), strict=True)] for name in told[0]}
    rows = [_row(name, times[name], times["parallelize_module"]) for name in times]
    watch.record({"rounds": arguments.rounds, "rows": rows}, arguments.json)


def train(context: RankContext, field: dict[str, Any]) -> dict[str, list[float]]:
    """Step everyone in turn; what every rank runs."""
    torch.set_num_threads(1)
    user, workspace = load(str(MODEL)), Workspace(Path(field["workspace"]))
    plan = Plan.parse(field["plan"], Path("plan.json"))
    job = build(context, plan, user, workspace.graph(user, plan), workspace)
    contestants: dict[str, Callable[[int], float]] = {
        "parallelize_module": _peer(user),
        "autopar": lambda number: job.step(number).loss,
    }
    found: dict[str, list[float]] = defaultdict(list)
    for number in range(WARM_UP + field["rounds"]):
        losses = {}
        for name, step in contestants.items():
            context.barrier()
            began_s = time.perf_counter()
            losses[name] = step(number)
            if number >= WARM_UP:
                found[name].append(time.perf_counter() - began_s)
        if context.rank == 0 and abs(losses["autopar"] - losses["parallelize_module"]) > 1e-4:
            raise RuntimeError(f"losses differ in round {number}: {losses}")
    job.finish()
    return found


def _peer(user: UserModel) -> Callable[[int], float]:
    """Return what makes a step of a module that torch divides, on the samples that autopar takes."""
    mesh = init_device_mesh("cpu", (RANKS,))
    styles = {f"{block}.{name}": style() for block in range(len(user.build(0))) for name, style in STYLES.items()}
    module = parallelize_module(user.build(0), mesh, styles)
    optimizer, data, batch = user.functions["optimizer"](module.parameters()), user.dataset(), MICRO_BATCHES * ROWS
    steps = user.sample_count(data) // batch

    def step(number: int) -> float:
        order = sample_order(user.sample_count(data), 0, number // steps)
        indices = order[number % steps * batch :][:batch].tolist()
        optimizer.zero_grad()
        total = 0.0
        for at in range(0, batch, ROWS):
            x, y = (torch.stack(each) for each in zip(*(data[index] for index in indices[at : at + ROWS]), strict=True))
            loss = user.functions["loss"](module(x), (x, y)) / MICRO_BATCHES
            loss.backward()
            total += float(loss)
        optimizer.step()
        return total

    return step


def _row(name: str, times_s: list[float], peer_s: list[float]) -> dict[str, Any]:
    ratios = [own / other for own, other in zip(times_s, peer_s, strict=True)]
    low, *_, high = quantiles(ratios, n=10)
    row = {
        "name": name,
        "step_ms": round(1e3 * median(times_s), 1),
        "over_parallelize_module": round(median(ratios), 4),
        "p10": round(low, 4),
        "p90": round(high, 4),
    }
    sys.stderr.write(f"{row}\n")
    return row


if __name__ == "__main__":
    main()
