"""Medium: planning problems of 24 to 96 layers on 16 to 128 devices, and transformers on clusters of GPUs.

    python benchmarks/medium.py --json benchmarks/results/medium.json [--only 24x16] [--jobs 2]

Every instance is planned (``--exact``, so that the fastest plan counts), without ``--exact``, by each start alone, and
every sixth one with ten times the effort. Recorded are the step, the lower bound, processor seconds, and by how much
the plan is behind the best start and behind more effort. What is recorded already is kept: run it again to go on where
it ended.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from autopar.api import Cluster as Clusters
from autopar.formats.cluster import Cluster
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from autopar.planner import PlanOptions, plan
from autopar.planner.constraints import Question as PlanQuestion
from autopar.planner.plan import starting_plans
from autopar.planner.search.best_first import search
from autopar.planner.search.judge import Best
from autopar.planner.search.local import judge_even_splits
from instances import instance
from machine import Watch

SIZES = (
    (24, 16),
    (24, 64),
    (32, 32),
    (36, 128),
    (48, 16),
    (48, 32),
    (48, 64),
    (64, 32),
    (64, 128),
    (80, 48),
    (96, 16),
    (96, 64),
    (96, 128),
)
MEMORY = {"tight": 1.0, "ample": 4.0}
"""Times what an instance's own limit is."""
MORE_EFFORT = 10

TRANSFORMERS: dict[str, tuple[dict[str, Any], str, str, int]] = {
    "llama-2-13b": (
        {
            "model_type": "llama",
            "hidden_size": 5120,
            "intermediate_size": 13824,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 40,
            "vocab_size": 32000,
            "max_position_embeddings": 2048,
        },
        "V100",
        "8x4xV100:25Gbps",
        128,
    ),
    "llama-3-8b": (
        {
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 2048,
        },
        "H100",
        "4x8xH100:400Gbps",
        128,
    ),
    "llama-3-70b": (
        {
            "model_type": "llama",
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 2048,
        },
        "H100",
        "8x8xH100:400Gbps",
        128,
    ),
    "qwen2-14b": (
        {
            "model_type": "qwen2",
            "hidden_size": 5120,
            "intermediate_size": 13824,
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "vocab_size": 152064,
            "max_position_embeddings": 2048,
        },
        "A100-80G",
        "4x8xA100-80G:200Gbps",
        128,
    ),
}
"""Configuration, kind of GPU, cluster and batch."""


class Question(NamedTuple):
    """What to plan."""

    name: str
    profile: Profile
    cluster: Cluster
    options: PlanOptions


