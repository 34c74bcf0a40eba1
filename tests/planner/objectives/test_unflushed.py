"""Plans of weight policies have the least period of all cuts, widths and depths, and keep to the memory."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise, product
from math import lcm
from pathlib import Path

import pytest

from autopar.depths import xpipe_constants
from autopar.errors import AutoparError, InfeasibleError, UsageError
from autopar.formats.plan import Plan
from autopar.formats.profile import TiedParameter
from autopar.ownership import Replicas
from autopar.planner import PlanOptions, plan, simulate
from autopar.planner.candidate import Candidate, CandidateStage, Family, devices_of
from autopar.planner.costs.model import CostModel
from autopar.planner.objectives import unflushed
from autopar.planner.objectives.partitions import PartitionTable, PipelinePartition
from autopar.planner.objectives.unflushed import PolicyJudge
from autopar.planner.order import orders_by_kind
from autopar.planner.simulator.simulate import Simulator, pipeline_times
from random_problems import gpt_profile, launched, local_cluster, problem, random_cluster, random_profile, two_kinds

POLICIES = ("stash", "vertical-sync", "2bw")


def every(judge: PolicyJudge, devices: int, micro_batches: int) -> Iterator[Candidate]:
    """Yield all partitions into consecutive devices, of replicas that split or take turns, in all depths.

    Where no replicas take turns, that is those that get no deeper behind: others stand still for ever.
    """
    costs, rows = judge.costs, judge.costs.batch // micro_batches
    layers = costs.layer_count
    possible = [Replicas(width) for width in range(1, min(devices, rows) + 1)]
    if judge.options.policy == "stash" and micro_batches == 1 and not costs.flows.tied:
        possible += [Replicas(width, "round-robin") for width in range(2, devices + 1)]
    for count in range(1, min(layers, devices) + 1):
        for cuts in combinations(range(1, layers), count - 1):
            for ways in product(possible, repeat=count):
                if sum(each.width for each in ways) > devices:
                    continue
                edges, first, stages = [0, *cuts, layers], 0, []
                for (start, stop), own in zip(pairwise(edges), ways, strict=True):
                    placed, shares = tuple(range(first, first + own.width)), costs.shares(rows, own)
                    stages.append(CandidateStage(start, stop, placed, shares, 1, division=own.division))
                    first += own.width
                if costs.tied_between(stages) or costs.replicated_single(stages):
                    continue
                turning = any(stage.period > 1 for stage in stages)
                for depths in product(range(2 * count, 0, -1), repeat=count):
                    if not turning and list(depths) != sorted(depths, reverse=True):
                        continue
                    if judge.policy.least_micro_batches(depths[0]) > micro_batches:
                        continue
                    deep = tuple(each._replace(warmup=depth) for each, depth in zip(stages, depths, strict=True))
                    yield Candidate(micro_batches, rows, "1f1b", deep)


@pytest.mark.some(3)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(16))
def test_no_partition_and_no_depths_have_a_shorter_period(seed: int, policy: str) -> None:
    devices = 2 + seed % 2
    profile, cluster = random_profile(seed, most_layers=4, batches=(1, 2, 4)), random_cluster(seed, devices)
    profile = profile if seed % 3 else launched(profile, seed)
    options = PlanOptions(policy=policy, recompute="none", shard="none", schedule="1f1b")  # type: ignore[arg-type]
    judge = PolicyJudge(Simulator(CostModel(profile, cluster, options)), options)
    best_s = math.inf
    for micro_batches in (count for count in (1, 2, 4) if profile.batch % count == 0):
        for candidate in every(judge, devices, micro_batches):
            limits = [judge.costs.limit_bytes(stage.devices) for stage in candidate.stages]
            if all(peak <= limit for peak, limit in zip(judge.peak_bytes(candidate), limits, strict=True)):
                best_s = min(best_s, judge.simulate(candidate).period_s)
    try:
        made = plan(profile, cluster, PlanOptions(policy=policy, recompute="none"))  # type: ignore[arg-type]
    except AutoparError:
        assert best_s == math.inf
        return
    assert made.predicted.step_s <= best_s * (1 + 1e-9)
    assert made.predicted.lower_bound_s <= made.predicted.step_s
    assert all(peak <= limit for peak, limit in zip(made.predicted.peak_bytes, made.predicted.limit_bytes, strict=True))
    assert pipeline_times(simulate(made, profile, cluster), made).period_s == pytest.approx(made.predicted.step_s)


def test_stages_are_kept_where_dictated_and_kinds_taken_in_every_order() -> None:
    """The slow device is the first of the cluster, and is better off with the small stage behind."""
    profile, cluster = random_profile(10), random_cluster(10, 4)
    stages = ",".join(f"{layer}:1" for layer in range(len(profile.layers)))
    alone = PlanOptions(policy="stash", stages=f"0-{len(profile.layers) - 1}:2")
    with pytest.raises(UsageError, match="plan with `policy='sync'`, or `division='round-robin'`"):
        plan(profile, cluster, alone)
    made = plan(profile, cluster, replace(alone, division="round-robin"))
    assert [(stage.devices, stage.division) for stage in made.stages] == [((0, 1), "round-robin")]
    made = plan(profile, cluster, PlanOptions(policy="stash", stages=stages, gpus=len(profile.layers)))
    assert [stage.layers for stage in made.stages] == [(layer.name,) for layer in profile.layers]
    assert (made.weight_policy, made.schedule, made.objective) == ("stash", "1f1b", "step")
    assert Plan.parse(made.dumps(), Path("plan.json")) == made
    with pytest.raises(UsageError, match=r"no pipeline of policy pipemare obeys the options: .*`policy='sync'`"):
        plan(gpt_profile(), local_cluster(2), PlanOptions(policy="pipemare", anneal_steps=9, min_stages=2))
    profile, cluster = two_kinds(random_profile(3).model_copy(update={"tied": ()}), local_cluster(2), 3)
    assert orders_by_kind(CostModel(profile, cluster, PlanOptions())) == [(0, 1), (1, 0)]
    best_s = plan(profile, cluster, PlanOptions(policy="stash", min_stages=2, use_all=True)).predicted.step_s
    for first in range(2):
        ordered = cluster.model_copy(update={"devices": (cluster.devices[first], cluster.devices[1 - first])})
        judged = plan(profile, ordered, PlanOptions(policy="stash", min_stages=2, use_all=True)).predicted.step_s
        assert best_s == pytest.approx(judged, rel=1e-9)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"schedule": "gpipe"}, "`schedule` does not go with `policy='stash'`"),
        ({"shard": "gradients"}, "`shard='gradients'`: no versions are kept of what replicas divide"),
        ({"objective": "cost"}, "`policy='stash'` does not go with `objective='cost'`"),
        ({"exact": True}, "`exact` does not go with `policy='stash'`"),
        ({"policy": "sync", "objective": "throughput", "schedule": "gpipe"}, "`schedule` does not go with"),
        ({"policy": "sync", "objective": "throughput", "max_candidates": 5}, "`max_candidates` does not go with"),
        ({"policy": "2bw", "stages": "0-6:1,7-13:1", "micro_batches": 5}, "`micro_batches=5` does not divide"),
        ({"ahead": "counted"}, "`ahead` is of `policy='predict'`; leave it out"),
        ({"policy": "predict", "ahead": "far"}, "`ahead` must be one of counted, xpipe; found 'far'"),
        ({"policy": "sometimes"}, "`policy` must be one of sync, stash"),
    ],
)
def test_what_no_pipeline_without_flushes_has_is_refused_by_name(options: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        plan(gpt_profile(), local_cluster(2), PlanOptions(**({"policy": "stash"} | options)))  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["stash", "2bw", "predict"])
def test_stages_that_share_a_parameter_are_planned(policy: str) -> None:
    found = plan(gpt_profile(), local_cluster(2), PlanOptions(policy=policy, min_stages=2))
    assert (len(found.stages), len(found.tied), found.refusal) == (2, 1, None)


@pytest.mark.parametrize("asked", [{"policy": "stash"}, {"objective": "throughput"}])
def test_what_does_not_fit_says_with_what_it_would(asked: dict[str, str]) -> None:
    profile = random_profile(10)
    options = PlanOptions(memory_bytes=1000, **asked)  # type: ignore[arg-type]
    with pytest.raises(InfeasibleError, match="with the weight versions that it keeps; a plan fits with") as error:
        plan(profile, local_cluster(4), options)
    (size,) = re.findall(r"memory_bytes='(\d+)MiB'", str(error.value))
    assert plan(profile, local_cluster(4), replace(options, memory_bytes=int(size) * 2**20)).weight_policy == "stash"


def test_the_quickest_is_stashing_and_versions_are_charged() -> None:
    """The last stage keeps one version under stashing, and as many as the first under vertical sync."""
    profile, cluster = random_profile(10), local_cluster(4)
    quickest = plan(profile, cluster, PlanOptions(objective="throughput"))
    stash = plan(profile, cluster, PlanOptions(policy="stash"))
    assert (quickest.objective, quickest.weight_policy) == ("throughput", "stash")
    assert quickest.predicted == stash.predicted
    names = {each.name for each in quickest.alternatives}
    assert names <= {"pure data parallelism", "pure data parallelism, in turns"}
    other = plan(profile, cluster, PlanOptions(objective="throughput", policy="2bw"))
    assert (other.objective, other.weight_policy) == ("throughput", "2bw")
    assert unflushed.shallow_depths([15, 1]) == [2, 1]
    assert unflushed.shallow_depths([1, 1, 1, 1]) == [4, 3, 2, 1]
    assert unflushed.shallow_depths([3, 1, 2]) == [2, 3, 1]
    profile, cluster = random_profile(10), local_cluster(4)
    options = PlanOptions(policy="stash", stages="0:1,1-2:1,3-4:1", micro_batches=1, recompute="none")
    stash, sync = (plan(profile, cluster, replace(options, policy=each)) for each in POLICIES[:2])  # type: ignore[arg-type]
    assert [stage.warmup for stage in stash.stages] == [stage.warmup for stage in sync.stages] == [3, 2, 1]
    trained = [sum(one.trainable_bytes for one in profile.layers[own]) for own in (slice(1), slice(1, 3), slice(3, 5))]
    assert min(trained[1:]) > 0
    more = zip(sync.predicted.peak_bytes, stash.predicted.peak_bytes, strict=True)
    assert [one - other for one, other in more] == [0, trained[1], 2 * trained[2]]
    # A parameter that two layers of a stage share is kept once; an update goes on beside what is in flight.
    shared = TiedParameter(parameter="w", layers=("layer.3", "layer.4"), bytes=200_000)
    large = tuple(layer.model_copy(update={"update_bytes": 2**30}) for layer in profile.layers)
    tied = profile.model_copy(update={"tied": (shared,), "layers": large})
    stash, sync = (plan(tied, cluster, replace(options, policy=each)).predicted.peak_bytes for each in POLICIES[:2])  # type: ignore[arg-type]
    assert sync[2] - stash[2] == 2 * (trained[2] - 200_000)
    assert all(2**30 < peak < 2**31 for peak in stash)


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_predictions_of_forwards_and_backwards_are_charged(micro_batches: int) -> None:
    profile, cluster = random_profile(10, batches=(4,)), local_cluster(4)
    options = PlanOptions(policy="predict", stages="0:1,1-2:1,3-4:1", micro_batches=micro_batches, recompute="none")
    plans = {each: plan(profile, cluster, replace(options, ahead=each)) for each in ("counted", "xpipe")}  # type: ignore[arg-type]
    trained = [sum(one.trainable_bytes for one in profile.layers[own]) for own in (slice(1), slice(1, 3), slice(3, 5))]
    counted, xpipe = (plans[each].predicted.peak_bytes for each in ("counted", "xpipe"))
    stages = [[stage.warmup for stage in each.stages] for each in plans.values()]
    assert stages[0] == stages[1]
    for at, depth in enumerate(stages[0]):
        more = sum(each > 0 for each in xpipe_constants(at, 3, micro_batches)) - (depth > 1)
        assert xpipe[at] - counted[at] == more * trained[at]


def asked(seed: int) -> tuple[PolicyJudge, Family, tuple[int, ...]]:
    """Return a judge of some policy, a family, and an order of devices."""
    profile, cluster = problem(seed, 2 + seed % 3, 4, most_layers=4, batches=(1, 2, 4))
    options = PlanOptions(policy=("stash", "2bw", "stash")[seed % 3], shard="none", schedule="1f1b")  # type: ignore[arg-type]
    judge = PolicyJudge(Simulator(CostModel(profile, cluster, options)), options)
    counts = [count for count in (1, 2, 4) if profile.batch % count == 0]
    micro_batches = counts[seed % len(counts)]
    orders = orders_by_kind(judge.costs)
    return judge, Family(micro_batches, profile.batch // micro_batches, "1f1b"), orders[seed % len(orders)]


def busiest_of(judge: PolicyJudge, family: Family, table: PartitionTable, devices: int, most: int) -> Iterator[float]:
    """Yield what the busiest stage of every partition does, whose replicas have had equal turns after ``most``."""
    layers = judge.costs.layer_count
    ways = [each for width in range(1, devices + 1) for each in judge.ways(family, width)]
    for count in range(1, min(layers, devices) + 1):
        for cuts, chosen in product(combinations(range(1, layers), count - 1), product(ways, repeat=count)):
            turns = lcm(*(way.period for way in chosen))
            if sum(way.width for way in chosen) <= devices and turns <= most:
                stages = table.stages(PipelinePartition(0.0, (*cuts, layers), chosen))
                busiest_s = max(judge.busy_s(family, stage) for stage in stages)
                if busiest_s < float("inf"):
                    yield busiest_s


@pytest.mark.parametrize("seed", range(40))
def test_all_partitions_come_those_of_the_least_busy_first(seed: int) -> None:
    judge, family, devices = asked(seed)
    ways, busy_s = partial(judge.ways, family), partial(judge.busy_s, family)
    table, most = PartitionTable(judge.costs, family, devices, ways, busy_s), (2, 64)[seed % 2]
    found = list(table.in_order(None, most))
    assert [each.busiest_s for each in found] == sorted(busiest_of(judge, family, table, len(devices), most))
    for each in found:
        stages = table.stages(each)
        assert each.busiest_s == max(judge.busy_s(family, stage) for stage in stages)
        taken = devices_of([len(stage.devices) for stage in stages], devices)
        assert [sorted(stage.devices) for stage in stages] == list(map(sorted, taken))
    assert {len(each.stops) for each in table.in_order(1, 64)} == {1}
