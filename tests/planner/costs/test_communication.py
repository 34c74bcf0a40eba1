"""Links, curves and ports; and what travels between stages and their replicas, against counting row by row."""

from __future__ import annotations

import random

import numpy as np
import pytest

from autopar.formats.cluster import LEVELS, Cluster, Curve, Device, Level, Link
from autopar.planner import PlanOptions
from autopar.planner.costs.communication import LinkModel, Sharing
from autopar.planner.costs.model import CostModel
from autopar.schedules.route import FixedStageShares, routes
from drawn import random_candidate, shares_of
from hierarchies import hierarchy
from random_problems import random_cluster, random_profile


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
                assert model.collective_s("all_reduce", size, 4, level) == pytest.approx(expected, rel=1e-12)
                ports = sharing.ports(level, *ends, model.message_s(size, level))
                quickest = seconds.index(min(seconds))
                if len({round(each, 15) for each in seconds}) == len(seconds):
                    assert bool(ports) == (own[quickest].shared_by > 1)
                    assert {port.link for port in ports} <= {quickest}
                    second += quickest > 0
    assert second > 50


def test_over_several_links_no_longer_message_takes_less_time_and_no_rate_is_undercut() -> None:
    for seed in range(60):
        cluster = hierarchy(seed, [1, 1, 1], racks=2, more_links=True)
        model = LinkModel(cluster, cluster.devices)
        for level in model.topology.levels:
            sizes = np.linspace(0, 3e6, 500)
            assert (np.diff(model.messages_s(sizes, level)) >= 0).all()
            least = model.least_per_byte("all_reduce", 3, level)
            times = [model.collective_s("all_reduce", size, 3, level) for size in (1, 10**4, 10**7, 10**12)]
            assert all(
                s >= least * size * (1 - 1e-12) for s, size in zip(times, (1, 10**4, 10**7, 10**12), strict=True)
            )


def test_a_curve_is_of_its_level_and_continues_with_the_widest_of_its_links() -> None:
    links = (
        Link(level="node", latency_s=0.0, bytes_per_s=1e6),
        Link(level="node", latency_s=0.0, bytes_per_s=1e8, shared_by=2),
    )
    curve = Curve(kind="p2p", ranks=2, level="node", sizes=(1000,), seconds=(0.5,))
    cluster = Cluster(devices=(Device(type="cpu", memory_bytes=1),) * 2, links=links, curves=(curve,))
    model = LinkModel(cluster, cluster.devices)
    assert model.message_s(10, "node") == 0.5
    assert model.message_s(1000 + 10**6, "node") == pytest.approx(0.5 + 1e6 / 5e7)


def test_a_rack_s_devices_share_its_way_out_and_a_nodes_those_to_its_rack() -> None:
    devices = tuple(
        Device(type="cpu", memory_bytes=1, node=node, rack=node // 2) for node in range(4) for _ in range(2)
    )
    levels: tuple[Level, ...] = LEVELS
    links = tuple(Link(level=level, latency_s=0.0, bytes_per_s=1e9, shared_by=4) for level in levels)
    sharing = Sharing.of(Cluster(devices=devices, links=links), devices)
    out = [sharing.ports("network", device, device, 1.0)[0] for device in range(8)]
    assert [(port.unit, port.number) for port in out] == [(0, 0)] * 4 + [(1, 0)] * 4
    near = [sharing.ports("rack", device, device, 1.0)[0] for device in range(8)]
    assert [(port.unit, port.number) for port in near] == [(node, 0) for node in range(4) for _ in range(2)]


def test_exchanges_are_what_every_pair_of_stages_has_between_them() -> None:
    exchanged = 0
    for seed in range(150):
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
        exchanged += len(expected)
    assert exchanged > 150


def test_routes_carry_every_row_of_a_micro_batch_from_its_sender_to_its_receiver() -> None:
    rng = random.Random(5)
    for _ in range(200):
        rows = rng.randint(1, 9)
        ends = []
        for _ in range(2):
            width = rng.randint(1, min(5, rows))
            turning = rng.random() < 0.4
            ends.append(
                FixedStageShares((rows,) * width, "round-robin")
                if turning
                else FixedStageShares(shares_of(rng, rows, width))
            )
        for micro_batch in range(8):
            owners = [_owners(end, rows, micro_batch) for end in ends]
            expected: dict[tuple[int, int], list[int]] = {}
            for row, pair in enumerate(zip(*owners, strict=True)):
                expected.setdefault(pair, []).append(row)
            found = {
                (route.sender, route.receiver): list(range(int(route.start), int(route.stop)))
                for route in routes(*ends)
                if route.carries(micro_batch)
            }
            assert found == expected


def _owners(stage: FixedStageShares, rows: int, micro_batch: int) -> list[int]:
    """The replica of every row."""
    if stage.division == "round-robin":
        return [micro_batch % len(stage.shares)] * rows
    return [replica for replica, share in enumerate(stage.shares) for _ in range(int(share))]
