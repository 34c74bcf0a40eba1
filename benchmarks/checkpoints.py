"""Checkpoints: what they cost training, how soon a fault is noticed, and how soon a run goes on.

    python benchmarks/checkpoints.py --json benchmarks/results/checkpoints.json

The GPT example trains on two ranks with a checkpoint every ten steps and without, in turn, in the same processes.
A save is held against copying the same tensors. Then runs of four ranks meet faults, started by `autopar run` and by
torchrun: how long before the failure was noticed its rank had begun its last action stands in the black box. After
each, the time from `autopar run --resume` to its first step.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import autopar
from autopar.examples import gpt
from autopar.formats.checkpoint import Checkpoint
from autopar.formats.plan import Plan
from autopar.formats.report import BlackBox
from autopar.options.train import RunOptions
from autopar.ranks.pool import RankPool
from autopar.runtime.checkpoint.folder import CheckpointFolder, read_manifest
from autopar.runtime.start.launch import run
from machine import Watch

EXAMPLES = Path(__file__).parent.parent / "examples"
EVERY, STEPS = 10, 32
TIMEOUT_S = 3.0
FAULT_RANK, FAULT_STEP = 2, 5


def main() -> None:
    arguments = _arguments()
    watch = Watch()
    found: dict[str, Any] = {}
    if arguments.rounds:
        found["cost"] = _cost(arguments.rounds)
        found["pause"] = _pause(arguments.rounds)
    if arguments.faults:
        found["faults"] = [
            _faults(kind, starter, arguments.faults) for kind in ("kill", "stop") for starter in STARTERS
        ]
    watch.record(found, arguments.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _plan(file: Path, stages: str, batch: int) -> Plan:
    """Return a plan of stages in the form of `--stages`, with four micro-batches; of a model that is profiled here."""
    ranks = stages.count(",") + 1
    profile = autopar.profile(file, batch)
    return autopar.plan(profile, gpus=ranks, batch=batch, stages=stages, micro_batches=4, schedule="1f1b")


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    last = len(ordered) - 1
    return {
        "median": round(statistics.median(ordered), 4),
        "p10": round(ordered[round(0.1 * last)], 4),
        "p90": round(ordered[round(0.9 * last)], 4),
    }


def _cost(rounds: int) -> dict[str, Any]:
    """Return the ratio of seconds a step with checkpoints to those without, a pair each round."""
    file = EXAMPLES / "gpt.py"
    plan = _plan(file, "0-6:1,7-13:1", 16)
    ratios, bytes_ratios = [], []
    with RankPool(2) as pool, tempfile.TemporaryDirectory() as name:
        for number in range(rounds):
            folder = Path(name) / str(number)
            runs: list[Callable[[], float]] = [
                lambda: _seconds(plan, file, RunOptions(STEPS), pool),
                lambda folder=folder: _seconds(plan, file, RunOptions(STEPS, checkpoint=folder, every=EVERY), pool),
            ]
            # Which comes first changes, for machines get slower as they get warm.
            turns = (0, 1) if number % 2 else (1, 0)
            seconds = {turn: runs[turn]() for turn in turns}
            ratios.append(seconds[1] / seconds[0])
            place = CheckpointFolder(folder).folder_of(CheckpointFolder(folder).steps()[-1])
            files = sum(each.stat().st_size for each in place.iterdir())
            bytes_ratios.append(files / _tensor_bytes(read_manifest(place)))
            sys.stderr.write(f"round {number}: {ratios[-1]:.4f}\n")
    return {"every": EVERY, "steps": STEPS, "ratio": _spread(ratios), "bytes_over_tensors": max(bytes_ratios)}


def _seconds(plan: Plan, file: Path, options: RunOptions, pool: RankPool) -> float:
    """Return the seconds of a step, those that save included, but for the first."""
    moments: list[float] = []
    run(plan, str(file), options, lambda step, loss: moments.append(time.perf_counter()), pool=pool)
    return (moments[-1] - moments[0]) / (len(moments) - 1)


def _tensor_bytes(manifest: Checkpoint) -> int:
    found = 0
    for tensor in manifest.tensors:
        count = 1
        for size in tensor.shape:
            count *= size
        found += count * getattr(torch, tensor.dtype).itemsize
    return found


def _pause(rounds: int) -> dict[str, Any]:
    """Return how long a save holds training up, over copying the same tensors into memory that is there already."""
    batch = next(iter(DataLoader(gpt.dataset(), 16)))
    profile = autopar.profile(gpt.model(), batch, loss=gpt.loss, optimizer=gpt.optimizer)
    plan = autopar.plan(profile, gpus=1)
    ratios = []
    with (
        tempfile.TemporaryDirectory() as name,
        autopar.materialize(gpt.model(), plan, loss=gpt.loss, optimizer=gpt.optimizer) as job,
    ):
        job.step(batch)
        job.save(name, wait=True)
        manifest = read_manifest(CheckpointFolder(Path(name)).folder_of(1))
        tensors = [torch.ones(each.shape, dtype=getattr(torch, each.dtype)) for each in manifest.tensors]
        kept = [torch.empty_like(each) for each in tensors]
        for _ in range(rounds):
            job.step(batch)
            began_s = time.perf_counter()
            job.save(name)
            saved_s = time.perf_counter() - began_s
            job.step(batch)
            time.sleep(1.0)
            began_s = time.perf_counter()
            for copy, tensor in zip(kept, tensors, strict=True):
                copy.copy_(tensor)
            ratios.append(saved_s / (time.perf_counter() - began_s))
            job.save(name, wait=True)
    return {"over_copy": _spread(ratios)}


def _worker(*arguments: str) -> list[str]:
    start = ["-m", "torch.distributed.run", "--nproc-per-node", "4", "-m", "autopar", "worker", *arguments]
    return [sys.executable, *start]


def _run(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "autopar", "run", *arguments]


STARTERS: dict[str, Callable[..., list[str]]] = {"autopar run": _run, "torchrun": _worker}


def _faults(kind: str, starter: str, count: int) -> dict[str, Any]:
    """Return how long after a fault it was noticed, and how long after the command a run goes on."""
    noticed, resumed = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "mlp.py").write_bytes((EXAMPLES / "mlp.py").read_bytes())
        stages = ("--stages", "0-2:1,3-5:1,6-8:1,9-10:1", "--micro-batches", "4", "--schedule", "1f1b")
        for planning in (("profile", "mlp.py", "--batch", "32"), ("plan", "--gpus", "4", *stages)):
            subprocess.run([sys.executable, "-m", "autopar", "--quiet", *planning], cwd=folder, check=True)
        for number in range(count):
            common = ("plan.json", "--checkpoint", f"parts-{number}", "--every", "2", "--overwrite")
            fault = f"{kind}@{FAULT_RANK}:{FAULT_STEP}:B0"
            command = STARTERS[starter](*common, "--steps", "9", "--timeout", str(TIMEOUT_S), "--inject-fault", fault)
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, check=False)
            assert done.returncode, done.stderr
            assert f"rank {FAULT_RANK} (stage 2, step {FAULT_STEP}, B0@2)" in done.stderr, done.stderr
            box = BlackBox.load(folder / "report.blackbox.json")
            noticed.append(box.ranks[FAULT_RANK].actions[-1].before_s)
            if starter == "autopar run":
                resumed.append(_resumed_s(_run(*common, "--steps", "9", "--resume"), folder))
            sys.stderr.write(f"{kind} under {starter}: noticed after {noticed[-1]:.3f} s; {resumed[-1:]}\n")
    found: dict[str, Any] = {"kind": kind, "starter": starter, "runs": count, "noticed_s": _spread(noticed)}
    if kind == "stop":
        found["timeout_s"] = TIMEOUT_S
    return {**found, "resumed_s": _spread(resumed)} if resumed else found


def _resumed_s(command: list[str], folder: Path) -> float:
    began_s = time.perf_counter()
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as running:
        assert running.stderr is not None
        found = None
        for line in running.stderr:
            if found is None and re.match(r"step \d+/", line):
                found = time.perf_counter() - began_s
    assert running.returncode == 0
    assert found is not None
    return found


if __name__ == "__main__":
    main()
