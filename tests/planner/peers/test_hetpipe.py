"""HetPipe: how it deals devices and cuts pipelines, against all orders and cuts; and its row, as its plan is run."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, permutations

import pytest

from autopar.formats.profile import Writes
from autopar.formats.report import ComparisonRow
from autopar.options.plan import check_policy
from autopar.ownership import SINGLE
from autopar.planner import PlanOptions, plan
from autopar.planner.candidate import Candidate, Family, place
from autopar.planner.comparison import compare
from autopar.planner.constraints import Question
from autopar.planner.costs.model import CostModel
from autopar.planner.objectives.dealings import Cutter, WavesJudge
from autopar.planner.objectives.waves import hetpipe_plan
from autopar.planner.peers import hetpipe
from autopar.planner.peers.hetpipe import Partitioner
from autopar.planner.peers.prices import Prices
from autopar.planner.simulator.simulate import Simulator
from priced import mixed, nodes_of
from random_problems import gpt_profile, hierarchy, local_cluster, random_cluster, random_profile, two_kinds

WSP = check_policy(PlanOptions(policy="wsp", recompute="none"))


def test_the_papers_cluster_is_dealt_as_in_the_paper() -> None:
    # Four nodes of four: V is the quickest, then R, G and Q.
    nodes = [[tuple(range(4 * node, 4 * node + 4))] for node in range(4)]
    found = hetpipe.allocations(nodes, [float(1 + device // 4) for device in range(16)])
    names = ["".join("VRGQ"[device // 4] for device in worker) for each in found for worker in each.workers]
    policies = [(each.policy, len(each.workers)) for each in found]
    assert policies == [("NP", 4), ("ED", 1), ("ED", 2), ("ED", 4), ("HD", 4)]
    assert names[:4] == ["VVVV", "RRRR", "GGGG", "QQQQ"]
    assert names[7:11] == ["VRGQ"] * 4
    assert names[11:] == ["VVQQ", "VVQQ", "RRGG", "RRGG"]
    for each in found:
        assert sorted(device for worker in each.workers for device in worker) == list(range(16))


def test_allocations_that_take_long_are_left_out() -> None:
    profile, cluster = two_kinds(gpt_profile(blocks=62), random_cluster(1, 64), 1)
    devices = tuple(
        each.model_copy(update={"node": at // 8, "type": ("test", "other")[at // 32]})
        for at, each in enumerate(cluster.devices)
    )
    costs = CostModel(profile, cluster.model_copy(update={"devices": devices}), PlanOptions())
    dealt = [(each.policy, len(each.workers)) for each in hetpipe.allocate_workers(Prices(costs, 1))]
    # Four or two devices of each of eight nodes have millions of states; of one each, nodes of a kind are alike.
    assert dealt == [("NP", 8), ("ED", 8), ("HD", 8)]


@pytest.mark.some(1)
@pytest.mark.parametrize("part", range(4))
def test_the_plan_is_the_best_of_all_dealings_each_cut_as_hetpipe_cuts(part: int) -> None:
    """On one node, where which devices of a kind a pipeline has is all the same, each is a plan of dictated stages."""
    compared = several = 0
    for seed in range(10 * part, 10 * (part + 1)):
        profile = random_profile(seed, most_layers=5, batches=(1, 2, 4)).model_copy(update={"tied": ()})
        profile, cluster = two_kinds(profile, random_cluster(seed, 8), seed)
        kinds = [
            each.model_copy(update={"type": ("test", "other")[at % 2], "node": 0})
            for at, each in enumerate(cluster.devices)
        ]
        cluster = cluster.model_copy(update={"devices": tuple(kinds)})
        question = Question.of(profile, cluster, replace(WSP, gpus=8))
        costs, family = question.costs, Family(1, profile.batch, "1f1b")
        periods = []
        for each in hetpipe.allocate_workers(Prices(costs, 1)):
            cutter = Cutter(question, family, max(map(len, each.workers)), len(each.workers))
            frames = [cutter.as_hetpipe(devices) for devices in each.workers]
            texts = [costs.text(Candidate(*family, frame)) for frame in frames if frame is not None]
            assert len(texts) == len(each.workers)
            asked = replace(WSP, schedule="auto", shard="auto", stages="/".join(texts), micro_batches=1)
            periods.append(plan(profile, cluster, asked).predicted.step_s / len(texts))
        if not periods:
            continue
        _, found = hetpipe_plan(question)
        assert found.predicted.step_s / len(found.pipelines) == pytest.approx(min(periods), rel=1e-9), f"seed {seed}"
        compared, several = compared + 1, several + (len(periods) > 1)
    assert min(compared, 2 * several) >= 6, (compared, several)


def _row(profile: object, cluster: object, options: PlanOptions) -> ComparisonRow:
    return next(each for each in compare(profile, cluster, options).rows if each.name == "HetPipe")  # type: ignore[arg-type]


def test_the_row_is_of_as_many_samples_as_others_and_says_its_pipelines() -> None:
    profile, cluster = gpt_profile(blocks=6), local_cluster(4)
    row = _row(profile, cluster, PlanOptions(micro_batches=4))
    found = plan(profile, cluster, PlanOptions(policy="wsp", stages=row.stages, micro_batches=1))
    assert row.step_s == pytest.approx(found.predicted.step_s / 4)
    assert row.peak_bytes == max(found.predicted.peak_bytes)
    assert row.waves == "HetPipe's ED, of 4 pipelines, in waves of 1, staleness 0"
    own = compare(profile, cluster, PlanOptions(policy="wsp", wave=2, staleness=1)).rows
    assert {each.name: each.waves for each in own if each.waves} == {
        "autopar": "4 pipelines, in waves of 2, staleness 1",
        "HetPipe": "HetPipe's ED, of 4 pipelines, in waves of 2, staleness 1",
    }


@pytest.mark.parametrize(
    ("nodes", "blocks", "options", "reason"),
    [
        ((2, 2), 1, {"memory_bytes": 2 * 10**7}, "not priced: no pipelines that it cuts fit the memory"),
        ((4, 5), 1, {}, "HetPipe deals 9 devices of these nodes to one, or to more stages than 3 layers"),
        ((1,), 1, {}, "HetPipe deals 1 devices of these nodes to one"),
    ],
)
def test_without_pipelines_the_row_says_why(
    nodes: tuple[int, ...], blocks: int, options: dict[str, int], reason: str
) -> None:
    row = _row(gpt_profile(blocks=blocks), nodes_of(random_cluster(1, sum(nodes)), nodes), PlanOptions(**options))
    assert row.step_s is None
    assert reason in str(row.infeasible)


def test_what_several_pipelines_do_not_train_is_not_priced() -> None:
    profile = random_profile(10)
    writing = profile.layers[0].model_copy(update={"writes": Writes(buffers=("mean",))})
    profile = profile.model_copy(update={"layers": (writing, *profile.layers[1:])})
    row = _row(profile, local_cluster(2), PlanOptions())
    assert row.infeasible == "not priced: layer layer.0 writes buffers, which pipelines do not tell each other"


def test_devices_of_a_sort_are_those_that_no_other_device_tells_apart() -> None:
    several = 0
    for seed in range(100):
        rng = random.Random(seed)
        sizes = [rng.randint(1, 3) for _ in range(rng.randint(1, 5))]
        cluster = hierarchy(seed, sizes, racks=rng.randint(1, 3))
        profile = random_profile(seed, most_layers=4)
        if seed % 3 == 0:
            profile, cluster = two_kinds(profile, cluster, seed)
        costs = CostModel(profile, cluster, PlanOptions(gpus=sum(sizes)))
        devices = rng.sample(range(sum(sizes)), rng.randint(1, sum(sizes)))
        makeup, sorts = hetpipe.makeup_of(costs, devices)
        assert sorted(device for sort in sorts for device in sort) == sorted(devices)
        assert makeup.counts == tuple(map(len, sorts))
        sort_of = {device: at for at, sort in enumerate(sorts) for device in sort}
        for one, other in combinations(devices, 2):
            others = (each for each in devices if each not in (one, other))
            alike = costs.kind_of[one] == costs.kind_of[other] and all(
                costs.links.level((one, each)) == costs.links.level((other, each)) for each in others
            )
            assert alike == (sort_of[one] == sort_of[other]), f"seed {seed}"
            assert makeup.levels[sort_of[one]][sort_of[other]] == costs.links.level((one, other)), f"seed {seed}"
        assert all(sort == sorted(sort) for sort in sorts)
        several += len(sorts) > 1
    assert several > 40


Way = tuple[float, tuple[int, ...], tuple[int, ...]]


def ways(costs: CostModel, judge: WavesJudge, devices: list[int], in_flight: int) -> Iterator[Way]:
    """Every order of the devices and every cut that fits, with its slowest stage."""
    deep, rows, family = hetpipe.depths(len(devices), in_flight), costs.batch, Family(1, costs.batch, "1f1b")
    for inner in combinations(range(1, costs.layer_count), len(devices) - 1):
        cuts = (*inner, costs.layer_count)
        spans = list(pairwise((0, *cuts)))
        for order in permutations(devices):
            frame = place(family, cuts, [SINGLE] * len(order), order)
            stages = tuple(stage._replace(warmup=depth) for stage, depth in zip(frame, deep, strict=True))
            held = judge.peak_bytes(Candidate(*family, stages))
            if any(peak > costs.limits_bytes[device] for peak, device in zip(held, order, strict=True)):
                continue
            seconds = [0.0]
            for at, ((first, stop), device) in enumerate(zip(spans, order, strict=True)):
                layers = costs.layers[costs.kind_of[device]]
                both = (layers.sums("forward_s", rows), layers.sums("backward_s", rows, costs.adding(1, 1)))
                stage_s = sum(sums[stop] - sums[first] for sums in both)
                if at:
                    flow = costs.flows.between(0, first, first, costs.layer_count)
                    size = rows * flow.bytes_per_sample
                    stage_s += costs.message_s(size, order[at - 1], device) if flow.tensors else 0.0
                if at + 1 < len(order):
                    flow = costs.flows.between(0, stop, stop, costs.layer_count)
                    size = rows * flow.gradient_bytes_per_sample
                    stage_s += costs.message_s(size, order[at + 1], device) if flow.gradients else 0.0
                seconds.append(stage_s)
            yield max(seconds), cuts, order


def test_a_partition_has_the_quickest_slowest_stage_of_all_orders_and_cuts_that_fit() -> None:
    found = none = binding = differing = 0
    for seed in range(80):
        rng = random.Random(seed)
        costs = mixed(seed, rng.randint(1, 4))
        # Beside versions, waves keep at least three times what is trained.
        costs.limits_bytes = [4 * each for each in costs.limits_bytes]
        in_flight = rng.randint(1, 7)
        judge = WavesJudge(Simulator(costs), replace(WSP, wave=in_flight), 2)
        devices = list(range(len(costs.devices)))
        makeup, sorts = hetpipe.makeup_of(costs, devices)
        partition = Partitioner(Prices(costs, 1), judge.peaks_by_layers).partition(makeup, in_flight)
        fitting = list(ways(costs, judge, devices, in_flight))
        assert (partition.slowest_s == float("inf")) == (not fitting), f"seed {seed}"
        if not fitting:
            none += 1
            continue
        found += 1
        least_s = min(slowest_s for slowest_s, *_ in fitting)
        assert partition.slowest_s == pytest.approx(least_s, rel=1e-9, abs=1e-15), f"seed {seed}"
        left = [iter(sort) for sort in sorts]
        own = (partition.cuts, tuple(next(left[sort]) for sort in partition.sorts))
        # Devices of a sort may change places: one of the orders is this one.
        same = [slowest_s for slowest_s, *way in fitting if tuple(way) == own]
        assert same == [pytest.approx(partition.slowest_s, rel=1e-9, abs=1e-15)], f"seed {seed}"
        ample = mixed(seed, len(devices), limited=False)
        free = [each for each, *_ in ways(ample, WavesJudge(Simulator(ample), judge.options, 2), devices, in_flight)]
        binding += min(free) < least_s * (1 - 1e-9)
        differing += len(set(makeup.kinds)) > 1
    assert min(found / 3, none, 5 * binding, differing) >= 10, (found, none, binding, differing)
