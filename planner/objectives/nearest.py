"""Nearest: the fastest plan found that another trainer can express: pipelines that are alike, beside each other.

Tried are all numbers of pipelines and micro-batches, stages cut evenly by time and by layers, and where a plan cuts
that is to be exported; with every schedule, sharding and recomputation that the trainer has, and with every size of
teams, if it has these. Candidates are simulated in the order of their lower bounds, and of the best ones cuts are moved
as long as that helps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice, product
from operator import itemgetter

from autopar.errors import InfeasibleError
from autopar.formats.cluster import Cluster
from autopar.formats.expressible import Expressible, Recomputation
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from autopar.formats.stage import layout_of
from autopar.options.plan import PlanOptions, admissible_options
from autopar.planner.assemble import assemble
from autopar.planner.bounds import least_s
from autopar.planner.candidate import (
    Candidate,
    CandidateStage,
    Family,
    Shape,
    chunk_counts,
    divisors,
    groups,
    splits_backward,
    with_depths,
)
from autopar.planner.constraints import Constraints
from autopar.planner.costs.model import CostModel
from autopar.planner.order import canonical
from autopar.planner.search.judge import Best
from autopar.planner.search.moves import balanced_shape, cuts_moved, standing_shape
from autopar.planner.simulator.simulate import Simulator
from autopar.schedules import SCHEDULES

MOST_MOVED = 3
"""Shapes whose cuts are moved."""
REACH = 2
MOST_SIMULATED = 4_000
"""Candidates; a count and not a clock, so that the same question has the same answer."""


class _NearestSearch:
    def __init__(
        self, costs: CostModel, options: PlanOptions, limits: Expressible, blocks: range, edges: Sequence[int]
    ) -> None:
        # No trainer's replicas take rows by their speed.
        self.costs, self.options, self.limits = costs.with_kinds_apart(), options, limits
        self.blocks, self.edges = blocks, edges
        self.simulator, self.best = Simulator(self.costs), Best()
        self.simulated = 0
        self._rules = {chunks: Constraints.of(costs, options, chunks) for chunks in (1, 2, 3, 4)}

    def run(self, cuts: Sequence[int]) -> Best:
        """Return the best candidates; ``cuts`` are those of a plan."""
        every = ((family, self._shapes(family, cuts)) for family in self._families())
        self._judge(candidate for family, shapes in every for candidate in self._candidates(family, shapes))
        visits = set[tuple[Family, Shape]]()
        for each in sorted(self.best.near.items(), key=itemgetter(1))[:MOST_MOVED]:
            self._climb(each[0], visits)
        return self.best

    def _families(self) -> Iterator[Family]:
        for schedule in self.limits.schedules or ("1f1b",):
            if self.costs.has_halves or not splits_backward(schedule):
                for count in divisors(self.costs.batch):
                    yield Family(count, self.costs.batch // count, schedule)

    def _shapes(self, family: Family, cuts: Sequence[int]) -> Iterator[Shape]:
        devices, layers = len(self.costs.devices), self.edges[-1]
        for team, width, chunks in product(self.costs.teams, divisors(devices), chunk_counts(family.schedule)):
            count, left = divmod(devices, width * team.team)
            stages, replicas = count * chunks, (team.so_many(width),) * count
            some = count > 0 and not left and not family.micro_batch_size % width and not self.limits.tensor % team.team
            if not some or stages >= len(self.edges) or not self._has(family, count, stages):
                continue
            yield balanced_shape(self.costs, family, replicas, chunks, list(self.edges))
            even = [layers * (index + 1) // stages for index in range(stages)]
            nearest = [min(self.edges[1:], key=lambda edge, cut=cut: abs(edge - cut)) for cut in even]  # type: ignore[misc]
            for each in (nearest, cuts):
                if len(set(each)) == stages and set(each) <= set(self.edges):
                    yield Shape(tuple(each), replicas)

    def _has(self, family: Family, devices: int, stages: int) -> bool:
        """Whether the trainer has pipelines of so many devices and stages."""
        few = self.limits.most_stages is None or stages <= self.limits.most_stages
        rounds = self.limits.any_count or layout_of(family.schedule) != "loop" or not family.micro_batches % devices
        alone = stages > 1 or family.schedule == "1f1b" or "1f1b" not in self.limits.schedules
        # What runs on one device is no pipeline.
        return few and rounds and alone and (devices > 1 or stages == 1)

    def _candidates(self, family: Family, shapes: Iterable[Shape]) -> Iterator[Candidate]:
        """Yield shapes in all that the trainer has: shards, recomputation and depths; where they fit the memory."""
        for shape in dict.fromkeys(shapes):
            stages = len(shape.cuts)
            shards = self.limits.shards_of(stages) if shape.widths[0] > 1 else ("none",)
            for shard, recompute in product(shards, self.limits.recomputations_of(stages)):
                needs = recompute != "none" and self.limits.recompute_needs_shards and shard == "none"
                placed = standing_shape(self.costs, family, shape, range(len(self.costs.devices)), shard)
                known = shard in self.options.shards or shard == "none"
                if known and not needs and placed is not None and not self._broken(placed, shape.chunks):
                    yield from self._in_depths(family, shape, placed, recompute)

    def _broken(self, stages: Sequence[CandidateStage], chunks: int) -> bool:
        """Whether stages are against what is known of the model and the devices, or what the trainer cannot send."""
        tied = not self.limits.tied and self.costs.tied_between(stages)
        if tied or self._skips([stage.stop for stage in stages]):
            return True
        return self._rules[chunks].broken(stages, self.costs.kind_of) is not None

    def _skips(self, cuts: Sequence[int]) -> bool:
        """Whether a tensor passes by a stage."""
        stage_of = [stage for stage, cut in enumerate(cuts) for _ in range(cut - (0, *cuts)[stage])]
        return any(
            stage_of[max(tensor.consumers)] > stage_of[tensor.producer] + 1 for tensor in self.costs.flows.crossing
        )

    def _in_depths(
        self, family: Family, shape: Shape, stages: Sequence[CandidateStage], how: Recomputation
    ) -> Iterator[Candidate]:
        """Yield stages with every depth that the trainer's schedule has, where they fit the memory."""
        warmups = SCHEDULES[family.schedule].warmups(len(shape.widths), shape.chunks, family.micro_batches)
        for each in list(warmups.values())[: None if self.limits.any_depth else 1]:
            found = self._recomputing(with_depths(family, stages, each), how)
            if found is not None and max(self.costs.shortfalls(found)) <= 0:
                yield found

    def _recomputing(self, frame: Candidate, how: Recomputation) -> Candidate | None:
        """Return a candidate that recomputes in a manner; of the first blocks as few as fit."""
        if how == "none":
            return frame
        again = range(self.costs.layer_count) if how == "all" else self.blocks
        if self.costs.once.intersection(again) or not again:
            return None
        if how != "first":
            return self._with_first(frame, again, len(again))

        def lacks(count: int) -> bool:
            return max(self.costs.shortfalls(self._with_first(frame, again, count))) > 0

        fewest = 1 + len(again) - bisect_left(range(len(again), 0, -1), True, key=lacks)
        return self._with_first(frame, again, fewest) if fewest <= len(again) else None

    @staticmethod
    def _with_first(frame: Candidate, layers: range, count: int) -> Candidate:
        """Return a candidate whose stages recompute the first ``count`` of some layers that they hold."""
        stages = (
            stage._replace(recompute=tuple(each for each in layers if stage.first <= each < stage.stop)[:count])
            for stage in frame.stages
        )
        return frame._replace(stages=tuple(stages))

    def _judge(self, candidates: Iterable[Candidate]) -> None:
        """Simulate what may be quicker than the best one, in the order of lower bounds."""
        each = self.best.judge_each(self.simulator, dict.fromkeys(candidates), bound_s=least_s)
        self.simulated += sum(1 for _ in islice(each, MOST_SIMULATED - self.simulated))

    def _climb(self, candidate: Candidate, visits: set[tuple[Family, Shape]]) -> None:
        """Move a candidate's cuts as long as that is quicker than the best one."""
        family = candidate.family
        replicas = candidate.stages[0].replicas._replace(shard="none")
        shape, step_s = Shape(candidate.cuts, (replicas,) * len(groups(candidate.stages))), float("inf")
        while (family, shape) not in visits and self.best.step_s < step_s:
            visits.add((family, shape))
            step_s = self.best.step_s
            moved = cuts_moved(shape.cuts, self.edges, range(len(shape.cuts) - 1), REACH)
            self._judge(self._candidates(family, (shape._replace(cuts=each) for each in moved)))
            assert self.best.fastest is not None
            chosen = self.best.fastest.candidate
            if chosen.family == family and len(chosen.cuts) == len(shape.cuts):
                shape = shape._replace(cuts=chosen.cuts)


