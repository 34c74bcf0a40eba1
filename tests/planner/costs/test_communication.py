"""Links, curves and ports; and what travels between stages and their replicas, against counting row by row."""

import random

import numpy as np
import pytest

from autopar.formats.cluster import LEVELS, Cluster, Curve, Device, Link
from autopar.hardware.topology import Place
from autopar.planner import PlanOptions
from autopar.planner.costs.communication import LinkModel, Sharing
from autopar.planner.costs.model import CostModel
from drawn import random_candidate
from random_problems import gpt_profile, hierarchy, local_cluster, random_cluster, random_profile


def test_of_several_links_the_quickest_counts_and_its_port_is_passed() -> None:
    second = 0
    for seed in range(100):
        cluster = hierarchy(seed, [2, 2], racks=2, more_links=True)
        model, sharing = LinkModel(cluster, cluster.devices), Sharing.of(cluster, cluster.devices)
        for level, ends in (("node", (0, 1)), (model.level((0, 2)), (0, 2))):
            own = [link for link in cluster.links if link.level == level]
            for size in (0, 1000, 30_000, 10**6, 10**8):
                seconds = [link.latency_s + size * link.shared_by / link.bytes_per_s for link in own]
                assert model.message_s(size, level) == pytest.approx(min(seconds), rel=1e-12)
                rounds = [2 * (4 - 1) * (link.latency_s + size / 4 * link.shared_by / link.bytes_per_s) for link in own]
                expected = min(rounds) if size else 0.0
                assert model.collective_s("all_reduce", size, Place(4, level)) == pytest.approx(expected, rel=1e-12)
                ports = sharing.ports(level, *ends, model.message_s(size, level))
                quickest = seconds.index(min(seconds))
                if len({round(each, 15) for each in seconds}) == len(seconds):
                    assert bool(ports) == (own[quickest].shared_by > 1)
                    assert {port.link for port in ports} <= {quickest}
                    second += quickest > 0
    assert second > 50


def test_links_curves_and_ways_out_are_shared_and_no_rate_undercut() -> None:
    for seed in range(60):
        cluster = hierarchy(seed, [1, 1, 1], racks=2, more_links=True)
        model = LinkModel(cluster, cluster.devices)
        for level in model.topology.levels:
            assert (np.diff(model.messages_s(np.linspace(0, 3e6, 500), level)) >= 0).all()
            least = model.least_per_byte("all_reduce", Place(3, level))
            for size in (1, 10**4, 10**7, 10**12):
                assert model.collective_s("all_reduce", size, Place(3, level)) >= least * size * (1 - 1e-12)
    devices = tuple(Device(type="cpu", memory_bytes=1, node=at // 2, rack=at // 4) for at in range(8))
    links = tuple(Link(level=level, latency_s=0.0, bytes_per_s=1e9, shared_by=4) for level in LEVELS)
    sharing = Sharing.of(Cluster(devices=devices, links=links), devices)
    out = [sharing.ports("network", device, device, 1.0)[0] for device in range(8)]
    assert [(port.unit, port.number) for port in out] == [(0, 0)] * 4 + [(1, 0)] * 4
    near = [sharing.ports("rack", device, device, 1.0)[0] for device in range(8)]
    assert [(port.unit, port.number) for port in near] == [(node, 0) for node in range(4) for _ in range(2)]
    links = (
        Link(level="node", latency_s=0.0, bytes_per_s=1e6),
        Link(level="node", latency_s=0.0, bytes_per_s=1e8, shared_by=2),
    )
    curve = Curve(kind="p2p", ranks=2, level="node", sizes=(1000,), seconds=(0.5,))
    cluster = Cluster(devices=(Device(type="cpu", memory_bytes=1),) * 2, links=links, curves=(curve,))
    model = LinkModel(cluster, cluster.devices)
    assert model.message_s(10, "node") == 0.5
    assert model.message_s(1000 + 10**6, "node") == pytest.approx(0.5 + 1e6 / 5e7)
    assert not Sharing.of(cluster, cluster.devices, 1e9)
    flat = {"kind": "all_reduce", "sizes": (1000, 2000), "seconds": (0.5, 0.5)}
    curves = tuple(curve.model_copy(update={**flat, "ranks": ranks}) for ranks in (4, 2))
    model = LinkModel(cluster.model_copy(update={"curves": curves}), cluster.devices)
    assert model.collective_s("all_reduce", 2000 + 10**6, Place(4)) == pytest.approx(0.5 + 2 * 3 / 4 * 1e6 / 5e7)
    assert model.collective_s("all_reduce", 0, Place(4)) == 0.0
    assert model.collective_note("all_reduce", Place(3)) == "all-reduce among 3 ranks is estimated from 2"


def test_exchanges_are_what_every_pair_of_stages_has_between_them() -> None:
    exchanged = 0
    for seed in range(80):
        profile = random_profile(seed, most_layers=12, skips=random.Random(seed).choice([0.0, 0.1, 0.4]))
        costs = CostModel(profile, random_cluster(seed, 6), PlanOptions(gpus=6))
        stages = random_candidate(random.Random(seed), costs).stages
        expected = []
        for producer, sending in enumerate(stages):
            for consumer in range(producer + 1, len(stages)):
                flow = costs.flows.between(sending.first, sending.stop, *stages[consumer][:2])
                if flow.tensors:
                    expected.append((producer, consumer, flow))
        assert costs.flows.exchanges([stage.stop for stage in stages]) == expected
        for cut in range(1, costs.layer_count):
            crossing = [each for each in costs.flows.crossing if each.producer < cut <= each.consumers[-1]]
            for sizes, own in zip(
                costs.flows.crossing_bytes, (crossing, [t for t in crossing if t.gradient]), strict=True
            ):
                np.testing.assert_equal(sizes[cut], sum(each.bytes_per_sample for each in own) if own else np.nan)
        exchanged += len(expected)
    assert exchanged > 80
    # A mask that two stages read, of which one alone sends gradients back, is not answered.
    profile = gpt_profile(blocks=2)
    names = tuple(layer.name for layer in profile.layers)
    changes = {"name": "mask", "producer": names[0], "consumers": names[1:3], "gradient": False, "bytes_per_sample": 7}
    tensors = (*profile.tensors, profile.tensors[1].model_copy(update=changes))
    flows = CostModel(profile.model_copy(update={"tensors": tensors}), local_cluster(), PlanOptions()).flows
    assert [flows.unanswered_bytes(0, 1, cuts) for cuts in ([1, 2, 3, 4], [1, 3, 4])] == [7, 0]
