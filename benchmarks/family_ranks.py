"""Do teams of rank processes train the models of the Transformers library as single ranks do?

    python benchmarks/family_ranks.py --json benchmarks/results/family_ranks.json

A pairwise cover: every two of a model, its kind of attention, replicas and ranks of each, slices of the sequence or
whole tensors, a schedule, recomputation, and what replicas divide meet in some case. Each trains five steps with
dropout, in float64, on processes that the cases share, and is held against one rank for each replica
(tests/harness/family_cases.py).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
HARNESS = TESTS / "harness"
sys.path[:0] = [str(TESTS), str(HARNESS)]

from autopar.ranks.pool import RankPool  # noqa: E402
from family_cases import differences, family_case, pairwise_cover, train_processes  # noqa: E402
from machine import Watch  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--every", type=int, default=1, help="run every so manieth case only")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    watch, variants = Watch(), pairwise_cover()[:: arguments.every]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HARNESS), os.environ.get("PYTHONPATH")]))
    worst, wrong = {"losses": 0.0, "gradients": 0.0, "parameters": 0.0}, []
    with RankPool(8) as pool:
        trained = train_processes(pool)
        for number, variant in enumerate(variants):
            with tempfile.TemporaryDirectory() as folder:
                case = family_case(variant.name, variant.attention, Path(folder))
                found = differences(case, variant, Path(folder), trained)
            if not found.within(variant):
                wrong.append([*variant, *found])
            if variant.name != "gemma":
                worst = {name: max(worst[name], each) for name, each in found._asdict().items()}
            sys.stderr.write(f"{number + 1} of {len(variants)}: {variant.name} {found}\n")
    figures = {"cases": len(variants), "largest_without_gemma": worst, "wrong": wrong}
    watch.record(figures, arguments.json)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
