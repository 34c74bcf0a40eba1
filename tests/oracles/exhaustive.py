"""Exhaustive: every plan simulated; the truth on small problems.

Shares with the search its costs and its simulator only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product
from typing import NamedTuple

import numpy as np

from autopar.formats.cluster import Cluster
from autopar.formats.profile import Profile
from autopar.options.plan import PLANNED, PlanOptions
from autopar.ownership import Division, Replicas, shards_of
from autopar.planner.bounds import candidate_bound_s
from autopar.planner.candidate import Candidate, CandidateStage, Family, divisors, within
from autopar.planner.constraints import Constraints
from autopar.planner.costs.model import CostModel
from autopar.planner.pool import DeviceGroup, groups_of
from autopar.planner.search.judge import Best
from autopar.planner.shares import by_speed
from autopar.planner.simulator.simulate import Simulator


class Exhausted(NamedTuple):
    """What is known when every plan is simulated."""

    step_s: float
    """Of the fastest plan that fits; infinite if none does."""
    least_bound_s: float
    """The least bound of a plan that fits."""


class _Free(NamedTuple):
    """The devices that are left while stages take theirs."""

    groups: tuple[tuple[int, DeviceGroup], ...]
    """Kind and devices of all groups of :func:`autopar.planner.pool.groups_of`."""
    left: tuple[int, ...]
    """By group."""
    begun: tuple[int, ...] = ()
    """Groups of which stages have devices, in the order in which they came to have them."""

    @classmethod
    def of(cls, costs: CostModel) -> _Free:
        """Return all devices."""
        groups = [(kind, group) for kind, own in sorted(groups_of(costs).items()) for group in own]
        return cls(tuple(groups), tuple(len(group.devices) for _, group in groups))

    def taken(self, *, mixed: bool) -> Iterator[tuple[tuple[int, ...], _Free]]:
        """Yield the devices that a stage may have, any number of each group, of one kind or of several."""
        kinds = list(dict.fromkeys(kind for kind, _ in self.groups))
        for some in [kinds] if mixed else [[kind] for kind in kinds]:
            own = [at for at, (kind, _) in enumerate(self.groups) if kind in some]
            for counts in product(*(range(self.left[at] + 1) for at in own)):
                if any(counts):
                    yield self._take(dict(zip(own, counts, strict=True)))

    def _take(self, counts: dict[int, int]) -> tuple[tuple[int, ...], _Free]:
        """Order replicas as stages do: of groups that are alike, those first that were begun first."""
        some = [at for at, count in counts.items() if count]
        begun = (*self.begun, *(at for at in some if at not in self.begun))
        devices: list[int] = []
        for at in sorted(some, key=lambda at: (self.groups[at][0], self.groups[at][1].alike, begun.index(at))):
            devices += self.groups[at][1].devices[-self.left[at] :][: counts[at]]
        left = tuple(count - counts.get(at, 0) for at, count in enumerate(self.left))
        return tuple(devices), self._replace(left=left, begun=begun)


class _Frame(NamedTuple):
    """What all stages of a plan have in common."""

    micro_batches: int
    rows: int
    schedule: str
    edges: tuple[int, ...]
    constraints: Constraints


def exhaust(simulator: Simulator, options: PlanOptions, best: Best) -> Exhausted:
    """Improve on ``best`` by simulating every plan that fits."""
    least_s = float("inf")
    for candidate in everything(simulator.costs, options):
        if best.judge(simulator, candidate) is not None:
            least_s = min(least_s, candidate_bound_s(simulator.costs, candidate))
    return Exhausted(best.step_s, least_s)


def fastest_s(profile: Profile, cluster: Cluster, options: PlanOptions) -> float:
    """Return the step of the fastest plan that fits; infinite if none does."""
    options = replace(options, gpus=options.gpus or len(cluster.devices))
    return exhaust(Simulator(CostModel(profile, cluster, options)), options, Best()).step_s


def everything(costs: CostModel, options: PlanOptions) -> Iterator[Candidate]:
    """Yield every candidate: all micro-batch counts, cuts, devices, divisions, shards, recomputations and depths."""
    for frame in _frames(costs, options):
        for stages in _stages(costs, options, frame, 0, _Free.of(costs)):
            for deep in _deep(frame, stages):
                yield Candidate(frame.micro_batches, frame.rows, frame.schedule, deep)


def _frames(costs: CostModel, options: PlanOptions) -> Iterator[_Frame]:
    constraints, layers = Constraints.of(costs, options), costs.layer_count
    allowed = np.logical_or.reduce([constraints.mask((kind,)) for kind in constraints.kinds])
    for micro_batches in divisors(costs.batch):
        if options.micro_batches not in (None, micro_batches):
            continue
        for schedule in sorted(PLANNED) if options.schedule == "auto" else [options.schedule]:
            for stages in range(constraints.least_stages, constraints.most_stages + 1):
                for cuts in combinations(range(1, layers), stages - 1):
                    edges = (0, *cuts, layers)
                    if all(allowed[pair] for pair in pairwise(edges)):
                        yield _Frame(micro_batches, costs.batch // micro_batches, schedule, edges, constraints)


def _stages(
    costs: CostModel, options: PlanOptions, frame: _Frame, index: int, free: _Free
) -> Iterator[tuple[CandidateStage, ...]]:
    """Yield every way to place the stages from ``index`` on."""
    if index == len(frame.edges) - 1:
        if not options.use_all or not any(free.left):
            yield ()
        return
    for devices, rest in free.taken(mixed=costs.mixes):
        placed = list(_placed(costs, options, frame, index, devices))
        for others in _stages(costs, options, frame, index + 1, rest) if placed else ():
            for stage in placed:
                yield (stage, *others)


def _placed(
    costs: CostModel, options: PlanOptions, frame: _Frame, index: int, devices: tuple[int, ...]
) -> Iterator[CandidateStage]:
    first, stop = frame.edges[index], frame.edges[index + 1]
    for team, sliced in _teams(costs, options, devices, first, stop):
        width, kinds = len(devices) // team, {costs.kind_of[device] for device in devices}
        if any(
            len({costs.kind_of[each] for each in devices[at : at + team]}) > 1 for at in range(0, width * team, team)
        ):
            continue
        for division in _divisions(costs, frame, width):
            if len(kinds) > 1 and division != "split":
                continue
            shares = costs.shares(frame.rows, Replicas(width, division))
            for shard in shards_of(division, options.shards if width > 1 else ("none",)):
                stage = CandidateStage(first, stop, devices, shares, 1, (), shard, division, team, sliced)
                stage = by_speed(costs, stage, Family(*frame[:3]))
                if not frame.constraints.allows(first, stop, kinds, stage.shares):
                    continue
                for recompute in _recomputed(costs, options, frame, stage):
                    yield stage._replace(recompute=recompute)


def _teams(
    costs: CostModel, options: PlanOptions, devices: tuple[int, ...], first: int, stop: int
) -> Iterator[tuple[int, bool]]:
    """Yield by how many devices a replica may be run, and whether they keep slices of the sequence."""
    if options.tensor in ("auto", 1):
        yield 1, False
    layers, nodes = costs.profile.layers[first:stop], costs.links.topology.nodes
    for team in {split.count for layer in costs.profile.layers for split in layer.splits} - {1}:
        if options.tensor not in ("auto", team) or len(devices) % team:
            continue
        each = [devices[at : at + team] for at in range(0, len(devices), team)]
        if not options.across_nodes and any(len({nodes[device] for device in own}) > 1 for own in each):
            continue
        if options.sequence_parallel != "on" and any(layer.split(team) for layer in layers):
            yield team, False
        if options.sequence_parallel != "off" and _is_sliced(costs, team, {layer.name for layer in layers}):
            yield team, True


def _is_sliced(costs: CostModel, team: int, names: set[str]) -> bool:
    """Whether a tensor between some layers may be in slices everywhere that it is made or read."""
    every = {layer.name: layer.split(team) for layer in costs.profile.layers if layer.name in names}
    for tensor in costs.profile.tensors:
        ends = [tensor.producer, *tensor.consumers]
        splits = [every[name] for name in ends if name is not None and name in names]
        if tensor.producer is None or len(splits) < len(ends) or None in splits:
            continue
        cuts = [{each.tensor: each.dim for each in split.sequence} for split in splits if split is not None]
        dims = {own.get(tensor.name) for own in cuts}
        if len(dims) == 1 and None not in dims:
            return True
    return False


def _divisions(costs: CostModel, frame: _Frame, width: int) -> Iterator[Division]:
    if width <= frame.rows or costs.divisible:
        yield "split"
    if 1 < width <= frame.micro_batches and not costs.divisible:
        yield "round-robin"


def _recomputed(costs: CostModel, options: PlanOptions, frame: _Frame, stage: CandidateStage) -> list[tuple[int, ...]]:
    levels = costs.recompute_levels(frame.rows, costs.leading_form(stage))
    every = range(len(levels))
    asked = {"auto": every, "none": every[:1], "full": every[-1:]}[options.recompute]
    return sorted({within(levels[level], stage.first, stage.stop) for level in asked})


def _deep(frame: _Frame, stages: tuple[CandidateStage, ...]) -> Iterator[tuple[CandidateStage, ...]]:
    """Every choice of depths, none with more in flight than the stage before."""
    if not stages:
        yield ()
        return
    turns = stages[0].replicas.most(frame.micro_batches)
    for others in _deep(frame, stages[1:]):
        for depth in range(1, turns + 1) if frame.schedule != "gpipe" else (turns,):
            stage = stages[0]._replace(warmup=depth)
            if not others or min(stage.in_flight, frame.micro_batches) >= min(others[0].in_flight, frame.micro_batches):
                yield (stage, *others)
