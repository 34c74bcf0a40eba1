"""Does the search with teams find the fastest plan, and what do teams cost a search and gain a plan?

    python benchmarks/tensor_search.py --json benchmarks/results/tensor_search.json
    python benchmarks/tensor_search.py --oracle 0 --milp 0 --medium 8 --more 0

- ``oracle``: small random problems whose layers split in any way: an exact search finds the step of the fastest of all
  plans, each simulated, and no bound is above it; every fifth one is asked of the mixed-integer program, too.
- ``medium``: instances of medium.py whose layers split, but for two of them: a part in t computes more than 1/t of its
  layer, and sums what crosses the boundary. Each is planned with ``--exact``: none is behind ``--tensor 1``, nor behind
  the best uniform layout; of every ``--more`` ones, how far behind ten times the effort.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from dataclasses import replace
from math import log2
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "harness")]

# ruff: noqa: E402
import medium
from autopar.formats.cuts import ParameterCut
from autopar.formats.plan import Plan
from autopar.formats.profile import Layer, LayerSplit, PartCosts, PartSum, Profile
from autopar.planner import PlanOptions, plan
from machine import Watch
from searched import agreed
from team_problems import planned_s, team_problem

SIZES = (2, 4, 8)
BYTES = ("parameters_bytes", "trainable_bytes", "gradient_bytes", "optimizer_bytes", "update_bytes")
FIRST = 1000
WHOLE = 2
"""Layers of an instance that do not split."""
EVERY_MILP = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--oracle", type=int, default=300)
    parser.add_argument("--medium", type=int, default=40)
    parser.add_argument(
        "--more", type=int, default=8, help="of so many instances one with ten times the effort; 0: none"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    watch, found = Watch(), dict[str, Any]()
    if arguments.oracle:
        found["oracle"] = _held_against_all(arguments.oracle)
    if arguments.medium:
        found["medium"] = _beside(arguments.medium, arguments.more)
    watch.record(found, arguments.json)
    sys.exit(any(part["wrong"] for part in found.values()))


def _held_against_all(count: int) -> dict[str, Any]:
    wrong: list[dict[str, Any]] = []
    with_teams = programs = 0
    for seed in range(FIRST, FIRST + count):
        question = team_problem(seed)
        try:
            best = agreed(*question, seed)
        except AssertionError as error:
            wrong.append({"seed": seed, "said": str(error)})
            continue
        teams = [stage.team for stage in best.fastest.candidate.stages] if best.fastest is not None else []
        with_teams += max(teams, default=1) > 1
        if seed % EVERY_MILP == 0:
            programs += 1
            program_s, search_s = planned_s(*question[:2], replace(question[2], solver="milp")), planned_s(*question)
            if program_s != search_s and abs(program_s / search_s - 1) > 1e-9:
                wrong.append({"seed": seed, "milp_s": program_s, "search_s": search_s})
    return {"problems": count, "fastest_with_teams": with_teams, "programs": programs, "wrong": wrong}


def _beside(count: int, more: int) -> dict[str, Any]:
    names = [each for each in medium.names() if each not in medium.TRANSFORMERS]
    rows = []
    for at, name in enumerate(names[:: max(1, len(names) // count)][:count]):
        asked = medium.question(name)
        profile, options = _split(asked.profile, at), replace(asked.options, exact=True)
        own, own_s = _timed(profile, asked, options)
        alone, alone_s = _timed(profile, asked, replace(options, tensor=1))
        uniform = [each.step_s for each in own.alternatives if each.name.startswith("best uniform") and each.step_s]
        row = {
            "instance": name,
            "step_s": own.predicted.step_s,
            "gap": own.predicted.step_s / own.predicted.lower_bound_s - 1,
            "largest_team": max(stage.tensor_parallel for stage in own.stages),
            "over_tensor_1": own.predicted.step_s / alone.predicted.step_s - 1,
            "over_uniform": own.predicted.step_s / min(uniform) - 1 if uniform else None,
            "cpu_s": round(own_s, 1),
            "cpu_over_tensor_1": round(own_s / alone_s, 2),
        }
        if more and at % more == 0:
            longer, _ = _timed(profile, asked, replace(options, effort=10))
            row["over_ten_times_the_effort"] = own.predicted.step_s / longer.predicted.step_s - 1
        rows.append(row)
        sys.stderr.write(f"{row}\n")
    return {
        "instances": len(rows),
        "median_gap": statistics.median(row["gap"] for row in rows),
        "largest_gap": max(row["gap"] for row in rows),
        "median_cpu_over_tensor_1": statistics.median(row["cpu_over_tensor_1"] for row in rows),
        "wrong": [row for row in rows if max(row["over_tensor_1"], row["over_uniform"] or 0.0) > 1e-9],
        "rows": rows,
    }


def _timed(profile: Profile, asked: medium.Question, options: PlanOptions) -> tuple[Plan, float]:
    began = time.process_time()
    return plan(profile, asked.cluster, options), time.process_time() - began


def _split(profile: Profile, seed: int) -> Profile:
    """Return a profile whose layers split, but for a few."""
    draw = random.Random(seed)
    whole = set(draw.sample(range(len(profile.layers)), WHOLE))
    crossing = {tensor.producer: tensor.bytes_per_sample for tensor in profile.tensors}
    layers = (
        layer if at in whole else layer.model_copy(update={"splits": _splits(draw, layer, crossing.get(layer.name, 0))})
        for at, layer in enumerate(profile.layers)
    )
    return profile.model_copy(update={"layers": tuple(layers)})


def _splits(draw: random.Random, layer: Layer, exchanged: int) -> tuple[LayerSplit, ...]:
    found, more = [], draw.uniform(0.03, 0.15)
    for count in SIZES:
        cut = ParameterCut(parameter=f"{layer.name}.w", dim=0, parts=tuple(((at, at + 1),) for at in range(count)))
        found.append(LayerSplit(count=count, cuts=(cut,), part=_part(layer, count, 1 + more * log2(count), exchanged)))
    return tuple(found)


def _part(layer: Layer, count: int, slower: float, exchanged: int) -> PartCosts:
    share = slower / count
    costs = []
    for cost in layer.costs:
        points = ("forward", "backward_input")
        size = exchanged * cost.micro_batch
        sums = tuple(PartSum(kind="all_reduce", at=at, ranks=count, bytes=size) for at in points)  # type: ignore[arg-type]
        saved = tuple(
            each.model_copy(update={"bytes": each.bytes // count}) if "/" in each.storage else each
            for each in cost.saved
        )
        seconds = {name: share * getattr(cost, name) for name in ("forward_s", "backward_s")}
        costs.append(cost.model_copy(update={**seconds, "saved": saved, "sums": sums}))
    sizes = {name: -(-getattr(layer, name) // count) for name in BYTES}
    return PartCosts(costs=tuple(costs), update_s=layer.update_s / count, **sizes)


if __name__ == "__main__":
    main()
