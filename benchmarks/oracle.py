"""Oracle: is every exact plan of small random problems the fastest of all plans that there are?

    python benchmarks/oracle.py --count 1000 --json benchmarks/results/oracle.json

Each problem has up to 8 layers or 6 devices, one in three devices of two kinds, and mostly a limit of memory that the
fastest plan without one exceeds. It is planned with ``--gap 0``, by `1f1b` or `gpipe`, and the oracle of the tests
(`tests/oracles/exhaustive.py`) simulates every plan whose stages have devices of one kind. Both steps are to agree to a
billionth, or both are to find that nothing fits. Data parallelism over devices of two kinds is no plan of the oracle's,
but one that planning begins with: where it is faster, it is what the plan is held against. What disagrees is recorded
by its seed, and makes the exit code 1. The file holds what was compared so far: run it again to go on.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "harness")]

# ruff: noqa: E402
from autopar.errors import InfeasibleError
from autopar.formats.cluster import Cluster
from autopar.formats.profile import Profile
from autopar.planner import PlanOptions, plan
from autopar.planner.candidate import Candidate
from autopar.planner.constraints import Question
from autopar.planner.plan import starting_plans
from machine import Watch
from oracles.exhaustive import fastest_s
from random_problems import small_question

SAME = 1e-9
"""Relative difference up to which two steps are one: the same sums, added up in another order."""
FIRST = 1_000_000
"""Seed of the first problem; those of the tests are below."""
SAVED = 20
"""Problems after which the file is written."""


class Problem(NamedTuple):
    """What to plan."""

    profile: Profile
    cluster: Cluster
    options: PlanOptions
    free_s: float
    """The planner's step where no memory is limited."""

    @classmethod
    def of(cls, seed: int) -> Problem:
        """Return the problem of a seed."""
        profile, cluster, options = small_question(seed)
        options = replace(options, schedule="gpipe" if seed % 4 == 3 else "1f1b")
        free = plan(profile, cluster, options).predicted
        if seed % 5:
            share = (0.999, 0.95, 0.9, 0.8)[seed % 4]
            options = replace(options, memory_bytes=max(1, int(share * max(free.peak_bytes))))
        return cls(profile, cluster, options, free.step_s)

    def planned_s(self) -> float:
        """Return the step of the plan; infinite where nothing fits."""
        try:
            return plan(*self[:3]).predicted.step_s
        except InfeasibleError:
            return inf

    def on_two_kinds_s(self) -> float:
        """Return the fastest step of what planning begins with that has devices of two kinds in a stage."""
        question = Question.of(*self[:3])
        found = [each.simulated_plan for each in starting_plans(question)[0] if each.simulated_plan is not None]
        return min((each.step_s for each in found if _is_mixed(question, each.candidate)), default=inf)


def _is_mixed(question: Question, candidate: Candidate) -> bool:
    """Whether the options admit a plan of which a stage has devices of several kinds."""
    kinds = [{question.costs.kind_of[device] for device in stage.devices} for stage in candidate.stages]
    return max(map(len, kinds)) > 1 and question.excluding_option(candidate) is None


@dataclass
class Record:
    """What was compared so far."""

    instances: int = 0
    equal: int = 0
    with_a_plan: int = 0
    limits_that_bind: int = 0
    """Problems whose memory makes the step longer, or leaves no plan."""
    fastest_on_two_kinds: int = 0
    """Problems whose fastest plan is data parallelism over devices of two kinds."""
    worst_relative_difference: float = 0.0
    disagreements: list[dict[str, Any]] = field(default_factory=list)

    def add(self, seed: int, problem: Problem) -> None:
        """Plan a problem, simulate all its plans, and count whether they agree."""
        step_s, oracle_s, mixed_s = problem.planned_s(), fastest_s(*problem[:3]), problem.on_two_kinds_s()
        truth_s = min(oracle_s, mixed_s)
        difference = 0.0 if step_s == truth_s else abs(step_s / truth_s - 1)
        self.instances += 1
        self.with_a_plan += truth_s < inf
        self.limits_that_bind += truth_s > problem.free_s * (1 + SAME)
        self.fastest_on_two_kinds += mixed_s < oracle_s
        self.equal += difference <= SAME
        if difference > SAME:
            self.disagreements.append({"seed": seed, "step_s": str(step_s), "oracle_s": str(truth_s)})
        if max(step_s, truth_s) < inf:
            self.worst_relative_difference = max(self.worst_relative_difference, difference)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=FIRST, help="seed of the first problem")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    watch, record = Watch(), Record()
    if arguments.json is not None and arguments.json.exists():
        known = json.loads(arguments.json.read_text())
        record = Record(**{name: known[name] for name in asdict(record)})
    for seed in range(arguments.first + record.instances, arguments.first + arguments.count):
        record.add(seed, Problem.of(seed))
        if arguments.json is not None and record.instances % SAVED == 0:
            arguments.json.write_text(json.dumps(asdict(record), indent=1) + "\n")
            sys.stderr.write(f"{record.instances}: {record.equal} equal\n")
    watch.record(asdict(record), arguments.json)
    sys.exit(int(record.equal < record.instances))


if __name__ == "__main__":
    main()
