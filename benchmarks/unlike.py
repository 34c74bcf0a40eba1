"""Are plans of devices of several kinds the best of all, and their shares of rows nearly the best?

    python benchmarks/unlike.py --json benchmarks/results/unlike.json
    python benchmarks/unlike.py --oracle 0 --shares 20 --steps 0

- ``oracle``: random problems of at most three layers on two or three devices of two kinds, every second with little
  memory: an exact search finds the step of the fastest of all plans, with any devices in any stage, and no bound is
  above it.
- ``shares``: of the first such problems whose fastest plan has a stage of both kinds, every vector of shares of these
  stages, with every depth and set of layers that runs again, beside the shares that the rule gives.
- ``ranks``: two ranks with a core each, one of which a second process shares: what the planned shares gain over equal
  ones, measured and simulated (`unlike_ranks.py`). Wants an otherwise idle machine.

Of a file that is there, the part that is not run stays, with its date.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "harness")]

# ruff: noqa: E402
from autopar.planner import PlanOptions
from autopar.planner.candidate import Candidate, CandidateStage
from autopar.planner.costs.model import CostModel
from autopar.planner.search.depths import depth_choices, span_of
from autopar.planner.search.judge import Best
from autopar.planner.simulator.simulate import Simulator
from machine import Watch
from mixed_problems import mixed as mixed_stages
from mixed_problems import mixed_problem
from searched import agreed, searched
from unlike_ranks import shares_at_work

FIRST = 5000
BETTER = 0.01
"""By which other shares may be better."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--oracle", type=int, default=300)
    parser.add_argument("--shares", type=int, default=100)
    parser.add_argument("--steps", type=int, default=12, help="of each contestant that two ranks train; 0: none")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    watch, found = Watch(), dict[str, Any]()
    if arguments.json and arguments.json.exists():
        kept = json.loads(arguments.json.read_text())
        found = {name: kept[name] for name in ("oracle", "shares", "ranks") if name in kept}
    ran = {"date": f"{date.today()}"}
    if arguments.oracle:
        found["oracle"] = ran | _held_against_all(arguments.oracle)
    if arguments.shares:
        found["shares"] = ran | _held_against_shares(arguments.shares)
    if arguments.steps:
        folder = str(Path(__file__).parent)
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        found["ranks"] = ran | shares_at_work(arguments.steps, warm_up=1)
    watch.record(found, arguments.json)
    sys.exit(bool(found.get("oracle", {}).get("wrong")))


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _held_against_all(count: int) -> dict[str, Any]:
    wrong, mixed, with_a_plan = list[dict[str, Any]](), 0, 0
    for seed in range(FIRST, FIRST + count):
        profile, cluster, options = mixed_problem(seed)
        try:
            best = agreed(profile, cluster, options, seed)
        except AssertionError as error:
            wrong.append({"seed": seed, "said": str(error)[:300]})
            continue
        if best.fastest is not None:
            with_a_plan += 1
            mixed += bool(mixed_stages(CostModel(profile, cluster, options), best.fastest.candidate))
        _tell(f"oracle, seed {seed}: {len(wrong)} wrong, {mixed} with stages of both kinds")
    return {"problems": count, "with_a_plan": with_a_plan, "with_stages_of_both_kinds": mixed, "wrong": wrong}


def _held_against_shares(count: int) -> dict[str, Any]:
    better, seed = list[dict[str, Any]](), FIRST
    met = 0
    while met < count:
        profile, cluster, options = mixed_problem(seed)
        fastest = searched(profile, cluster, options)[0].fastest
        costs = CostModel(profile, cluster, options)
        if fastest is not None and mixed_stages(costs, fastest.candidate):
            met += 1
            best = Best()
            for each in _every_share(costs, options, fastest.candidate):
                best.judge(Simulator(costs), each)
            gain = 1 - best.step_s / fastest.step_s
            if gain > BETTER:
                shares = [stage.shares for stage in best.fastest.candidate.stages] if best.fastest else None
                own = [stage.shares for stage in fastest.candidate.stages]
                better.append({"seed": seed, "gain": gain, "shares": shares, "by_speed": own})
            _tell(f"shares, seed {seed}: {gain:.3%} better, {len(better)} of {met} by over {BETTER:.0%}")
        seed += 1
    return {"problems": count, "better_by_over": BETTER, "better": better}


def _every_share(costs: CostModel, options: PlanOptions, candidate: Candidate) -> Iterator[Candidate]:
    """Yield a candidate with all shares of its stages of several kinds, and whatever is in flight and runs again."""
    rows, mixed = candidate.micro_batch_size, mixed_stages(costs, candidate)
    ways: list[list[CandidateStage]] = []
    for at, stage in enumerate(candidate.stages):
        every = product(range(1, rows + 1), repeat=len(stage.devices)) if at in mixed else [stage.shares]
        ways.append(
            [stage._replace(shares=each, recompute=()) for each in every if sum(each) == rows or at not in mixed]
        )
    family = candidate.family
    for stages in product(*ways):
        deep = [stage._replace(warmup=stage.replicas.most(candidate.micro_batches)) for stage in stages]
        spans = [span_of(costs, family, options, stage) for stage in deep]
        yield from depth_choices(costs, family, deep, spans, exact=True).candidates


if __name__ == "__main__":
    main()
