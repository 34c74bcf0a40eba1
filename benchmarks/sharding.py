"""Do replicas that divide what they train take as long as the planner says, and is its order of them right?

    python benchmarks/sharding.py --json benchmarks/results/sharding.json

Two replicas of a model on two ranks of one thread each: whole ones, and such that divide the optimizer's state,
gradients, or parameters too. All are in the same processes and make a step each in turn. In every round both ranks
profile the model at once, and measure the links between them; a round's predictions come from these alone. Rounds in
which other processes used more than `--quiet` cores do not count, and others are made for them, up to three times as
many. Rows give a step's median, the median prediction, and the median of predicted over measured over rounds, for the
step and for its kinds of actions.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypedDict

import torch

from autopar.capture import load
from autopar.capture.layers.export import capture
from autopar.formats.cluster import Cluster
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from autopar.options.profile import ProfileOptions
from autopar.ownership import SHARDS
from autopar.planner import simulate
from autopar.profiler import local_cluster, probe, profile
from autopar.profiler.probe import LinkMeasurements, Probe
from autopar.ranks import monitor
from autopar.ranks.context import RankContext
from autopar.ranks.pool import RankPool
from autopar.runtime.start.worker import build
from autopar.runtime.start.workspace import Workspace
from autopar.schedules.expand import expand
from cut import cut
from machine import Watch, busy_s
from race import apart

MODELS = Path(__file__).parent / "models"
RANKS = 2
MOST = 3
"""Times as many rounds as are asked for."""
# Model, micro-batches of a step, samples of one.
CASES = {
    "transformer": (4, 8),
    "narrow_transformer": (4, 8),
    "small_layers": (4, 256),
    "large_layers": (2, 128),
}
Kinds = dict[str, float]
"""Seconds by kind of action; ``step``, of all."""


class Race(TypedDict):
    """Who takes part; plain data."""

    model: str
    workspace: str
    plans: dict[str, str]
    rounds: int
    warm_up: int
    budget_s: float
    quiet: float
    steps: int


class Round(TypedDict):
    """What a rank found in one round."""

    profile: str
    links: LinkMeasurements
    times: dict[str, list[list[tuple[float, float]]]]
    """By contestant and step, when every action ran."""
    others: float
    """How many cores other processes used."""


def race(context: RankContext, field: Race) -> list[Round]:
    """Let everyone make a step in turn, and again; what every rank runs."""
    torch.set_num_threads(1)
    user, workspace = load(field["model"]), Workspace(Path(field["workspace"]))
    plans = {name: Plan.parse(text, Path("plan.json")) for name, text in field["plans"].items()}
    jobs = {name: build(context, plan, user, workspace.graph(user, plan), workspace) for name, plan in plans.items()}
    rows = next(iter(plans.values())).micro_batch_size // RANKS
    options = ProfileOptions(batch=rows, budget_s=field["budget_s"], threads=1)
    rounds: list[Round] = []
    for number in range(field["warm_up"]):
        for job in jobs.values():
            job.step(number)
    for number in range(MOST * field["rounds"]):
        began = moment(), busy_s(), own_s(context)
        with apart(context):
            found = profile(user, options).dumps()
        links = probe.measure(context, asdict(Probe(quick=True)))
        times: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in jobs}
        names = list(jobs)
        for turn in range(field["steps"]):
            first = (number + turn) % len(names)
            for name in (*names[first:], *names[:first]):
                context.barrier()
                times[name].append(jobs[name].step(number).times_s)
        ended = moment(), busy_s(), own_s(context)
        others = (ended[1] - began[1] - ended[2] + began[2]) / (ended[0] - began[0])
        rounds.append(Round(profile=found, links=links, times=times, others=others))
        quiet = sum(each["others"] <= field["quiet"] for each in rounds)
        if context.rank == 0:
            context.report({"round": number + 1, "others": round(others, 2), "quiet": quiet})
        # Rank 0 decides: clocks differ.
        if json.loads(context.gather(json.dumps(quiet))[0]) >= field["rounds"]:
            break
    return rounds


def moment() -> float:
    return time.perf_counter()


def own_s(context: RankContext) -> float:
    """Return the processor seconds of all ranks."""
    return float(sum(json.loads(each) for each in context.gather(json.dumps(time.process_time()))))


def main() -> None:
    arguments = _arguments()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    watch = Watch()
    rows = [row for case in arguments.cases.split(",") for row in _case(case, arguments)]
    watch.record({"rounds": arguments.rounds, "rows": rows}, arguments.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", default=",".join(CASES), help="models, by commas")
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count")
    parser.add_argument("--warm-up", type=int, default=1, help="steps of everyone before them")
    parser.add_argument("--budget", type=float, default=5.0, help="seconds of a profile")
    parser.add_argument("--quiet", type=float, default=0.2, help="most cores that others may use in a round")
    parser.add_argument("--steps", type=int, default=2, help="of everyone in a round")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _case(case: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    model = MODELS / f"{case}.py"
    user = load(str(model))
    graph = capture(user, user.build(0))
    micro_batches, rows = CASES[case]
    plans: dict[str, Plan] = {
        shard: cut(graph, user, "1f1b", (RANKS,), micro_batches, rows, shard=shard) for shard in SHARDS
    }
    with tempfile.TemporaryDirectory() as folder, RankPool(RANKS) as pool:
        Workspace(Path(folder)).prepare(user, plans["none"], None)
        field: Race = {
            "model": str(model),
            "workspace": folder,
            "plans": {name: plan.dumps() for name, plan in plans.items()},
            "rounds": arguments.rounds,
            "warm_up": arguments.warm_up,
            "budget_s": arguments.budget,
            "quiet": arguments.quiet,
            "steps": arguments.steps,
        }
        told: Any = pool.run(
            "sharding:race", field, watch=monitor.Watch(on_message=lambda rank, said: _say(case, said))
        )
    rounds: list[Sequence[Round]] = list(zip(*told, strict=True))
    rounds.sort(key=lambda ranks: ranks[0]["others"])
    return _rows(case, plans, rounds[: arguments.rounds])


def _say(case: str, said: Mapping[str, object]) -> None:
    if "round" in said:
        sys.stderr.write(f"{case}: {said}\n")


def _rows(case: str, plans: Mapping[str, Plan], rounds: Sequence[Sequence[Round]]) -> list[dict[str, Any]]:
    measured: dict[str, list[Kinds]] = defaultdict(list)
    predicted: dict[str, list[Kinds]] = defaultdict(list)
    for ranks in rounds:
        profiles = [Profile.parse(each["profile"], Path("profile.json")) for each in ranks]
        links = local_cluster(ranks[0]["links"], profiles[0].device, RANKS)
        for name, plan in plans.items():
            steps = [_measured(plan, step) for step in zip(*(each["times"][name] for each in ranks), strict=True)]
            measured[name].append({kind: fmean(step[kind] for step in steps) for kind in steps[0]})
            predicted[name].append(_predicted(plan, profiles, links))
    others = median(ranks[0]["others"] for ranks in rounds)
    found = {name: _row(case, name, measured[name], predicted[name], others) for name in plans}
    by_step, by_prediction = (sorted(found, key=lambda name: found[name][key]) for key in ("step_s", "predicted_s"))
    sys.stderr.write(f"{case}: measured {' < '.join(by_step)}; predicted {' < '.join(by_prediction)}\n")
    return list(found.values())


def _row(case: str, name: str, measured: Sequence[Kinds], predicted: Sequence[Kinds], others: float) -> dict[str, Any]:
    kinds = {
        kind: round(median(one[kind] / other[kind] for one, other in zip(predicted, measured, strict=True)), 3)
        for kind in measured[0]
        if all(each.get(kind, 0.0) > 0 for each in (*measured, *predicted))
    }
    row = {
        "case": case,
        "shard": name,
        "rounds": len(measured),
        "cores_used_by_others": round(others, 2),
        "step_s": round(median(each["step"] for each in measured), 4),
        "predicted_s": round(median(each["step"] for each in predicted), 4),
        "predicted_over_measured": kinds.pop("step"),
        "by_kind": kinds,
        "measured_by_kind": {kind: round(median(each[kind] for each in measured), 4) for kind in kinds},
    }
    sys.stderr.write(f"{row}\n")
    return row


def _measured(plan: Plan, ranks: Sequence[Sequence[tuple[float, float]]]) -> Kinds:
    """Return the mean over ranks of the seconds of every kind of action, and those of the longest step."""
    program = expand(plan)
    found: Kinds = defaultdict(float)
    for actions, times in zip(program.ranks, ranks, strict=True):
        for action, (start_s, end_s) in zip(actions, times, strict=True):
            found[action.kind] += (end_s - start_s) / RANKS
    found["step"] = max(times[-1][1] - times[0][0] for times in ranks)
    return found


def _predicted(plan: Plan, profiles: Sequence[Profile], links: Cluster) -> Kinds:
    found: Kinds = defaultdict(float)
    for one in profiles:
        timeline = simulate(plan, one, links)
        for event in timeline:
            found[event.action.kind] += (event.end_s - event.start_s) / RANKS / len(profiles)
        found["step"] += (timeline.end_s - one.step_overhead_s) / len(profiles)
    return found


if __name__ == "__main__":
    main()
