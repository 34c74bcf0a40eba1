"""What peers' formulas are given, what is tried of their plans, why one has none, and that autopar is never slower."""

import re

import pytest

from autopar.errors import UsageError
from autopar.formats.cluster import Cluster
from autopar.formats.profile import Profile
from autopar.hardware.topology import Place
from autopar.ownership import even_shares
from autopar.planner import PlanOptions, plan
from autopar.planner.candidate import divisors, families
from autopar.planner.costs.model import CostModel
from autopar.planner.peers import peers
from autopar.planner.peers.prices import MOST_WORK, Proposal, candidates_of, in_cluster_order, planned_counts, trial
from autopar.planner.search.judge import Reference, references
from autopar.planner.simulator.simulate import Simulator
from priced import nodes_of, prices_of
from random_problems import gpt_profile, local_cluster, random_cluster, random_profile


def test_times_are_the_largest_shares_and_sizes_and_reductions_those_of_the_cost_model() -> None:
    for seed in range(40):
        prices = prices_of(seed, (4,))
        costs = prices.costs
        for replicas in range(1, 5):
            rows = max(even_shares(prices.rows, replicas))
            adding = costs.adding(prices.micro_batches, replicas)
            for stop in range(prices.layer_count + 1):
                assert prices.forward_s(replicas)[stop] == costs.sums.forward(rows)[stop]
                assert prices.backward_s(replicas)[stop] == costs.sums.backward(rows, adding)[stop]
    for seed in range(40):
        prices = prices_of(seed, (3, 3))
        total = prices.weights_bytes[-1]
        assert prices.reduce_rate(1, "node") == 0
        for replicas, level in ((2, "node"), (3, "node"), (6, "network")):
            expected = prices.costs.links.collective_s("all_reduce", int(total), Place(replicas, level))  # type: ignore[arg-type]
            assert prices.reduce_rate(replicas, level) * total == pytest.approx(expected)  # type: ignore[arg-type]
    prices = prices_of(3, (2,))
    for at, layer in enumerate(prices.costs.profile.layers):
        states = layer.parameters_bytes + layer.gradient_bytes + layer.optimizer_bytes
        assert prices.layer_bytes[at] == sum(prices.costs.layers[0].saved_at(at, prices.rows).values()) + states


def test_a_cut_costs_a_message_of_all_tensors_that_cross_it_and_nothing_where_none_does() -> None:
    crossed = 0
    for seed in range(60):
        prices = prices_of(seed, (2, 2))
        costs, count = prices.costs, prices.layer_count
        position = {layer.name: index for index, layer in enumerate(costs.profile.layers)}
        for cut in range(1, count):
            over = [
                tensor
                for tensor in costs.profile.tensors
                if tensor.producer is not None
                and position[tensor.producer] < cut
                and max(position[name] for name in tensor.consumers) >= cut
            ]
            for sent, found in ((over, prices.forth_s), ([each for each in over if each.gradient], prices.back_s)):
                size = max(even_shares(prices.rows, 2)) * sum(tensor.bytes_per_sample for tensor in sent)
                expected = costs.links.message_s(size, "network") if sent else 0.0
                assert found("network", 2)[cut] == pytest.approx(expected, rel=1e-12), f"seed {seed}"
                crossed += bool(sent)
        assert prices.forth_s("node")[[0, count]].tolist() == [0.0, 0.0]
    assert crossed > 100


NAMES = ["GPipe", "torchgpipe, by time", "torchgpipe, by size", "PipeDream", "DAPPLE"]
MIB = 2**20


def _peers(profile: Profile, cluster: Cluster, options: PlanOptions) -> tuple[Simulator, dict[str, Reference]]:
    costs = CostModel(profile, cluster, options)
    simulator = Simulator(costs)
    compared = references(simulator, families(costs.batch, options), options)
    return simulator, {each.name: each for each in peers(simulator, options, compared)}


