"""Is an exact plan of unlike devices at most what other ways to find one find?

    python benchmarks/unlike_plans.py --json benchmarks/results/unlike_plans.json
    python benchmarks/unlike_plans.py --others 50 --only "4 + 4"

Planners for mixed clusters (AMP, Metis, Sailor, FlashFlex, Galvatron and others) look at stages whose replicas all have
as many devices, of one kind or of several, and give stages layers by their speed. Here such plans are drawn: groups
filled kind by kind, or with a part of each kind, or at random, of every team and number of micro-batches. From the best
of them layers, devices, stages and micro-batches are moved on at random, as often as is asked. All have as much in
flight, and run as little again, as the memory lets them, and are priced by the same simulator as autopar's plan
(`--schedule 1f1b --exact`), on estimated profiles. Nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import autopar
from autopar.formats.profile import Profile
from autopar.hardware.clusters import cluster_named
from autopar.options.plan import PlanOptions, admissible_options
from autopar.ownership import Replicas
from autopar.planner.candidate import Family
from autopar.planner.constraints import Question
from autopar.planner.search import moves
from autopar.planner.search.judge import GivenStages, try_stages
from autopar.progress import no_progress
from machine import Watch

GPT = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_positions": 2048, "vocab_size": 50272}
MEDIUM = {**GPT, "n_embd": 1024, "n_layer": 24, "n_head": 16}
LARGE = {**GPT, "n_embd": 2560, "n_layer": 32, "n_head": 20}


class _Case(NamedTuple):
    config: dict[str, Any]
    precision: str
    cluster: str
    batch: int


CASES = {
    "4 + 4": _Case(MEDIUM, "fp16", "1x4xA100-40G+1x4xV100:100Gbps", 256),
    "8 + 8": _Case(MEDIUM, "fp16", "2x4xA100-40G+2x4xV100:25Gbps", 512),
    "4 + 4 + 4": _Case(MEDIUM, "fp16", "1x4xA100-40G+1x4xV100+1x4xTITAN-RTX:100Gbps", 192),
    "4 + 4, little memory": _Case(LARGE, "fp16", "1x4xA100-40G+1x4xV100:100Gbps", 128),
}
TEAMS = 4
KEPT = 12
"""Plans that are moved on from."""
DRAWN = 0.4
"""The share of plans that are drawn, and not moved to."""


class _Drawn(NamedTuple):
    """Stages of a plan: where they end, how many replicas each has on every kind, and what runs a replica."""

    cuts: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...]
    team: Replicas
    family: Family

    @property
    def is_one(self) -> bool:
        """Whether every stage has a layer, a replica, and a row for each."""
        widths = [sum(own) for own in self.counts]
        ordered = all(one < other for one, other in pairwise((0, *self.cuts)))
        return ordered and min(widths) > 0 and max(widths) <= self.family.micro_batch_size


class _Others:
    """Draws plans and moves on from them."""

    def __init__(self, question: Question, seed: int) -> None:
        self.question, self.costs, self.draw = question, question.costs, random.Random(seed)
        self.families = question.families
        self.kinds = sorted(set(self.costs.kind_of))
        running = moves.running_s(self.costs, 1, self.costs.teams[0], self.kinds[0])
        self.until = np.asarray(running, dtype=float)[-self.costs.layer_count :]
        self.speeds = {
            kind: 1 / float(moves.running_s(self.costs, 1, self.costs.teams[0], kind)[-1]) for kind in self.kinds
        }
        self.known: list[tuple[float, _Drawn]] = []
        self.tried = set[_Drawn]()

    def go(self, count: int) -> tuple[float, str]:
        best = float("inf"), ""
        while len(self.tried) < count:
            drawn = self.drawn() if not self.known or self.draw.random() < DRAWN else self.moved()
            if not drawn.is_one or drawn in self.tried:
                continue
            self.tried.add(drawn)
            found = self._judged(drawn)
            if found is not None:
                self.known = sorted([*self.known, (found[0], drawn)], key=lambda each: each[0])[:KEPT]
                best = min(best, found)
        return best

    def _judged(self, drawn: _Drawn) -> tuple[float, str] | None:
        left = {kind: self.costs.devices_of(kind) for kind in self.kinds}
        order = list[int]()
        for own in drawn.counts:
            for kind, count in zip(self.kinds, own, strict=True):
                order += left[kind][: count * drawn.team.team]
                del left[kind][: count * drawn.team.team]
        order += sorted(device for rest in left.values() for device in rest)
        widths, teams = [sum(own) for own in drawn.counts], [drawn.team] * len(drawn.cuts)
        given = GivenStages(drawn.cuts, widths, order, ("split",), teams if drawn.team.team > 1 else ())
        found = try_stages(self.question.simulator, [drawn.family], self.question.options, given)
        return None if found.fastest is None else (found.step_s, self.costs.text(found.fastest.candidate))

    def drawn(self) -> _Drawn:
        draw, team = self.draw, self.draw.choice(self.costs.teams)
        stages, kinds = draw.choice((1, 1, 2, 2, 2, 3, 3, 4, 4, 5, 6, 8)), draw.sample(self.kinds, len(self.kinds))
        counts = {kind: self.costs.kind_of.count(kind) // team.team for kind in self.kinds}
        if draw.random() < 0.15:
            counts = {kind: draw.randint(0, count) for kind, count in counts.items()}
        every, how = [kind for kind in kinds for _ in range(counts[kind])], draw.choice(("filled", "parts", "random"))
        if how == "filled":
            widths = [len(every) // stages] * stages
            if draw.random() < 0.4 and len(every) >= stages:
                ends = sorted(draw.sample(range(1, len(every)), stages - 1))
                widths = [after - before for before, after in pairwise((0, *ends, len(every)))]
            starts = [0, *accumulate(widths)]
            groups = [every[start : start + width] for start, width in zip(starts, widths, strict=False)]
        elif how == "parts":
            groups = [[kind for kind in self.kinds for _ in range(counts[kind] // stages)] for _ in range(stages)]
        else:
            stage_of = [draw.randrange(stages) for _ in every]
            groups = [[kind for kind, at in zip(every, stage_of, strict=True) if at == own] for own in range(stages)]
        held = tuple(tuple(own.count(kind) for kind in self.kinds) for own in groups)
        return _Drawn(self._cuts(groups), held, team, draw.choice(self.families))

    def _cuts(self, groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Return cuts by which stages have as many layers as they are quick."""
        quick = [*accumulate(sum(self.speeds[kind] for kind in own) for own in groups)]
        ends = [int(np.searchsorted(self.until, each / max(quick[-1], 1e-30) * self.until[-1])) + 1 for each in quick]
        return (*ends[:-1], self.costs.layer_count)

    def moved(self) -> _Drawn:
        draw, (_, own) = self.draw, self.draw.choice(self.known)
        cuts, counts, stages = [*own.cuts], [[*each] for each in own.counts], len(own.cuts)
        at, other, kind = draw.randrange(stages), draw.randrange(stages), draw.randrange(len(self.kinds))
        what = draw.choice(("cut", "cut", "devices", "devices", "swap", "join", "split", "count"))
        if what == "count":
            return own._replace(family=draw.choice(self.families))
        if what == "cut" and at < stages - 1:
            cuts[at] += draw.choice((-1, 1))
        elif what == "devices" and at != other:
            count = min(counts[at][kind], draw.choice((1, 1, 2, 4)))
            counts[at][kind], counts[other][kind] = counts[at][kind] - count, counts[other][kind] + count
        elif what == "swap":
            counts[at], counts[other] = counts[other], counts[at]
        elif what == "join" and at < stages - 1:
            counts[at : at + 2] = [[sum(pair) for pair in zip(*counts[at : at + 2], strict=True)]]
            del cuts[at]
        elif what == "split":
            some = [draw.randint(0, count) for count in counts[at]]
            counts[at : at + 1] = [some, [count - less for count, less in zip(counts[at], some, strict=True)]]
            cuts.insert(at, draw.randint((0, *cuts)[at], cuts[at]))
        return own._replace(cuts=tuple(cuts), counts=tuple(map(tuple, counts)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--others", type=int, default=600, help="other plans that are drawn, a case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=[*CASES])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    watch, rows = Watch(), list[dict[str, Any]]()
    profiles: dict[str, Profile] = {}
    for name, case in CASES.items():
        if arguments.only in (None, name):
            rows.append({"case": name, **_compared(case, profiles, arguments.others, arguments.seed)})
            sys.stderr.write(f"{rows[-1]}\n")
    watch.record({"others": arguments.others, "seed": arguments.seed, "rows": rows}, arguments.json)
    sys.exit(any(row["over_best_other"] > 0 for row in rows))


def _compared(case: _Case, profiles: dict[str, Profile], count: int, seed: int) -> dict[str, Any]:
    profile = _profile(case, profiles)
    cluster = cluster_named(case.cluster)
    asked: dict[str, Any] = {"batch": case.batch, "schedule": "1f1b"}
    started = time.process_time()
    own = autopar.plan(profile, cluster, **asked, exact=True).predicted
    planned_s = time.process_time() - started
    question = Question.of(profile, cluster, admissible_options(PlanOptions(**asked), profile), no_progress)
    others = _Others(question, seed)
    step_s, stages = others.go(count)
    return {
        "cluster": case.cluster,
        "layers": len(profile.layers),
        "batch": case.batch,
        "step_s": own.step_s,
        "lower_bound_s": own.lower_bound_s,
        "planned_in_s": round(planned_s, 1),
        "best_other_s": step_s,
        "best_other": stages,
        "over_best_other": own.step_s / step_s - 1,
    }


def _profile(case: _Case, profiles: dict[str, Profile]) -> Profile:
    key = json.dumps(case.config)
    if key not in profiles:
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder, "config.json")
            config.write_text(key)
            kinds = "A100-40G,V100,TITAN-RTX" if case.config is MEDIUM else "A100-40G,V100"
            asked: dict[str, Any] = {"device": kinds, "precision": case.precision, "tensor": TEAMS}
            profiles[key] = autopar.profile(f"hf:{config}", 64, **asked)
    return profiles[key]


if __name__ == "__main__":
    main()
