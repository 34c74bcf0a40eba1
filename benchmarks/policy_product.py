"""Does training without flushes equal its rule for all that goes together?

    python benchmarks/policy_product.py --json benchmarks/results/policy_product.json

The whole product: one to four stages, depths PA, PB and others, one to three micro-batches and K_0 - 1, four
optimizers, with and without recomputation, dropout and replicas that split micro-batches or, under `stash`, take
mini-batches in turn, five policies, on a chain of layers with ranks as threads, in float64. Each case trains 20
mini-batches, and is held against the rule carried out in one process (tests/oracles/unflushed.py), which knows nothing
of programs. Recorded are the largest difference of parameters, over their largest, and how many cases were bit-equal;
what a rule has not (`predict` with plain SGD, `2bw` with fewer than K_0 - 1 micro-batches, dropout of replicas that
split, whose shares the one process does not draw for) is left out, and so are depths with which replicas in turn would
wait for each other for ever.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "harness")]

from autopar.schedules.check import ProgramError, check  # noqa: E402
from autopar.schedules.expand import expand  # noqa: E402
from machine import Watch  # noqa: E402
from oracles.unflushed import RULES  # noqa: E402
from policy_cases import differs, planned  # noqa: E402

OPTIMIZERS = ("sgd", "momentum", "adam", "adamw")
ALLOWED = 1e-10


class Case(NamedTuple):
    """One of the product."""

    policy: str
    depths: tuple[int, ...]
    micro_batches: int
    optimizer: str
    recompute: bool
    dropout: bool
    replicas: str
    """Of every other stage: ``""``, ``split`` or ``turns``."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--every", type=int, default=1, help="run every so manieth case only")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    watch, cases = Watch(), list(_cases())[:: arguments.every]
    worst, exact, stuck, wrong = 0.0, 0, 0, []
    with ProcessPoolExecutor(arguments.workers) as workers:
        for number, (case, found) in enumerate(zip(cases, workers.map(_difference, cases, chunksize=8), strict=True)):
            if found is None:
                stuck += 1
                continue
            worst, exact = max(worst, found), exact + (found == 0.0)
            if found > ALLOWED:
                wrong.append([*case, found])
                sys.stderr.write(f"{case}: {found}\n")
            if number % 100 == 0:
                sys.stderr.write(f"{number} of {len(cases)}: {worst:.1e} at most\n")
    figures = {"cases": len(cases) - stuck, "largest": worst, "bit_equal": exact, "wrong": wrong, "stuck": stuck}
    watch.record(figures, arguments.json)
    sys.exit(bool(wrong))


def _cases() -> Iterator[Case]:
    for stages, policy in product(range(1, 5), RULES):
        for depths in dict.fromkeys(_depths(stages)):
            counts = dict.fromkeys((1, 2, 3, max(1, depths[0] - 1)))
            for each in product(counts, OPTIMIZERS, (False, True), (False, True), ("", "split", "turns")):
                case = Case(policy, depths, *each)
                if (policy, case.optimizer) == ("predict", "sgd") or (case.dropout and case.replicas == "split"):
                    continue
                if case.replicas == "turns" and (policy, case.micro_batches) != ("stash", 1):
                    continue
                if policy != "2bw" or case.micro_batches >= depths[0] - 1:
                    yield case


def _depths(stages: int) -> Iterator[tuple[int, ...]]:
    yield tuple(stages - at for at in range(stages))
    yield tuple(2 * (stages - at) - 1 for at in range(stages))
    yield tuple(2 + (stages - at) // 2 for at in range(stages))


def _difference(case: Case) -> float | None:
    """Return how far a case is from its rule; None where its replicas would wait for each other for ever."""
    wide = [at for at in range(len(case.depths)) if case.replicas and at % 2 == 0]
    widths: Sequence[int] = [2 if at in wide else 1 for at in range(len(case.depths))]
    special = {"DROPS": 0.3} if case.dropout else {}
    turns = wide if case.replicas == "turns" else []
    with tempfile.TemporaryDirectory() as folder:
        made = partial(planned, special=special, widths=widths, recompute=case.recompute, turns=turns)
        plan = made(Path(folder), case.optimizer, case.policy, case.depths, case.micro_batches)
        try:
            check(expand(plan), plan)
        except ProgramError:
            return None
        return differs(Path(folder), plan)


if __name__ == "__main__":
    main()