def nearest_plan(
    plan: Plan, profile: Profile, cluster: Cluster, limits: Expressible, blocks: range, edges: Sequence[int]
) -> Plan:
    """Return the fastest plan that was found of those that a trainer can express, for the devices of a plan.

    Args:
        plan: that it cannot express.
        profile: that the plan was made of.
        cluster: likewise.
        limits: what the trainer can express.
        blocks: the layers that are blocks.
        edges: the layers before which the trainer may cut, 0 and the number of layers included.

    Raises:
        InfeasibleError: none fits the memory.
    """
    same = {name: getattr(plan, name) for name in ("batch", "bytes_per_s", "times_of", "replicate_state", "seed")}
    given = CostModel(profile, cluster, PlanOptions(gpus=max(plan.devices) + 1, times_of=plan.times_of))
    asked = PlanOptions(
        gpus=max(plan.devices) + 1,
        memory_bytes=_memory_bytes(plan, given),
        tensor=1 if limits.tensor == 1 else "auto",
        across_nodes=limits.tensor != 1 and _across_nodes(plan, given),
        **same,
    )
    options = admissible_options(asked, profile)
    costs = canonical(CostModel(profile, cluster, options))
    cuts = list(accumulate(len(stage.layers) for stage in plan.stages))
    best = _NearestSearch(costs, options, limits, blocks, edges).run(cuts)
    if best.fastest is None:
        raise InfeasibleError(
            f"no plan that {limits.trainer} can express fits the memory of {len(costs.devices)} devices; more of them, "
            "or a smaller `batch`, may help"
        )
    step_s, candidate = best.fastest
    return assemble(costs, candidate, options, plan.predicted.lower_bound_s, (), (), plan.predicted.bounds, step_s)


def _memory_bytes(plan: Plan, costs: CostModel) -> int | None:
    """Return the memory that a plan was made for, where it is not that of the cluster's devices."""
    limits = set(plan.predicted.limit_bytes)
    own = {costs.limit_bytes(stage.devices) for stage in plan.stages}
    if len(limits) != 1 or limits == own:
        return None
    return limits.pop() + max(kind.reserved_bytes for kind in costs.kinds)


def _across_nodes(plan: Plan, costs: CostModel) -> bool:
    """Whether the devices that run a replica of a plan together are on several nodes."""
    return any(
        costs.links.level(stage.devices[at : at + stage.tensor_parallel]) != "node"
        for stage in plan.stages
        if stage.tensor_parallel > 1
        for at in range(0, len(stage.devices), stage.tensor_parallel)
    )
