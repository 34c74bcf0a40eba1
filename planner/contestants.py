"""Contestants: the plans of one model that are compared by running them.

In come a profile, a cluster and what is asked of plans; out comes a plan for every schedule, every weight policy, every
way to shard, a team, one device, and autopar's own, or why there is none. All have as many micro-batches, but for
autopar's own, which is free, and pipelines of their own (`wsp`), which have whole mini-batches in flight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from autopar.errors import AutoparError, UsageError
from autopar.formats.cluster import Cluster
from autopar.formats.contest import Contestant
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from autopar.formats.stage import layers_text
from autopar.options.plan import MOST_TENSOR, PlanOptions, admissible_options
from autopar.ownership import Replicas
from autopar.planner.assemble import candidate_of
from autopar.planner.costs.model import CostModel
from autopar.planner.order import canonical, numbered
from autopar.planner.plan import plan
from autopar.planner.search import other_schedules
from autopar.planner.simulator.simulate import Simulator
from autopar.policies import POLICIES
from autopar.progress import Progress, no_progress
from autopar.schedules import SCHEDULES

_PIPELINE = "1f1b"
"""Whose micro-batches all have, and whose stages the other schedules."""
_ANNEALED = 5
"""Of this part of the mini-batches PipeMare reduces rates."""
_COMPARED = {"policy": "all are compared", "objective": "rows say their times and losses", "divisible": "no run can"}


def contestants(
    profile: Profile, cluster: Cluster, options: PlanOptions, steps: int, progress: Progress = no_progress
) -> tuple[Contestant, ...]:
    """Return who takes part; those that turn out to be one and the same plan are one.

    Args:
        profile: of the model.
        cluster: which devices there are.
        options: what is asked of all plans; ``stages``, and what goes with them, of one more.
        steps: how many mini-batches are trained.
        progress: told what is done.

    Raises:
        UsageError: options contradict the profile, each other or a comparison.
        InfeasibleError: nothing fits the memory.
    """
    for name in options.non_defaults(_COMPARED):
        raise UsageError(f"`{name}`: {_COMPARED[name]}; leave it out to compare by running")
    options = replace(admissible_options(options, profile), gpus=options.gpus or len(cluster.devices))
    if options.gpus == 1:
        raise UsageError("`gpus=1`: schedules are compared on several devices; pass `gpus=2`")
    return _merge(_Planning(profile, cluster, options, steps, progress).all())


@dataclass(frozen=True)
class _Planning:
    profile: Profile
    cluster: Cluster
    options: PlanOptions
    steps: int
    progress: Progress

    def all(self) -> Iterator[Contestant]:
        """Yield all contestants.

        Raises:
            AutoparError: there is no plan at all.
        """
        free = replace(self.options, stages=None, schedule="auto", chunks=None, division="split")
        own = plan(self.profile, self.cluster, free, self._tell)
        yield self._describe("autopar", own)
        if self.options.stages is not None:
            yield self._describe("dictated", plan(self.profile, self.cluster, self.options, self._tell))
        several = {"min_stages": max(2, free.min_stages)}
        pipeline = self._plan(_PIPELINE, free, schedule=_PIPELINE, **several)
        alike = replace(free, micro_batches=(pipeline.plan or own).micro_batches)
        yield self._plan("plain loop", alike, gpus=1, max_stages=1, tensor=1)._replace(is_plain=True)
        yield pipeline
        yield from self._schedules(alike, pipeline)
        alone: dict[str, Any] = {"min_stages": 1, "max_stages": 1, "use_all": True}
        for shard in self.options.shards:
            name = "data parallelism" if shard == "none" else f"data parallelism, {shard} sharded"
            yield self._plan(name, alike, **alone, tensor=1, shard=shard)
        devices, most = free.gpus or 1, MOST_TENSOR if free.tensor == "auto" else free.tensor
        team = next(size for size in (8, 4, 2, 1) if size <= most and devices % size == 0)
        if team > 1:
            whole = f"{layers_text(0, len(self.profile.layers))}:{Replicas(devices // team, team=team).text}"
            yield self._plan(f"tensor parallelism of {team}", alike, stages=whole, tensor="auto")
        for policy in (each for each in POLICIES.values() if each.minimises == "period"):
            # Pipelines of a single stage each are several, too, and have whole mini-batches in flight.
            more = {"micro_batches": 1} if policy.has_pipelines else dict[str, Any](several)
            if "anneal_steps" in policy.asks:
                more["anneal_steps"] = max(1, self.steps // _ANNEALED)
            yield self._plan(policy.name, alike, policy=policy.name, **more)

    def _schedules(self, alike: PlanOptions, pipeline: Contestant) -> Iterator[Contestant]:
        """Yield the pipeline's stages under every other schedule; where a rank has several, balanced ones."""
        found: dict[str, Contestant] = {}
        if pipeline.plan is not None:
            costs = self._costs
            own = numbered(costs, candidate_of(pipeline.plan, self.profile))
            for each in other_schedules.otherwise(Simulator(costs), alike, own):
                found[each.name] = Contestant(each.name, refusal=each.reason)
                if each.simulated_plan is not None:
                    candidate = each.simulated_plan.candidate
                    turns = any(stage.division == "round-robin" for stage in candidate.stages)
                    division = "round-robin" if turns else "split"
                    changes = {"stages": costs.text(candidate), "schedule": each.name, "division": division}
                    found[each.name] = self._plan(each.name, alike, **changes)
        why = pipeline.refusal or "the profile has no times of halved backwards, or too few layers"
        for name in (each for each in SCHEDULES if each != _PIPELINE):
            yield found.get(name, Contestant(name, refusal=why))

    def _plan(self, name: str, options: PlanOptions, **changes: Any) -> Contestant:  # noqa: ANN401
        self._tell(name, 0.0)
        try:
            return self._describe(name, plan(self.profile, self.cluster, replace(options, **changes)))
        except AutoparError as error:
            return Contestant(name, refusal=str(error))

    def _tell(self, what: str, share: float) -> None:
        """Tell what is planned; nobody knows how far that is of all."""
        self.progress(f"planning: {what}", 0.0)

    def _describe(self, name: str, found: Plan) -> Contestant:
        costs = self._costs
        texts = (costs.text(numbered(costs, candidate_of(each, self.profile))) for each in found.separate)
        return Contestant(name, found, "/".join(texts))

    @cached_property
    def _costs(self) -> CostModel:
        return canonical(CostModel(self.profile, self.cluster, self.options))


_SAME = ("micro_batches", "schedule", "weight_policy", "anneal_steps", "stages")
"""What plans of one model have alike that train alike."""


def _merge(every: Iterator[Contestant]) -> tuple[Contestant, ...]:
    """Return contestants, those with the same plan as one, under all their names."""
    found: dict[object, Contestant] = {}
    for each in every:
        key: object = each.name
        if each.plan is not None:
            key = each.is_plain, *(getattr(each.plan, name) for name in _SAME)
        known = found.get(key)
        found[key] = each if known is None else known._replace(name=f"{known.name} = {each.name}")
    return tuple(found.values())
