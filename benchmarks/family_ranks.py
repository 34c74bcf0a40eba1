"""Do teams train the models of the Transformers library as single ranks do?

    python benchmarks/family_ranks.py --json benchmarks/results/family_ranks.json

With ranks as threads, every model with both kinds of attention. In processes, a pairwise cover: every two of a model,
its kind of attention, replicas and ranks of each, slices of the sequence or whole tensors, a schedule, recomputation,
and what replicas divide meet in some case. Each case trains five steps with dropout, in float64, and is held against
one rank for each replica (benchmarks/family_cases.py).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
HARNESS = TESTS / "harness"
sys.path[:0] = [str(TESTS), str(HARNESS)]

from autopar.formats.plan import Plan  # noqa: E402
from autopar.ranks.pool import RankPool  # noqa: E402
from family_cases import (  # noqa: E402
    Case,
    Differences,
    Variant,
    differences,
    family_case,
    pairwise_cover,
    thread_variants,
    train_processes,
    train_threads,
)
from machine import Watch  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--every", type=int, default=1, help="run every so manieth case only")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    watch, wrong = Watch(), list[list[object]]()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HARNESS), os.environ.get("PYTHONPATH")]))
    figures = {"threads": _run(list(thread_variants())[:: arguments.every], train_threads, wrong)}
    with RankPool(8) as pool:
        figures["processes"] = _run(pairwise_cover()[:: arguments.every], train_processes(pool), wrong)
    watch.record({**figures, "wrong": wrong}, arguments.json)
    sys.exit(bool(wrong))


def _run(
    variants: Sequence[Variant], trained: Callable[[Case, Plan, Path], list[float]], wrong: list[list[object]]
) -> dict[str, object]:
    """Return the largest differences; Gemma's norms, in float32, are left out of them."""
    worst = dict.fromkeys(Differences._fields, 0.0)
    for number, variant in enumerate(variants):
        with tempfile.TemporaryDirectory() as folder:
            case = family_case(variant.name, variant.attention, Path(folder))
            found = differences(case, variant, Path(folder), trained)
        if not found.within(variant):
            wrong.append([*variant, *found])
        if variant.name != "gemma":
            worst = {name: max(worst[name], each) for name, each in found._asdict().items()}
        sys.stderr.write(f"{number + 1} of {len(variants)}: {variant} {found}\n")
    return {"cases": len(variants), "largest_without_gemma": worst}


if __name__ == "__main__":
    main()
