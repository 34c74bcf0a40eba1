"""HetPipe's virtual workers, their partitions and price, against all policies, orders, cuts and depths."""

import random
from collections.abc import Iterator
from itertools import combinations, pairwise, permutations

import pytest

from autopar.formats.cluster import Cluster, Link
from autopar.planner import PlanOptions
from autopar.planner.candidate import divisors
from autopar.planner.costs.memory import PeakTerms
from autopar.planner.costs.model import CostModel
from autopar.planner.peers import hetpipe, peers
from autopar.planner.peers.hetpipe import Partitioner, PipelineCounts, Worker, Workers
from autopar.planner.peers.prices import Prices
from autopar.planner.simulator.simulate import Simulator
from priced import mixed, nodes_of
from random_problems import gpt_profile, hierarchy, random_cluster, random_profile, two_kinds


def test_the_papers_cluster_is_dealt_and_described_as_it_was_partitioned() -> None:
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
    costs = mixed(8, 4, limited=False)
    prices = Prices(costs, costs.batch)
    given = hetpipe.allocate_workers(prices, prices.micro_batches)
    assert not isinstance(given, str)
    found = hetpipe.best(Simulator(costs), [prices], given)
    described = hetpipe.describe(prices, found.workers)
    assert len(described.workers) == len(found.workers.workers)
    for at, worker in enumerate(described.workers):
        slowest_s = max(stage.stage_s for stage in worker.stages)
        makeup, _ = hetpipe.makeup_of(costs, sorted(found.workers.workers[at].devices))
        partition = Partitioner(prices).partition(makeup, found.workers.pipeline)
        assert slowest_s == pytest.approx(partition.slowest_s, rel=1e-12)
        assert worker.samples_per_s <= prices.rows / slowest_s * (1 + 1e-12)
        assert [stage.peak_bytes for stage in worker.stages] == costs.peak_bytes(hetpipe.alike(found.workers, at))
        assert [stage.device for stage in worker.stages] == list(found.workers.workers[at].devices)
    assert described.samples_per_s == len(described.workers) * min(each.samples_per_s for each in described.workers)


