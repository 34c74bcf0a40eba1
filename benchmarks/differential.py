"""Does any plan of any model train as the plain loop does?

    python benchmarks/differential.py --cases 2000 --seed 0 --output build/differential.jsonl \
        --json benchmarks/results/differential.json

Draws models from a grammar (benchmarks/fuzzing/) and plans of one to six ranks for them, takes each through profile,
plan and run, and holds the result against a plain loop by docs/howto/verify.md. Every case is *equal*, or *refused* by
a message that a part of the model accounts for. Else it is *wrong*, a *crash*, a *hang*, a *false refusal*, or *taken*
where it should have been refused. *rounding* is equal as far as the model can tell: weights moved by 1e-15 of
themselves make a difference of that size. Where a model makes torch's plain loop fail, another is drawn.

`--output` gets a line per case as it ends; cases that are there already are not run again. A third of the cases, all
sharded ones among them, have ranks as processes; those of the others are threads. Cases from number 1000000 on
(`--first 1000000`) have plans that are never flushed, and are held against the plain loop by their policy's rule; those
from 2000000 on have replicas that several ranks run together, and those from 3000000 on both. The exit code is 0 if all
cases are equal or refused, and of these at most 2 % falsely. `--case N` runs one case; with `--keep`, its model and
plan stay in that folder; with `--shrink`, parts of the model are left out as long as the outcome is the same. `--bugs`
puts each of the bugs of tests/bugs that have a case into a copy of the tree, and says after how many cases it is found;
with `--known`, these are counted from that case on.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TextIO

import torch

from fuzzing.asks import Ask
from fuzzing.bugs import fuzzed_bugs, hunt
from fuzzing.cases import PLANS, Case, Model, Result, attempt, case_of
from fuzzing.pools import Pools
from fuzzing.record import Line, append, bad, passed, read, summary
from fuzzing.shrink import shrunk
from fuzzing.workers import run_cases
from machine import Watch

HUNTED = 200
"""Cases within which a bug is found."""


def main() -> None:
    arguments = _arguments()
    if arguments.serve:
        _serve(arguments.seed)
    elif arguments.bugs:
        sys.exit(_bugs(arguments))
    elif arguments.case is not None:
        sys.exit(_one(arguments))
    else:
        sys.exit(_all(arguments))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("build/differential.jsonl"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", type=int)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--bugs", action="store_true", help="hunt the bugs of tests/bugs that have a case")
    parser.add_argument("--bug", help="the one to hunt")
    parser.add_argument("--known", action="store_true", help="begin at the case that finds it")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _all(arguments: argparse.Namespace) -> int:
    """Run all cases that are not there yet."""
    watch, output, seed = Watch(), arguments.output, arguments.seed
    output.parent.mkdir(parents=True, exist_ok=True)
    numbers = range(arguments.first, arguments.first + arguments.cases)
    known = read(output, seed)
    models: dict[int, list[int]] = {}
    for number in numbers:
        if number not in known:
            models.setdefault(number // PLANS, []).append(number)
    for line in run_cases(seed, models.values(), arguments.workers):
        append(output, line)
        known[line["case"]] = line
        if bad(line):
            sys.stderr.write(f"{_said(line)}\n")
    lines = [known[number] for number in numbers if number in known]
    watch.record({"seed": seed, **summary(lines)}, arguments.json)
    return 0 if passed(lines) else 1


def _bugs(arguments: argparse.Namespace) -> int:
    """Say after how many cases every bug is found that is put into a copy of the tree."""
    watch, found, within = Watch(), [], min(arguments.cases, HUNTED)
    for bug in fuzzed_bugs(arguments.bug):
        first = bug.fuzzed if arguments.known and bug.fuzzed is not None else arguments.first
        found.append(hunt(bug, arguments.seed, range(first, first + within), arguments.workers))
        sys.stderr.write(f"{found[-1]}\n")
    watch.record({"seed": arguments.seed, "within": within, "bugs": found}, arguments.json)
    return 0 if found and all(each["found"] for each in found) else 1


def _said(line: Line) -> str:
    command = f"python benchmarks/differential.py --seed {line['seed']} --case {line['case']} --shrink"
    said = f"{line['outcome']} ({line['where']}): {line['said'][:300]}"
    return "\n    ".join((said, command, str(line["plan"]), str(line["recipe"])))


def _serve(seed: int) -> None:
    """Answer every number of a case with its line."""
    answers, sys.stdout = sys.stdout, sys.stderr
    torch.set_num_threads(1)
    with Pools() as pools, tempfile.TemporaryDirectory() as folder:
        model: Model | None = None
        for text in sys.stdin:
            began_s = time.monotonic()
            case = case_of(seed, int(text))
            if model is None or model.recipe != case.recipe:
                model = Model(case.recipe, Path(folder) / f"model-{case.number}")
            ask, result = attempt(case, model, Path(folder) / f"case-{case.number}", pools)
            _answer(answers, _line(seed, case, ask, result, time.monotonic() - began_s))


def _answer(answers: TextIO, line: Line) -> None:
    answers.write(json.dumps(line) + "\n")
    answers.flush()


def _line(seed: int, case: Case, ask: Ask | None, result: Result, seconds: float) -> Line:
    processes = case.processes or (ask is not None and ask.shard != "none")
    return {
        "seed": seed,
        "case": case.number,
        "outcome": result.outcome,
        "where": result.where,
        "said": result.said,
        "plan": None if ask is None else str(ask),
        "schedule": None if ask is None else ask.schedule,
        "shard": None if ask is None else ask.shard,
        "recompute": None if ask is None else ask.recompute,
        "ranks": "processes" if processes else "threads",
        "recipe": repr(case.recipe),
        "seconds": round(seconds, 2),
    }


def _one(arguments: argparse.Namespace) -> int:
    """Run a case by itself."""
    torch.set_num_threads(1)
    case = case_of(arguments.seed, arguments.case)
    with Pools() as pools, tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        began_s = time.monotonic()
        ask, result = attempt(case, Model(case.recipe, folder), folder / "plan", pools)
        line = _line(arguments.seed, case, ask, result, time.monotonic() - began_s)
        sys.stdout.write(f"{_said(line)}\n")
        if arguments.shrink:
            least, ask, result = shrunk(case, ask, result, folder, pools)
            sys.stdout.write(f"least: {_said(_line(arguments.seed, least, ask, result, 0.0))}\n")
            Model(least.recipe, folder)
    return int(bad(line))


if __name__ == "__main__":
    main()