def names() -> list[str]:
    """Return the names of all instances, those of different kinds mixed, so that a part of them is of every kind."""
    found = []
    for seed in (1, 2):
        for at, (layers, devices) in enumerate(SIZES):
            for turn, (repeated, memory) in enumerate(((False, "tight"), (True, "tight"), (False, "ample"))):
                # Given and free counts, and both shardings, in turn; every combination comes with every kind of layers.
                count = ("given", "free")[(at + turn + seed) % 2]
                shard = ("none", "auto")[(at // 2 + turn + seed) % 2]
                kind = "equal" if repeated else "unequal"
                found.append(f"{layers}x{devices}-{kind}-{memory}-{count}-{shard}-{seed}")
    found += [f"{layers}x{devices}-equal-ample-free-auto-3" for layers, devices in SIZES[:4]]
    return [*found, *TRANSFORMERS]


def question(name: str) -> Question:
    """Return the instance of a name."""
    if name in TRANSFORMERS:
        return _transformer(name)
    size, kind, memory, count, shard, seed = name.split("-")
    layers, devices = map(int, size.split("x"))
    branches = 2 if kind == "branches" else 1
    profile, cluster, options = instance(int(seed), layers, devices, repeated=kind == "equal", branches=branches)
    assert options.memory_bytes is not None
    options = replace(options, memory_bytes=int(options.memory_bytes * MEMORY[memory]))
    if count == "free":
        options = replace(options, micro_batches=None)
    return Question(name, profile, cluster, replace(options, shard=shard, exact=True))  # type: ignore[arg-type]


def _transformer(name: str) -> Question:
    configuration, gpu, cluster, batch = TRANSFORMERS[name]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(configuration))
        command = ["-m", "autopar", "profile", f"hf:{folder}", "--device", gpu, "--precision", "bf16"]
        if gpu.startswith("V100"):
            command[-1] = "fp16"
        output = Path(folder) / "profile.json"
        command += ["--batch", str(batch), "-o", str(output)]
        subprocess.run([sys.executable, *command], check=True, capture_output=True, cwd=folder)
        profile = Profile.load(output)
    return Question(name, profile, Clusters.of(cluster), PlanOptions(batch=batch, exact=True))


def timed(asked: Question) -> tuple[Plan, float]:
    """Return the plan, and the processor seconds that it took."""
    began = time.process_time()
    made = plan(asked.profile, asked.cluster, asked.options)
    return made, time.process_time() - began


def measured(name: str, more: bool) -> dict[str, Any]:
    """Return what is recorded of an instance."""
    asked = question(name)
    made, seconds = timed(asked)
    step_s, bound_s = made.predicted.step_s, made.predicted.lower_bound_s
    starts = {each: step_s for each, step_s in _starts(asked) if step_s < float("inf")}
    found = {
        "step_s": step_s,
        "lower_bound_s": bound_s,
        "gap": step_s / bound_s - 1,
        "processor_s": round(seconds, 2),
        "schedule": made.schedule,
        "micro_batches": made.micro_batches,
        "widths": [len(stage.devices) for stage in made.stages],
        "starts": starts,
        "behind_starts": step_s / min(starts.values(), default=step_s) - 1,
    }
    usual, usual_s = timed(asked._replace(options=replace(asked.options, exact=False)))
    found["usual"] = {
        "step_s": usual.predicted.step_s,
        "processor_s": round(usual_s, 2),
        "widths": [len(stage.devices) for stage in usual.stages],
        "notes": list(usual.notes),
    }
    if more:
        best = plan(asked.profile, asked.cluster, replace(asked.options, effort=MORE_EFFORT))
        found["more_effort_s"] = best.predicted.step_s
        found["behind_more_effort"] = step_s / best.predicted.step_s - 1
    return found


def _starts(asked: Question) -> Iterator[tuple[str, float]]:
    """Yield every start and the step of the best plan that it finds alone; infinite: it finds none."""
    question = PlanQuestion.of(asked.profile, asked.cluster, asked.options)
    simulator, every, options = question.simulator, question.families, question.options
    _, peers = starting_plans(question)
    found = [each.simulated_plan.candidate for each in peers if each.simulated_plan is not None]
    sharded = (any(stage.shard != "none" for stage in each.stages) for each in found)
    admitted = [each for each, parts in zip(found, sharded, strict=True) if options.shard == "auto" or not parts]
    yield "others", min((simulator.step_s(each) for each in admitted), default=float("inf"))
    even, tables = Best(), Best()
    judge_even_splits(simulator, every, options, even)
    yield "even splits", even.step_s
    search(simulator, every, options, tables)
    yield "paced and best first", tables.step_s


def summary(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the figures that the benchmark is for."""
    gaps = sorted(each["gap"] for each in found.values())
    seconds = sorted(each["processor_s"] for each in found.values())
    usual_s = sorted(each["usual"]["processor_s"] for each in found.values())
    more = [each["behind_more_effort"] for each in found.values() if "behind_more_effort" in each]
    return {
        "instances": len(found),
        "median_gap": statistics.median(gaps),
        "gap_of_nine_in_ten": gaps[int(0.9 * (len(gaps) - 1))],
        "largest_gap": gaps[-1],
        "median_processor_s": statistics.median(seconds),
        "processor_s_of_nine_in_ten": seconds[int(0.9 * (len(seconds) - 1))],
        "largest_processor_s": seconds[-1],
        "median_processor_s_without_exact": statistics.median(usual_s),
        "largest_processor_s_without_exact": usual_s[-1],
        "most_behind_usual": max(each["step_s"] / each["usual"]["step_s"] - 1 for each in found.values()),
        "most_behind_a_start": max(each["behind_starts"] for each in found.values()),
        "most_behind_more_effort": max(more, default=None),
        "tried_with_more_effort": len(more),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/medium.json"))
    parser.add_argument("--only", default="", help="instances whose names hold this")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=25.0, help="after which no further instance is begun")
    arguments = parser.parse_args()
    watch = Watch()
    known: dict[str, Any] = {}
    if arguments.json.exists():
        known = json.loads(arguments.json.read_text())["found"]
    every = [each for each in names() if arguments.only in each]
    asked = [(name, at % 6 == 0) for at, name in enumerate(every) if name not in known]
    for name, one in _done(asked, arguments.jobs, time.monotonic() + 60 * arguments.minutes):
        known[name] = one
        sys.stderr.write(
            f"{name}: {one['step_s']:.4g} s, gap {one['gap']:.1%}, {one['processor_s']} s, behind starts "
            f"{one['behind_starts']:+.2%}, behind more effort {one.get('behind_more_effort', float('nan')):+.2%}\n"
        )
        arguments.json.write_text(json.dumps({"found": known}, indent=1, allow_nan=False) + "\n")
    ordered = {each: known[each] for each in names() if each in known}
    watch.record({"summary": summary(ordered), "found": ordered}, arguments.json)


def _done(asked: Sequence[tuple[str, bool]], jobs: int, end_s: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what is measured, ``jobs`` at a time, until a moment of the clock after which none is begun."""
    left = iter(asked)
    with ProcessPoolExecutor(jobs) as pool:
        running: dict[Future[dict[str, Any]], str] = {}
        while True:
            while len(running) < jobs and time.monotonic() < end_s and (following := next(left, None)) is not None:
                running[pool.submit(measured, *following)] = following[0]
            if not running:
                return
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(done), done.result()


if __name__ == "__main__":
    main()