def test_workers_that_cut_alike_are_priced_as_the_plan_that_they_are_where_links_cost_nothing() -> None:
    compared = 0
    for seed in range(50):
        rng = random.Random(seed)
        priced = mixed(seed, 4, limited=False)
        links = tuple(Link(level=level, latency_s=0.0, bytes_per_s=1e18) for level in ("node", "network"))
        cluster = Cluster(devices=tuple(priced.devices), links=links)
        costs, stages = CostModel(priced.profile, cluster, PlanOptions(gpus=4)), min(2, priced.layer_count)
        if costs.profile.tied:
            continue
        count = rng.choice([each for each in divisors(costs.batch) if each >= 2])
        cuts = (rng.randint(1, max(1, costs.layer_count - 1)), costs.layer_count)[-stages:]
        pipelined = PipelineCounts(rng.randint(1, 4), -(-count // 2), 2)
        workers = (Worker(cuts, (0, 2)[:stages]), Worker(cuts, (1, 3)[:stages]))
        found = Workers("ED", count, costs.batch // count, pipelined, workers)
        plan = hetpipe.joint_candidate(found)
        assert hetpipe.step_s(costs, found) == pytest.approx(Simulator(costs).step_s(plan), rel=1e-6, abs=1e-9), seed
        compared += 1
    assert compared >= 24


def test_workers_of_one_device_are_priced_and_long_allocations_left_out() -> None:
    for seed in range(40):
        costs = mixed(seed, 2, limited=False)
        count = divisors(costs.batch)[1]
        rows, layers = costs.batch // count, costs.layer_count
        pipelined = PipelineCounts(1, -(-count // 2), 2)
        found = Workers("NP", count, rows, pipelined, (Worker((layers,), (0,)), Worker((layers,), (1,))))
        done = []
        for at in (0, 1):
            of = costs.layers[costs.kind_of[at]]
            done.append(found.turns(at) * (of.sums("forward_s", rows)[-1] + of.sums("backward_s", rows, 1.0)[-1]))
        size = sum(layer.trainable_bytes for layer in costs.profile.layers)
        size -= sum(tied.bytes * (len(tied.layers) - 1) for tied in costs.profile.tied)
        reduced_s = costs.links.collective_s("all_reduce", size, costs.links.place((0, 1)))
        updated_s = max(costs.layers[kind].update_sums[-1] for kind in set(costs.kind_of))
        expected = costs.profile.step_overhead_s + max(done) + reduced_s + updated_s
        assert hetpipe.step_s(costs, found) == pytest.approx(expected, rel=1e-9), f"seed {seed}"
    profile, cluster = two_kinds(gpt_profile(blocks=62), random_cluster(1, 64), 1)
    devices = tuple(
        each.model_copy(update={"node": at // 8, "type": ("test", "other")[at // 32]})
        for at, each in enumerate(cluster.devices)
    )
    costs = CostModel(profile, cluster.model_copy(update={"devices": devices}), PlanOptions())
    given = hetpipe.allocate_workers(Prices(costs, 16), 16)
    assert not isinstance(given, str)
    dealt = [(each.policy, len(each.workers)) for each in given]
    # Four or two devices of each of eight nodes have millions of states; of one each, nodes of a kind are alike.
    assert dealt == [("NP", 8), ("ED", 8), ("HD", 8)]


def test_the_best_is_the_least_of_all_policies_counts_and_depths_and_no_bound_is_above_its_step() -> None:
    plans = others = apart = 0
    for seed in range(60):
        costs = mixed(seed, (3, 4, 2, 4)[seed % 4], limited=seed % 3 == 0)
        simulator = Simulator(costs)
        planned = [Prices(costs, count) for count in divisors(costs.batch)]
        given = hetpipe.allocate_workers(planned[0], planned[-1].micro_batches)
        if isinstance(given, str):
            continue
        best = hetpipe.best(simulator, planned, given)
        steps = []
        for prices in planned:
            for each in given:
                for found in hetpipe.partitioned_workers(Partitioner(prices), each):
                    plan = hetpipe.joint_candidate(found)
                    held = [
                        peak for at in range(len(found.workers)) for peak in costs.peak_bytes(hetpipe.alike(found, at))
                    ]
                    placed = [device for worker in found.workers for device in worker.devices]
                    fits = all(peak <= costs.limits_bytes[at] for peak, at in zip(held, placed, strict=True))
                    priced = hetpipe.step_s(costs, found)
                    assert hetpipe.bound_s(costs, found) <= priced * (1 + 1e-9)
                    if plan is not None:
                        assert (max(costs.shortfalls(plan)) <= 0) == fits
                        priced = simulator.step_s(plan)
                    apart += plan is None
                    steps += [priced] if fits else []
        if best is None:
            assert not steps
            continue
        assert best.step_s == pytest.approx(min(steps), rel=1e-12), f"seed {seed}"
        plans += best.candidate is not None
        others += best.candidate is None
    assert min(plans, 9 * others, apart) >= 9


@pytest.mark.parametrize(
    ("nodes", "options", "reason"),
    [
        ((3,), {"memory_bytes": 1}, "no partition of its virtual workers fits the memory"),
        ((4, 5), {}, "workers would have more devices than the 3 layers, be more than the 16 micro-batches"),
        ((2, 2), {"micro_batches": 1}, "than the 3 layers, be more than the 1 micro-batches, or take too long"),
    ],
)
def test_without_virtual_workers_the_row_says_why(nodes: tuple[int, ...], options: dict[str, int], reason: str) -> None:
    asked = PlanOptions(**options)
    costs = CostModel(gpt_profile(blocks=1), nodes_of(random_cluster(1, sum(nodes)), nodes), asked)
    found = {each.name: each for each in peers(Simulator(costs), asked)}["HetPipe"]
    assert found.candidate is None
    assert reason in str(found.reason)


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


def ways(costs: CostModel, devices: list[int], rows: int, pipelined: PipelineCounts) -> Iterator[tuple[float, Worker]]:
    """Every order of the devices and every cut that fits, with its slowest stage."""
    deep = hetpipe.depths(len(devices), pipelined)
    for cuts in combinations(range(1, costs.layer_count), len(devices) - 1):
        spans = list(pairwise((0, *cuts, costs.layer_count)))
        for order in permutations(devices):
            seconds = [0.0]
            for at, ((first, stop), device) in enumerate(zip(spans, order, strict=True)):
                kind = costs.kind_of[device]
                lead = deep[at - 1] - deep[at] if at else 0
                held = PeakTerms(rows, deep[at], pipelined.turns, pipelined.workers, lead)
                behind = [end for _, end in spans[at + 1 :]]
                if costs.memory[kind].peak(first, stop, held, behind) > costs.limits_bytes[device]:
                    break
                layers, adding = costs.layers[kind], costs.adding(pipelined.turns, pipelined.workers)
                both = (layers.sums("forward_s", rows), layers.sums("backward_s", rows, adding))
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
            else:
                yield max(seconds), Worker((*cuts, costs.layer_count), order)


def test_a_partition_has_the_quickest_slowest_stage_of_all_orders_and_cuts_that_fit() -> None:
    found = none = binding = differing = 0
    for seed in range(80):
        rng = random.Random(seed)
        costs = mixed(seed, rng.randint(1, 4))
        count = rng.choice(divisors(costs.batch))
        workers = rng.choice([1, 1, 2])
        pipelined = PipelineCounts(rng.randint(1, 7), -(-count // workers), workers)
        partitioner = Partitioner(Prices(costs, count))
        devices = list(range(len(costs.devices)))
        makeup, sorts = hetpipe.makeup_of(costs, devices)
        partition = partitioner.partition(makeup, pipelined)
        fitting = list(ways(costs, devices, costs.batch // count, pipelined))
        assert (partition.slowest_s == float("inf")) == (not fitting), f"seed {seed}"
        if not fitting:
            none += 1
            continue
        found += 1
        least_s = min(slowest_s for slowest_s, _ in fitting)
        assert partition.slowest_s == pytest.approx(least_s, rel=1e-9, abs=1e-15), f"seed {seed}"
        left = [iter(sort) for sort in sorts]
        own = Worker(partition.cuts, tuple(next(left[sort]) for sort in partition.sorts))
        # Devices of a sort may change places: one of the orders is this one.
        same = [slowest_s for slowest_s, worker in fitting if worker == own]
        assert same == [pytest.approx(partition.slowest_s, rel=1e-9, abs=1e-15)], f"seed {seed}"
        free = [
            each for each, _ in ways(mixed(seed, len(devices), limited=False), devices, costs.batch // count, pipelined)
        ]
        binding += min(free) < least_s * (1 - 1e-9)
        differing += len(set(makeup.kinds)) > 1
    assert min(found / 3, none, 5 * binding, differing) >= 10
