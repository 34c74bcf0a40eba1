"""How well is a stage's peak memory predicted? The planner's formula and a rehearsal against training processes.

    python benchmarks/memory.py --json benchmarks/results/memory.json
    python benchmarks/memory.py --teams --json benchmarks/results/memory-teams.json
    python benchmarks/memory.py --policies --batch 2 --json benchmarks/results/memory-policies.json

Every model is profiled and cut into stages by the planner, one process each, and trained for two steps under `gpipe`
and `1f1b`; the second step counts. On the CPU, what a process holds is the bytes of all tensors that are alive at
once; on CUDA, `torch.cuda.max_memory_allocated`. Prints and writes, per stage, predicted and rehearsed over held, and
whether the largest error of a prediction is within its bound. With `--teams`, it is a small GPT in 20 plans that
are dictated with several ranks for each replica; of a stage, the rank that holds most counts. With `--policies`, it
is a GPT of width 192 in plans without flushes, of one pipeline and of two; what is held until the drain begins counts,
and nothing is rehearsed.
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

FOLDER = Path(__file__).parent
sys.path.append(str(FOLDER.parent / "tests" / "harness"))

from autopar.capture import load  # noqa: E402
from autopar.formats.plan import Plan  # noqa: E402
from autopar.hardware.kinds import estimated_cluster  # noqa: E402
from autopar.options.profile import ProfileOptions  # noqa: E402
from autopar.planner import PlanOptions, plan  # noqa: E402
from autopar.profiler import profile  # noqa: E402
from autopar.profiler.device import choose  # noqa: E402
from autopar.ranks.context import RankContext  # noqa: E402
from autopar.ranks.pool import RankPool  # noqa: E402
from autopar.runtime.rehearsal.memory import rehearse_model  # noqa: E402
from autopar.runtime.start.worker import build  # noqa: E402
from autopar.runtime.start.workspace import Workspace  # noqa: E402
from machine import Watch  # noqa: E402
from weighed import peak_between, peak_of_second_step  # noqa: E402

MODELS = FOLDER / "models"
PEAK_BOUND = 0.03
"""How far off the peak of a stage may be predicted, over what its process held."""
TEAM_RANKS = 8
TEAMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("0-5:1x2", {}),
    ("0-5:1x4", {"recompute": "full"}),
    ("0-5:1x8", {}),
    ("0-5:2x2", {"shard": "none"}),
    ("0-5:2x4", {"shard": "parameters"}),
    ("0-5:1x2", {"sequence_parallel": True}),
    ("0-5:1x4", {"sequence_parallel": True, "recompute": "full"}),
    ("0-2:1x2,3-5:1x2", {}),
    ("0-2:1x2,3-5:1x2", {"schedule": "gpipe"}),
    ("0-2:1x2,3-5:1x2", {"schedule": "gpipe", "sequence_parallel": True}),
    ("0-2:1x4,3-5:1x2", {}),
    ("0-2:1x2,3-5:1x4", {"schedule": "gpipe"}),
    ("0-2:1,3-5:1x4", {}),
    ("0-2:1x4,3-5:1", {"recompute": "full"}),
    ("0-2:2,3-5:1x4", {}),
    ("0-2:1x2,3-5:2x2", {"shard": "gradients"}),
    ("0-1:1x2,2-3:1x2,4-5:1x2", {"schedule": "zb-h1"}),
    ("0-1:1x2,2-3:1x2,4-5:1x2", {"schedule": "zb-h1", "sequence_parallel": True}),
    ("0-1:1x2,2-2:1x2,3-3:1x2,4-5:1x2", {"schedule": "interleaved"}),
    ("0-1:1x2,2-2:1x2,3-3:1x2,4-5:1x2", {"schedule": "zb-v"}),
)

_TWO, _TWO_AND_ONE = "0-2:1,3-5:1", "0-2:1,3-5:1/0-5:1"
UNFLUSHED: tuple[dict[str, Any], ...] = (
    {"policy": "stash", "stages": _TWO},
    {"policy": "stash", "stages": _TWO, "micro_batches": 2},
    {"policy": "vertical-sync", "stages": _TWO},
    {"policy": "2bw", "stages": _TWO, "micro_batches": 2},
    {"policy": "wsp", "stages": _TWO_AND_ONE, "wave": 1, "staleness": 0},
    {"policy": "wsp", "stages": _TWO_AND_ONE, "wave": 2, "staleness": 0},
    {"policy": "wsp", "stages": _TWO_AND_ONE, "wave": 2, "staleness": 1},
    {"policy": "wsp", "stages": _TWO_AND_ONE, "wave": 3, "staleness": 2},
)


def main() -> None:
    arguments = _arguments()
    watch = Watch()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    device = choose(arguments.device).type
    with RankPool(TEAM_RANKS if arguments.teams else arguments.stages, device_type=device) as pool:
        if arguments.teams:
            rows = _teams(arguments, pool)
        elif arguments.policies:
            rows = _unflushed(arguments, pool)
        else:
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
    parser.add_argument("--teams", action="store_true", help="dictated plans with several ranks for each replica")
    parser.add_argument("--policies", action="store_true", help="dictated plans without flushes")
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
        rows += _stages(planned, model, pool, {"model": name, "schedule": schedule})
    return rows


def _teams(arguments: argparse.Namespace, pool: RankPool) -> list[dict[str, Any]]:
    model = str(MODELS / "small_gpt.py")
    measured = profile(load(model), ProfileOptions(batch=arguments.batch, device=arguments.device, budget_s=2.0))
    cluster = estimated_cluster(measured, TEAM_RANKS)
    rows = []
    for stages, asked in TEAMS:
        options = PlanOptions(
            **{"micro_batches": 4, "stages": stages, "schedule": "1f1b", "recompute": "none", **asked}
        )
        rows += _stages(plan(measured, cluster, options), model, pool, {"stages": stages, **asked})
    return rows


def _unflushed(arguments: argparse.Namespace, pool: RankPool) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model, text = Path(folder, "gpt.py"), (MODELS / "small_gpt.py").read_text()
        model.write_text(
            text.replace("WIDTH, HEADS, CONTEXT, BYTES = 4, 64,", "WIDTH, HEADS, CONTEXT, BYTES = 4, 192,")
        )
        user = load(str(model))
        measured = profile(user, ProfileOptions(batch=arguments.batch, device=arguments.device, budget_s=2.0))
        cluster = estimated_cluster(measured, arguments.stages)
        for asked in UNFLUSHED:
            sys.stderr.write(f"{asked}\n")
            planned = plan(measured, cluster, PlanOptions(**{"micro_batches": 1, "recompute": "none", **asked}))
            with tempfile.TemporaryDirectory() as workspace:
                Workspace(Path(workspace)).prepare(user, planned, None)
                task = {"plan": planned.dumps(), "model": str(model), "workspace": workspace}
                held = pool.run("memory:hold_full", task, ranks=len(planned.devices))
            for rank, (peak, real) in enumerate(zip(planned.predicted.peak_bytes, map(str, held), strict=True)):
                over = round(peak / int(real), 4)
                rows.append({**asked, "stage": rank, "held_bytes": int(real), "predicted_over_held": over})
    return rows


def hold_full(context: RankContext, arguments: Mapping[str, Any]) -> int:
    """Train from a fill to a drain as a rank; return the most bytes of tensors that were alive until that began."""
    planned = Plan.parse(arguments["plan"], Path("plan.json"))
    user, workspace = load(arguments["model"]), Workspace(Path(arguments["workspace"]))
    graph, rows = workspace.graph(user, planned), planned.step_samples
    samples = torch.utils.data.Subset(user.dataset(), range(rows))
    user = replace(user, functions={**user.functions, "dataset": lambda: samples})
    steps = planned.lead + 4 * planned.span * (planned.wave or 1) * (2 + (planned.staleness or 0))
    return peak_between(lambda: build(context, planned, user, graph, workspace), steps - steps % planned.span)


def _stages(planned: Plan, model: str, pool: RankPool, what: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what every stage of a plan holds, predicted, rehearsed and trained."""
    sys.stderr.write(f"{what}\n")
    rehearsed = rehearse_model(planned, model, None)
    with tempfile.TemporaryDirectory() as folder:
        Workspace(Path(folder)).prepare(load(model), planned, None)
        task = {"plan": planned.dumps(), "model": model, "workspace": folder}
        held = pool.run("memory:hold", task, ranks=len(planned.devices))
    rows = []
    for index, (stage, peak, rehearsal) in enumerate(
        zip(planned.stages, planned.predicted.peak_bytes, rehearsed, strict=True)
    ):
        real = max(int(str(held[planned.devices.index(device)])) for device in stage.devices)
        rows.append(
            {
                **what,
                "stage": index,
                "held_bytes": real,
                "predicted_over_held": round(peak / real, 4),
                "rehearsed_over_held": round(rehearsal / real, 6),
                "rehearsed_bytes_more": rehearsal - real,
            }
        )
    return rows


def hold(context: RankContext, arguments: Mapping[str, Any]) -> int:
    """Train two steps as a rank; return the most bytes of tensors that were alive in the second."""
    planned = Plan.parse(arguments["plan"], Path("plan.json"))
    user, workspace = load(arguments["model"]), Workspace(Path(arguments["workspace"]))
    graph = workspace.graph(user, planned)
    # A rank also keeps the order of the samples on the host.
    samples = torch.utils.data.Subset(user.dataset(), range(planned.batch))
    user = replace(user, functions={**user.functions, "dataset": lambda: samples})
    if context.device.type == "cpu":
        return peak_of_second_step(lambda: build(context, planned, user, graph, workspace))
    job = build(context, planned, user, graph, workspace)
    job.step(0)
    torch.cuda.reset_peak_memory_stats(context.device)
    job.step(1)
    job.finish()
    return int(torch.cuda.max_memory_allocated(context.device))


if __name__ == "__main__":
    main()
