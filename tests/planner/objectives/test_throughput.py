"""The quickest asynchronous pipeline against all of them, and against the pipeline played through."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from math import gcd

import pytest

from autopar.errors import InfeasibleError, UsageError
from autopar.formats.cluster import Cluster
from autopar.formats.plan import Division
from autopar.formats.profile import Profile
from autopar.planner import plan
from autopar.planner.candidate import Candidate, CandidateStage
from autopar.planner.costs.model import CostModel
from autopar.planner.objectives.throughput import StashCosts, depths, quickest
from autopar.planner.options import PlanOptions
from autopar.schedules.route import routes
from random_problems import gpt_profile, local_cluster, random_cluster, random_profile, two_kinds


def _everything(
    costs: CostModel, options: PlanOptions, first: int, free: tuple[int, ...]
) -> Iterator[tuple[CandidateStage, ...]]:
    """All ways to place the layers from the first one on; of a kind, devices in cluster order."""
    if first == costs.layer_count:
        if not options.use_all or not free:
            yield ()
        return
    for kind in sorted({costs.kind_of[device] for device in free}):
        own = [device for device in free if costs.kind_of[device] == kind]
        for width in range(1, len(own) + 1):
            devices = tuple(own[:width])
            divisions: list[Division] = ["split"] if costs.divisible or width <= costs.batch else []
            divisions += ["round-robin"] if width > 1 and not costs.divisible else []
            levels = costs.recompute_levels(costs.batch, kind)
            asked = {"none": [levels[0]], "full": [levels[-1]], "auto": [levels[0], levels[-1]]}[options.recompute]
            rest = tuple(device for device in free if device not in devices)
            for stop in range(first + 1, costs.layer_count + 1):
                for behind in _everything(costs, options, stop, rest):
                    for division in divisions:
                        for level in asked:
                            shares = costs.shares(costs.batch, width, division)
                            recompute = tuple(sorted(layer for layer in level if first <= layer < stop))
                            stage = CandidateStage(first, stop, devices, shares, 1, recompute, division=division)
                            yield (stage, *behind)


def _lanes(stage: CandidateStage) -> int:
    return len(stage.devices) if stage.division == "round-robin" else 1


def _least(costs: CostModel, options: PlanOptions) -> float:
    """The least seconds per mini-batch of all pipelines that fit; infinite if none does."""
    prices, least = StashCosts(costs), float("inf")
    for stages in _everything(costs, options, 0, tuple(range(len(costs.devices)))):
        deep = depths([_lanes(stage) for stage in stages])
        placed = tuple(stage._replace(warmup=depth) for stage, depth in zip(stages, deep, strict=True))
        if all(prices.peak_bytes(stage) <= costs.limit_bytes(stage.devices) for stage in placed):
            least = min(least, max(prices.busy(Candidate(1, costs.batch, "1f1b", placed)).values()))
    return least


def _instance(seed: int) -> tuple[Profile, Cluster, PlanOptions]:
    """One in three on two kinds of device; reductions of tied parameters are not what the tables count."""
    rng = random.Random(seed)
    layers, devices = rng.choice([(4, 3), (3, 4), (5, 2), (6, 2)])
    profile, cluster = random_profile(seed, most_layers=layers), random_cluster(seed, devices)
    profile = profile.model_copy(update={"tied": ()})
    if seed % 3 == 0:
        profile, cluster = two_kinds(profile, cluster, seed)
    asked = rng.choice([{}, {}, {"use_all": True}, {"recompute": "full"}, {"recompute": "none"}, {"divisible": True}])
    return profile, cluster, PlanOptions(gpus=devices, objective="throughput", **asked)


def test_no_pipeline_that_fits_is_quicker() -> None:
    compared = bound = deep = turns = recomputing = 0
    for seed in range(250):
        profile, cluster, options = _instance(seed)
        free = quickest(StashCosts(CostModel(profile, cluster, options)), options)
        if free is None:
            assert options.use_all
            continue
        if seed % 4:
            prices = StashCosts(CostModel(profile, cluster, options))
            peak = max(map(prices.peak_bytes, free.candidate.stages))
            options = replace(options, memory_bytes=max(1, int(peak * (1.0, 0.99, 0.9, 0.75)[seed % 4])))
        costs = CostModel(profile, cluster, options)
        prices, least = StashCosts(costs), _least(costs, options)
        found = quickest(prices, options)
        if found is None:
            assert least == float("inf"), seed
            continue
        stages = found.candidate.stages
        assert found.least_s == pytest.approx(least, rel=1e-9), seed
        assert max(prices.busy(found.candidate).values()) == pytest.approx(least, rel=1e-9), seed
        assert all(prices.peak_bytes(stage) <= costs.limit_bytes(stage.devices) for stage in stages), seed
        assert [stage.warmup for stage in stages] == depths([_lanes(stage) for stage in stages])
        compared += 1
        bound += found.least_s > free.least_s * (1 + 1e-9)
        deep += max(stage.warmup for stage in stages) > 1
        turns += any(stage.division == "round-robin" for stage in stages)
        recomputing += any(stage.recompute for stage in stages)
    assert compared >= 150
    assert min(bound, deep, turns) >= 25
    assert recomputing >= 10


class _Played:
    """An asynchronous pipeline, action by action: 1F1B on every replica, messages first come, first served."""

    def __init__(self, costs: CostModel, candidate: Candidate, count: int) -> None:
        self.costs, self.stages, self.count = costs, candidate.stages, count
        self.lanes = [_lanes(stage) for stage in self.stages]
        self.arrived: dict[tuple[str, int, int], float] = {("F", 0, number): 0.0 for number in range(count)}
        self.queues: dict[tuple[int, int, int, int], float] = {}
        self.ended: dict[int, float] = {}
        self.reduced = [0.0] * len(self.stages)
        self.free = {(at, lane): 0.0 for at, lanes in enumerate(self.lanes) for lane in range(lanes)}
        self.orders = {(at, lane): self._order(at, lane) for at, lane in self.free}
        while any(self.orders.values()):
            assert sum(self._perform(*where) for where in self.orders) > 0

    def seconds(self) -> float:
        """Per mini-batch, over the middle third."""
        third = self.count // 3
        done = [self.ended[number] for number in range(self.count)]
        return (max(done[: 2 * third]) - max(done[:third])) / third

    def _order(self, at: int, lane: int) -> list[tuple[str, int]]:
        own = list(range(lane, self.count, self.lanes[at]))
        depth = min(self.stages[at].warmup, len(own))
        order = [("F", number) for number in own[:depth]]
        for index, number in enumerate(own):
            order.append(("B", number))
            order += [("F", each) for each in own[index + depth : index + depth + 1]]
        return order[::-1]

    def _perform(self, at: int, lane: int) -> int:
        """Perform what a replica can; return how much that is."""
        order, stage = self.orders[at, lane], self.stages[at]
        count = len(order)
        costs, replicas = self.costs, range(len(self.stages[at].devices))
        while order and (order[-1][0], at, order[-1][1]) in self.arrived:
            what, number = order.pop()
            began = max(self.free[at, lane], self.arrived[what, at, number])
            if what == "F":
                own = max(costs.forward_s(stage, replica) for replica in replicas) + costs.profile.step_overhead_s
                after, kind = at + 1, "F" if at + 1 < len(self.stages) else "B"
                self.free[at, lane] = began + own
                if kind == "B":
                    self.arrived["B", at, number] = self.free[at, lane]
            else:
                own = max(costs.backward_s(stage, replica, 1) for replica in replicas) + costs.update_s(stage)
                after, kind = at - 1, "B"
                self.free[at, lane] = began + own
            if 0 <= after < len(self.stages) and (what == "B" or after > at):
                self._send(what, at, after, number, self.free[at, lane])
            if what == "B" and at == 0:
                self.ended[number] = self.free[at, lane]
        return count - len(order)

    def _send(self, what: str, at: int, to: int, number: int, when: float) -> None:
        ends = sorted((at, to))
        flow = self.costs.flows.between(0, self.stages[ends[0]].stop, self.stages[ends[0]].stop, self.costs.layer_count)
        size = flow.bytes_per_sample if what == "F" else flow.gradient_bytes_per_sample
        seconds = 0.0
        if flow.gradients if what == "B" else flow.tensors:
            before, after = (self.stages[end] for end in ends)
            level = self.costs.links.level((*before.devices, *after.devices))
            routed = [route for route in routes(before, after) if route.carries(number)]
            rows = max(self.costs.message_bytes(route, self.costs.batch, 1) for route in routed)
            seconds = self.costs.links.message_s(rows * size, level)
        queue = (at, number % self.lanes[at], to, number % self.lanes[to])
        self.queues[queue] = max(self.queues.get(queue, 0.0), when) + seconds
        self.arrived[what, to, number] = self.queues[queue]


def test_no_pipeline_runs_quicker_than_it_is_priced_and_without_transfers_none_slower() -> None:
    equal = slower = 0
    for seed in range(120):
        profile, cluster, options = _instance(seed)
        if seed % 2:
            tensors = [each.model_copy(update={"bytes_per_sample": 0}) for each in profile.tensors]
            links = [each.model_copy(update={"latency_s": 0.0}) for each in cluster.links]
            profile = profile.model_copy(update={"tensors": tuple(tensors)})
            cluster = cluster.model_copy(update={"links": tuple(links), "curves": ()})
        costs = CostModel(profile, cluster, options)
        prices = StashCosts(costs)
        found = quickest(prices, options)
        if found is None:
            continue
        period = 1
        for stage in found.candidate.stages:
            period = period * _lanes(stage) // gcd(period, _lanes(stage))
        busy = prices.busy(found.candidate)
        priced = max(seconds for name, seconds in busy.items() if not name.startswith("gradients"))
        played = _Played(costs, found.candidate, 60 * period).seconds()
        assert played >= priced * (1 - 1e-6), seed
        if seed % 2:
            assert played == pytest.approx(priced, rel=1e-6, abs=1e-12), seed
            equal += len(found.candidate.stages) > 1
        slower += played > priced * 1.01
    assert equal >= 15
    assert slower >= 1


def test_reductions_are_those_of_the_cost_models_buckets() -> None:
    for seed in range(40):
        profile = random_profile(seed)
        costs = CostModel(profile, random_cluster(seed, 2), PlanOptions(gpus=2))
        prices = StashCosts(costs)
        for first in range(costs.layer_count):
            for stop in range(first + 1, costs.layer_count + 1):
                buckets = sum(size for _, size in costs.reductions.buckets(first, stop))
                assert prices.reduced_bytes[first, stop] == buckets, seed


def test_what_fits_no_memory_and_what_contradicts_is_said() -> None:
    profile, cluster = gpt_profile(), local_cluster(2)
    with pytest.raises(InfeasibleError, match="no asynchronous pipeline of 14 layers fits 2 devices"):
        plan(profile, cluster, PlanOptions(objective="throughput", memory_bytes=1000))
    for name, value in (("micro_batches", 2), ("shard", "none"), ("schedule", "gpipe"), ("min_stages", 2)):
        with pytest.raises(UsageError, match=f"^`{name}` does not go with `objective='throughput'`"):
            plan(profile, cluster, PlanOptions(objective="throughput", **{name: value}))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="`objective` must be one of step, throughput, cost;"):
        PlanOptions(objective="speed")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="narrow it with fewer `gpus`"):
        plan(profile, local_cluster(600), PlanOptions(objective="throughput"))
