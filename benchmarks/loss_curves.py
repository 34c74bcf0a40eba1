"""What do policies without flushes cost in learning? The loss beside that of plain training, mini-batch by mini-batch.

    python benchmarks/loss_curves.py --json benchmarks/results/loss_curves.json --png docs/images/loss_curves.png

A small GPT (AdamW) and a residual network (SGD with momentum) on four stages, with five seeds each, of the weights and
of the order of samples: all contestants of a seed begin alike and read the same mini-batches. With one micro-batch of a
mini-batch, delays are up to three updates, and with four of them one or two. `2bw` needs three micro-batches. PipeMare
reduces its rates for a hundred mini-batches.

A row gives, of a contestant, the mean over seeds of the mean loss of the last fifty mini-batches, their least and
largest, and how far they are above those of `sync` with the same seed: median, least and largest. Whoever is furthest
above comes first; a loss that is not a number, or a run that fails for it, is infinite. The losses themselves are
averaged over 25 mini-batches. Several runs share this machine, whose load changes no number.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import autopar
from autopar.errors import TrainingError
from machine import Watch

MODELS = {
    "GPT": Path(__file__).parent / "models" / "small_gpt.py",
    "ResNet": Path(__file__).parents[1] / "examples" / "resnet.py",
}
POLICIES = ("sync", "stash", "vertical-sync", "2bw", "predict", "pipemare")
STAGES, BATCH = 4, 16
LAST, MEAN_OF = 50, 25
ANNEAL_STEPS = 100


class Contest(NamedTuple):
    """One run."""

    model: str
    policy: str
    micro_batches: int
    seed: int


def main() -> None:
    arguments = _arguments()
    watch, count = Watch(), arguments.workers
    contests = [
        Contest(model, policy, micro_batches, seed)
        for model in MODELS
        for seed in range(arguments.seeds)
        for micro_batches in (1, 4)
        for policy in POLICIES
        if (policy, micro_batches) not in (("2bw", 1), ("sync", 1))
    ]
    losses: dict[Contest, list[float]] = {}
    # Plans name their model within the folder of the command.
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), ThreadPoolExecutor(count) as workers:
        profiles = {
            model: autopar.profile(shutil.copy(path, "."), BATCH, device="cpu") for model, path in MODELS.items()
        }
        made = workers.map(lambda each: _losses(profiles[each.model], each, arguments.steps), contests)
        for contest, found in zip(contests, made, strict=True):
            losses[contest] = found
            sys.stderr.write(f"{contest.model} {contest.policy} T={contest.micro_batches} seed {contest.seed}: ")
            sys.stderr.write(f"{_last(found):.4f}\n")
    rows = [row for model in MODELS for row in _rows(model, losses)]
    watch.record({"steps": arguments.steps, "seeds": arguments.seeds, "batch": BATCH, "rows": rows}, arguments.json)
    if arguments.png is not None:
        _draw(rows, arguments.png)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1, help="runs at a time")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    return parser.parse_args()


def _losses(profile: autopar.Profile, contest: Contest, steps: int) -> list[float]:
    """Return the loss of every mini-batch; those behind a run's failure are infinite."""
    more: dict[str, Any] = {"anneal_steps": ANNEAL_STEPS} if contest.policy == "pipemare" else {}
    policy = {} if contest.policy == "sync" else {"policy": contest.policy}
    plan = autopar.plan(
        profile,
        gpus=STAGES,
        min_stages=STAGES,
        max_stages=STAGES,
        micro_batches=contest.micro_batches,
        use_all=True,
        **policy,
        **more,
    )
    seen: list[float] = []
    try:
        autopar.train(plan, steps=steps, seed=contest.seed, progress=lambda _, loss: seen.append(loss))
    except TrainingError as error:
        if "not finite" not in str(error):
            raise
    return seen + [math.inf] * (steps - len(seen))


def _last(losses: list[float]) -> float:
    return fmean(losses[-LAST:])


def _rows(model: str, losses: dict[Contest, list[float]]) -> list[dict[str, Any]]:
    """Return a model's contestants, those furthest above plain training in front."""
    plain = {each.seed: _last(found) for each, found in losses.items() if (each.model, each.policy) == (model, "sync")}
    rows = []
    for policy, micro_batches in dict.fromkeys((each.policy, each.micro_batches) for each in losses):
        own = {each.seed: found for each, found in losses.items() if each[:3] == (model, policy, micro_batches)}
        lasts = {seed: _last(found) for seed, found in own.items()}
        above = [lasts[seed] - plain[seed] for seed in lasts]
        curves = [[fmean(each[at : at + MEAN_OF]) for at in range(0, len(each), MEAN_OF)] for each in own.values()]
        rows.append(
            {
                "model": model,
                "policy": policy,
                "micro_batches": micro_batches,
                "loss": _number(fmean(lasts.values())),
                "loss_least": _number(min(lasts.values())),
                "loss_most": _number(max(lasts.values())),
                "above_sync": _number(median(above)),
                "above_sync_least": _number(min(above)),
                "above_sync_most": _number(max(above)),
                "curves": [[_number(each) for each in curve] for curve in curves],
            }
        )
    return sorted(rows, key=lambda row: (-row["above_sync"], -row["loss"]))


def _number(value: float) -> float:
    return round(value, 4)


def _draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw every contestant's median over seeds."""
    from matplotlib import pyplot

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = pyplot.subplots(len(models), 2, figsize=(10, 7), sharex=True, squeeze=False)
    for model, (left, right) in zip(models, axes, strict=True):
        for row in (each for each in rows if each["model"] == model):
            middle = [median(each) for each in zip(*row["curves"], strict=True)]
            places = [(at + 0.5) * MEAN_OF for at in range(len(middle))]
            color = f"C{POLICIES.index(row['policy'])}"
            sync = row["policy"] == "sync"
            for axis, count in ((left, 1), (right, 4)):
                if sync or row["micro_batches"] == count:
                    axis.plot(places, middle, color="black" if sync else color, label=row["policy"], lw=1.2)
        for axis, count in ((left, 1), (right, 4)):
            axis.set_title(f"{model}, {count} micro-batch{'es' if count > 1 else ''}", fontsize=10)
            axis.set_ylabel("loss")
            axis.legend(fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("mini-batch")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
