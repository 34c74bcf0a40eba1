"""What do policies without flushes cost in learning? The loss beside that of plain training, mini-batch by mini-batch.

    python benchmarks/loss_curves.py --json benchmarks/results/loss_curves.json --png docs/images/loss_curves.png

A small GPT (AdamW) and a residual network (SGD with momentum) on four stages, with five seeds each, of the weights and
of the order of samples: all contestants of a seed begin alike and read the same mini-batches. With one micro-batch of a
mini-batch, delays are up to three updates, and with four of them one or two. `2bw` needs three micro-batches. PipeMare
reduces its rates for a hundred mini-batches.

A row gives, of a contestant, the mean over seeds of the mean loss of the last fifty mini-batches, their least and
largest, and how far they are above those of `sync` with the same seed: median, least and largest. Whoever is furthest
above comes first; a loss that is not a number, or a run that fails for it, is infinite. The losses themselves are
averaged over 25 mini-batches. The load of this machine changes no number. With `--results`, runs that have ended are
kept there, and a benchmark that was stopped goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import autopar
from autopar.api.contests import compare_by_running
from autopar.formats.contest import Contestant, ContestResult, ContestRow
from autopar.options.contest import ContestOptions
from autopar.ranks.fork_server import forked_servers
from machine import Watch

MODELS = {
    "GPT": Path(__file__).parent / "models" / "small_gpt.py",
    "ResNet": Path(__file__).parents[1] / "examples" / "resnet.py",
}
POLICIES = ("sync", "stash", "vertical-sync", "2bw", "predict", "pipemare")
STAGES, BATCH = 4, 16
LAST, MEAN_OF = 50, 25
ANNEAL_STEPS = 100


def main() -> None:
    arguments = _arguments()
    watch, rows = Watch(), list[dict[str, Any]]()
    asked = ContestOptions(arguments.steps, arguments.seeds, results=arguments.results)
    # Plans name their model within the folder of the command.
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), forked_servers():
        for model, path in MODELS.items():
            profile = autopar.profile(shutil.copy(path, "."), BATCH, device="cpu")
            found = compare_by_running(_contestants(profile), profile, 0, asked, lambda what, _: _say(what))
            rows += _rows(model, found.rows, arguments.steps)
    watch.record({"steps": arguments.steps, "seeds": arguments.seeds, "batch": BATCH, "rows": rows}, arguments.json)
    if arguments.png is not None:
        _draw(rows, arguments.png)


def _say(what: str) -> None:
    sys.stderr.write(f"\r{what:<60}")


def _contestants(profile: autopar.Profile) -> list[Contestant]:
    """Return a plan of every policy and number of micro-batches, under the names of both."""
    found = []
    for micro_batches in (1, 4):
        for policy in POLICIES:
            if (policy, micro_batches) in (("2bw", 1), ("sync", 1)):
                continue
            more: dict[str, Any] = {"anneal_steps": ANNEAL_STEPS} if policy == "pipemare" else {}
            more |= {"min_stages": STAGES, "max_stages": STAGES, "use_all": True, "micro_batches": micro_batches}
            plan = autopar.plan(profile, gpus=STAGES, **more, **({} if policy == "sync" else {"policy": policy}))
            found.append(Contestant(f"{policy} {micro_batches}", plan))
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--results", type=lambda text: Path(text).resolve(), help="folder of runs that have ended")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    return parser.parse_args()


def _last(losses: list[float]) -> float:
    return fmean(losses[-LAST:])


def _losses(result: ContestResult, steps: int) -> list[float]:
    """Return the loss of every mini-batch; those behind where it diverged are infinite."""
    if result.failure is not None:
        raise SystemExit(result.failure)
    return [*result.loss, *[math.inf] * (steps - len(result.loss))]


def _rows(model: str, found: Sequence[ContestRow], steps: int) -> list[dict[str, Any]]:
    """Return a model's contestants, those furthest above plain training in front."""
    every = {row.contestant.name: [_losses(each, steps) for each in row.results] for row in found}
    plain = list(map(_last, every["sync 4"]))
    rows = []
    for name, own in every.items():
        policy, micro_batches = name.split()
        lasts = list(map(_last, own))
        above = [last - sync for last, sync in zip(lasts, plain, strict=True)]
        curves = [[fmean(each[at : at + MEAN_OF]) for at in range(0, len(each), MEAN_OF)] for each in own]
        rows.append(
            {
                "model": model,
                "policy": policy,
                "micro_batches": int(micro_batches),
                "loss": _number(fmean(lasts)),
                "loss_least": _number(min(lasts)),
                "loss_most": _number(max(lasts)),
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
