"""Does a job train what a script changes between steps as the script's own loop does?

    python benchmarks/scripts.py --cases 500 --seed 0 --json benchmarks/results/scripts.json

Draws scripts (benchmarks/random_scripts.py): models, losses that read closures, globals, objects and trainers, and
changes before steps: of numbers, rates, modes, buffers, tensors, frozen parameters. Each is trained plainly over two
epochs of a loader that shuffles, and by a job of a plan of one to four ranks, as processes. Every case is *equal*, or
*refused* by name; else it is *wrong*. `--case N` runs one and shows both. The exit code is 0 if none is wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from autopar.errors import AutoparError
from autopar.ranks.pool import RankPool
from machine import Watch

HERE = Path(__file__).parent
HARNESS = HERE.parent / "tests" / "harness"
sys.path[:0] = [str(HARNESS)]
os.environ["PYTHONPATH"] = os.pathsep.join((str(HARNESS), str(HERE), os.environ.get("PYTHONPATH", "")))

from random_scripts import difference, draw, plan_of, train_plainly  # noqa: E402

EXACT = 1e-9
"""Relative difference of losses and of sums of weights, in float64."""


def main() -> int:
    arguments = _arguments()
    torch.set_num_threads(1)
    watch = Watch()
    chosen = range(arguments.seed * 10**6, arguments.seed * 10**6 + arguments.cases)
    numbers = chosen if arguments.case is None else [arguments.case]
    outcomes, ranks, said = Counter[str](), Counter[int](), Counter[str]()
    wrong: list[dict[str, Any]] = []
    pool: RankPool | None = None
    try:
        for number in numbers:
            if pool is None:
                pool = RankPool(4, imports=["random_scripts"])
            plan = plan_of(number)
            try:
                plainly, outcome = train_plainly(number), _by_a_job(pool, number, plan)
            except AutoparError as error:
                pool, plainly, outcome = None, {}, {"failed": str(error)}
            found = _judged(plainly, outcome)
            outcomes[found] += 1
            ranks[len(plan.devices)] += 1
            if "refused" in outcome:
                said[outcome["refused"].partition(";")[0]] += 1
                sys.stderr.write(
                    f"case {number}, {[name for _, name, _ in draw(number).changes]}: {outcome['refused']}\n"
                )
            if found == "wrong" or arguments.case is not None:
                changes = [(at, name) for at, name, _ in draw(number).changes]
                wrong += [{"case": number, "ranks": len(plan.devices), "changes": changes, **outcome, "plain": plainly}]
                sys.stderr.write(f"{wrong[-1]}\n")
    finally:
        if pool is not None:
            pool.close()
    found_by = {"cases": len(numbers), "outcomes": outcomes, "ranks": ranks, "refusals": said, "wrong": wrong}
    watch.record(found_by, arguments.json)
    return bool(outcomes["wrong"])


def _by_a_job(pool: RankPool, number: int, plan: Any) -> dict[str, Any]:  # noqa: ANN401
    arguments = {"number": number, "plan": plan.dumps()}
    every: list[dict[str, Any]] = pool.run("random_scripts:train_by_a_job", arguments, ranks=len(plan.devices))
    unlike = any(each.get("losses") != every[0].get("losses") for each in every)
    return {"failed": "ranks have other losses"} if unlike else every[0]


def _judged(plainly: dict[str, Any], outcome: dict[str, Any]) -> str:
    if "refused" in outcome:
        return "refused"
    return "equal" if "failed" not in outcome and difference(plainly, outcome) < EXACT else "wrong"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
