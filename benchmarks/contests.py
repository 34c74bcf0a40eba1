"""Plans of the examples compared by running them: do schedules with a flush learn alike, and are times in order?

    python benchmarks/contests.py --json benchmarks/results/contests.json

The GPT and the residual network of `examples/`, as `autopar compare --run` has them on two ranks, 100 mini-batches with
two seeds each: once in float64, where the losses of all that have the plain loop's shares and micro-batches are held
against its own, and once in the model's types, where times count. Contestants run in turn, seed by seed. Of every two
whose predictions differ by more than a tenth, it is counted whether the one that is predicted to be quicker is; those
that are not are named. Let nothing else run on the machine. With `--results`, a benchmark that was stopped goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import tempfile
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import autopar
from autopar.formats.contest import ContestRow
from autopar.ranks.fork_server import forked_servers
from machine import Watch

EXAMPLES = Path(__file__).parents[1] / "examples"
BATCHES = {"gpt.py": 8, "resnet.py": 32}
RANKS, APART = 2, 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", choices=[*BATCHES], help="one of the models")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--results", type=lambda text: Path(text).resolve(), help="folder of runs that have ended")
    arguments = parser.parse_args()
    watch, found = Watch(), dict[str, Any]()
    with tempfile.TemporaryDirectory() as scratch, forked_servers():
        folder = arguments.results or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for model in [arguments.only] if arguments.only else BATCHES:
            # Plans name their model within the folder of the command.
            with contextlib.chdir(folder):
                profile, cluster = _measured(model)
                asked = {"gpus": RANKS, "steps": arguments.steps, "seeds": arguments.seeds, "results": folder}
                timed, exact = (
                    autopar.compare_runs(profile, cluster, **asked, double=double, progress=_say).rows
                    for double in (False, True)
                )
            found[model] = {**_losses(exact), **_times(timed), "rows": [_figures(row) for row in timed]}
    watch.record({"steps": arguments.steps, "seeds": arguments.seeds, "ranks": RANKS, "models": found}, arguments.json)


def _measured(model: str) -> tuple[Path, str]:
    """Return files of the model's profile and of this machine's links, measured unless they are here already."""
    profile, cluster = (Path(f"{Path(model).stem}.{kind}.json") for kind in ("profile", "cluster"))
    if not cluster.exists():
        autopar.profile(shutil.copy(EXAMPLES / model, "."), BATCHES[model], device="cpu").save(profile)
        autopar.probe(ranks=RANKS, device="cpu").save(cluster)
    return profile, str(cluster)


def _say(what: str, share: float) -> None:
    sys.stderr.write(f"\r{what:<70} {share:.0%}")


def _figures(row: ContestRow) -> dict[str, object]:
    return {name: each for name, each in row.as_dict().items() if name != "losses"}


def _losses(rows: Sequence[ContestRow]) -> dict[str, object]:
    """Return how far losses are from the plain loop's, relative, of all with its shares and micro-batches."""
    plain = next(row for row in rows if row.contestant.is_plain)
    apart = {}
    for row in rows:
        plan, own = row.contestant.plan, plain.contestant.plan
        if plan is None or own is None or row is plain or plan.weight_policy != "sync":
            continue
        shares = {stage.shares for stage in plan.stages}
        if plan.micro_batches == own.micro_batches and shares == {own.stages[0].shares}:
            pairs = zip(row.results, plain.results, strict=True)
            both = (each for one, other in pairs for each in zip(one.loss, other.loss, strict=True))
            apart[row.contestant.name] = max(abs(one / other - 1) for one, other in both)
    return {"losses_apart": apart, "losses_most_apart": max(apart.values())}


def _times(rows: Sequence[ContestRow]) -> dict[str, object]:
    """Return how many pairs whose predictions differ are in the predicted order, and those that are not."""
    timed = [(row.contestant.name, row.predicted_s, row.measured_s) for row in rows if row.predicted_s]
    known = [(name, predicted, measured) for name, predicted, measured in timed if predicted and measured]
    pairs, wrong = 0, []
    for one, other in combinations(sorted(known, key=lambda each: each[1]), 2):
        if other[1] > (1 + APART) * one[1]:
            pairs += 1
            if one[2] >= other[2]:
                wrong.append([one[0], other[0], other[1] / one[1], other[2] / one[2]])
    return {"pairs": pairs, "pairs_not_in_order": wrong}


if __name__ == "__main__":
    main()