def _fitting(profile: Profile, cluster: Cluster, options: PlanOptions) -> dict[str, float]:
    """Seconds of every peer that fits and takes devices in cluster order, as autopar does."""
    simulator, found = _peers(profile, cluster, options)
    assert [name for name in found if name in NAMES] == NAMES
    steps = {}
    for name, peer in found.items():
        # autopar shards nothing unless asked.
        if name == "sharded data parallelism":
            continue
        if peer.candidate is None:
            assert peer.reason is not None
            continue
        assert (max(simulator.costs.shortfalls(peer.candidate)) > 0) == (peer.reason is not None)
        devices = [device for stage in peer.candidate.stages for device in stage.devices]
        if peer.reason is None and devices == sorted(devices):
            steps[name] = simulator.step_s(peer.candidate)
    return steps


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("nodes", [((2,), (3,), (4,)), ((2, 2), (3, 1), (2, 1))], ids=["one", "more"])
def test_autopar_is_never_slower_than_a_peer_that_fits(nodes: tuple[tuple[int, ...], ...], limited: bool) -> None:
    compared = slower = 0
    for seed in range(8):
        sizes = nodes[seed % len(nodes)]
        profile = random_profile(seed, most_layers=4, batches=(1, 2, 3, 4))
        cluster = nodes_of(random_cluster(seed, sum(sizes)), sizes)
        options = PlanOptions(gap=0.0)
        if limited:
            peak = max(plan(profile, cluster, options).predicted.peak_bytes)
            options = PlanOptions(gap=0.0, memory_bytes=max(1, peak - 1))
        steps = _fitting(profile, cluster, options)
        own_s = plan(profile, cluster, options).predicted.step_s if steps else 0.0
        for name, step_s in steps.items():
            compared += 1
            slower += step_s > own_s * (1 + 1e-6)
            assert own_s <= step_s * (1 + 1e-9), f"seed {seed}: {name}"
    assert slower > compared / 4 > 2


def test_a_trial_finds_the_fastest_of_all_counts_and_depths() -> None:
    for seed in range(40):
        costs = CostModel(random_profile(seed), random_cluster(seed, 3), PlanOptions(gpus=3))
        simulator = Simulator(costs)
        layers = costs.layer_count
        proposals = [in_cluster_order((layers,), (2,))]
        proposals += [in_cluster_order((cut, layers), (1, 2)) for cut in range(1, layers)]
        counts = divisors(costs.batch)
        every = [
            simulator.step_s(candidate)
            for count in counts
            for proposal in proposals
            if max(map(len, proposal.devices)) <= costs.batch // count
            for candidate in candidates_of(costs, proposal, count, "1f1b")
        ]
        found = trial(simulator, "one", "1f1b", counts, proposals)
        if not every:
            said = f"no micro-batch of a batch of {costs.batch} has a sample for each replica of a stage"
            assert found == Reference("one", None, None, said)
            continue
        assert found.reason is None
        assert found.step_s == pytest.approx(min(every), rel=1e-12), f"seed {seed}"


def test_peers_say_why_they_do_not_fit_or_would_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    _, found = _peers(gpt_profile(), local_cluster(4), PlanOptions(gpus=4, micro_batches=4))
    made = {name: peer.candidate for name, peer in found.items() if peer.candidate is not None}
    assert [made[name].schedule for name in NAMES] == ["gpipe", "gpipe", "gpipe", "1f1b", "1f1b"]
    assert {each.micro_batches for each in made.values()} == {4}
    with pytest.raises(UsageError, match="`micro_batches=5` does not divide the batch 16"):
        _peers(gpt_profile(), local_cluster(4), PlanOptions(gpus=4, micro_batches=5))
    options = PlanOptions(gpus=4, memory_bytes=40 * MIB, bytes_per_s=3e8)
    simulator, found = _peers(gpt_profile(), local_cluster(4), options)
    peer = found["GPipe"]
    assert max(simulator.costs.peak_bytes(peer.candidate)) > 40 * MIB
    assert re.match(r"stage 0 \(layers wte\.\..*more than 40\.00 MiB", str(peer.reason))
    proposal = Proposal((2, 5), ((0, 3), (1, 2)))
    costs = CostModel(gpt_profile(batch=8), local_cluster(4), PlanOptions(gpus=4))
    candidates = list(candidates_of(costs, proposal, 2, "1f1b"))
    assert [stage.devices for stage in candidates[0].stages] == [(0, 3), (1, 2)]
    assert [[stage.warmup for stage in candidate.stages] for candidate in candidates] == [[2, 1]]
    monkeypatch.setattr("autopar.planner.peers.MOST_WORK", 10)
    _, found = _peers(gpt_profile(), local_cluster(4), PlanOptions(gpus=4, micro_batches=1))
    assert found["DAPPLE"].reason == "its planner takes too long for 14 layers on 4 devices"
    prices = list(range(12))
    assert planned_counts(prices, lambda _: MOST_WORK // 3) == [0, 6, 11]  # type: ignore[arg-type]
    assert planned_counts(prices, lambda _: MOST_WORK) == [6]  # type: ignore[arg-type]
    assert planned_counts(prices, lambda _: MOST_WORK + 1) == []  # type: ignore[arg-type]
    assert planned_counts(prices, lambda _: 1) == prices  # type: ignore[arg-type]
