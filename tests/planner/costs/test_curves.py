"""Collectives by place: against their formulas, by hand, and what must hold of any filling of nodes."""

import random
from collections import Counter

import numpy as np
import pytest

from autopar.formats.cluster import Cluster, Curve, Device, Link
from autopar.hardware.clusters import cluster_named
from autopar.hardware.collectives import NodeLinks, collective_s
from autopar.hardware.topology import Place, place_of_curve
from autopar.planner.costs.communication import LinkModel
from autopar.planner.costs.curves import Collective
from random_problems import hierarchy, with_curves

KINDS: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter")
GIB = 2**30


def _cluster(*curves: Curve) -> Cluster:
    """Three nodes of four."""
    links = tuple(Link(level=level, latency_s=1e-3, bytes_per_s=1e6) for level in ("node", "network"))
    devices = tuple(Device(type="cpu", memory_bytes=1, node=at // 4) for at in range(12))
    return Cluster(devices=devices, links=links, curves=curves)


def _curve(ranks: int, nodes: int | None, latency_s: float, bytes_per_s: float) -> Curve:
    seconds = tuple(latency_s + size / bytes_per_s for size in (0, 1000))
    return Curve(kind="all_reduce", ranks=ranks, level="network", nodes=nodes, sizes=(1, 1000), seconds=seconds)


def _seconds(curves: list[Curve], size: int, devices: tuple[int, ...]) -> float:
    cluster = _cluster(*curves)
    links = LinkModel(cluster, cluster.devices)
    return links.collective_s("all_reduce", size, links.place(devices))


def test_bytes_are_those_of_the_emptiest_node_and_latency_is_of_the_fullest_one() -> None:
    one, whole = _curve(2, 2, 0.01, 1e6), _curve(8, 2, 0.04, 4e6)
    both = [one, whole]
    assert _seconds(both, 1000, (0, 4)) == pytest.approx(0.01 + 1e-3)
    assert _seconds(both, 1000, (0, 1, 2, 3, 4, 5, 6, 7)) == pytest.approx(0.04 + 0.25e-3)
    # Two on each: two thirds of the way from 1 to 1/4; of four ranks, as rings.
    latencies, moved = (0.01 * 3, 0.04 * 3 / 7), (1e-3 * (3 / 4) / (1 / 2), 0.25e-3 * (3 / 4) / (7 / 8))
    middle = [one + 2 / 3 * (other - one) for one, other in (latencies, moved)]
    assert _seconds(both, 1000, (0, 1, 4, 5)) == pytest.approx(sum(middle), rel=1e-3)
    # One on the emptiest node, four on the fullest one; three of five ranks are no curve's, two are one's.
    expected = 0.04 * 4 / 7 + 1e-3 * (4 / 5) / (1 / 2)
    assert _seconds(both, 1000, (0, 4, 5, 6, 7)) == pytest.approx(expected, rel=1e-3)
    # Without a curve of one on each, a ring over the links stands for it; without more, that of one for all.
    assert _seconds([whole], 1000, (0, 4)) == pytest.approx(2e-3 + 1e-3)
    assert _seconds([one], 1000, tuple(range(8))) == pytest.approx(0.01 * 7 + 1e-3 * (7 / 8) / (1 / 2), rel=1e-3)
    cluster = _cluster(*both)
    links = LinkModel(cluster, cluster.devices)
    places = [links.place(devices) for devices in ((0, 4), (0, 1, 4, 5), (0, 4, 5, 6, 7), (0, 1))]
    assert places[2] == Place(5, "network", 2, 1, 4)
    assert [links.collective_note("all_reduce", each) for each in places] == [
        None,
        "all-reduce among 4 ranks is estimated from 2",
        "all-reduce among 5 ranks, 1 to 4 on each of 2 nodes, is estimated from 2",
        "all-reduce among 2 ranks is computed from the node link's latency and bandwidth",
    ]
    assert [links.collective_provenance("all_reduce", 1000, each) for each in places] == [
        "measured",
        *["estimated"] * 3,
    ]


def test_where_nothing_is_known_of_fillings_no_place_is_told_from_another_and_the_least_of_any_counts() -> None:
    least = 0
    for seed in range(60):
        plain = hierarchy(seed, [3, 2, 1, 2], racks=1 + seed % 2)
        links = LinkModel(plain, plain.devices)
        assert {links.place((0, 1, 3)), links.place((0, 3, 5))} <= {Place(3, "rack"), Place(3, "network")}
        cluster = with_curves(plain, seed)
        links, rng = LinkModel(cluster, cluster.devices), random.Random(seed)
        for _ in range(20):
            devices = rng.sample(range(8), rng.randint(2, 8))
            place, counts = links.place(devices), Counter(cluster.devices[device].node for device in devices)
            if links.tells_filling(place.level):
                assert place[2:] == (len(counts), min(counts.values()), max(counts.values()))
            for kind in KINDS:
                sizes = np.array([0.0, 1.0, 500.0, 1e4, 1e5, 1e7])
                seconds = links.collectives_s(kind, sizes, place)
                assert (np.diff(seconds) >= 0).all()
                best = links.collectives_s(kind, sizes, links.best_place(place.ranks, place.level))
                assert (best <= seconds * (1 + 1e-12)).all(), f"seed {seed}"
                assert (seconds >= links.least_per_byte(kind, place) * sizes * (1 - 1e-12)).all(), f"seed {seed}"
                least += bool((best < seconds).any())
    assert least > 500


@pytest.mark.parametrize(("network", "close"), [(50e9, 0.05), (8 * 50e9, 0.15), (8 * 200e9, 0.35)])
def test_named_clusters_are_priced_as_their_formula_prices_each_place(network: float, close: float) -> None:
    """The fastest network is faster than a node, so that more ranks on a node bring no more from some number on."""
    cluster = cluster_named(f"8x8xH100:{network / 1e9:g}GB/s")
    links = NodeLinks("nvlink", 370e9, 370e9, 8, network_bytes_per_s=network)
    model, rng = LinkModel(cluster, cluster.devices), random.Random(0)
    for _ in range(300):
        filled = [rng.choice((0, rng.randint(1, 8), 8)) for _ in range(8)]
        devices = [8 * node + at for node, count in enumerate(filled) for at in range(count)]
        if sum(count > 0 for count in filled) < 2:
            continue
        place = model.place(devices)
        for kind in KINDS:
            formula_s = collective_s(kind, GIB, place, links)
            assert model.collective_s(kind, GIB, place) == pytest.approx(formula_s, rel=close), place
            if place.fewest == place.most in (1, 2, 4, 8) and place.nodes in (2, 4, 8):
                assert model.collective_s(kind, GIB, place) == pytest.approx(formula_s, rel=1e-12)


@pytest.mark.parametrize("name", ["8x8xH100:400Gbps", "4x4xV100:25Gbps", "4x8xA100-80G:200Gbps", "2x8xB200:3200Gbps"])
@pytest.mark.parametrize("kind", KINDS)
def test_more_ranks_on_the_same_nodes_cost_less_by_their_ways_out_alone(name: str, kind: Collective) -> None:
    cluster = cluster_named(name)
    model, node = LinkModel(cluster, cluster.devices), sum(device.node == 0 for device in cluster.devices)

    def seconds(*filled: int) -> float:
        devices = [node * at + index for at, count in enumerate(filled) for index in range(count)]
        return model.collective_s(kind, GIB, model.place(devices))

    for most in range(1, node + 1):
        for more in range(1, most):
            # From k ways out to k + 1, and no further.
            assert 1 <= seconds(most, more) / seconds(most, more + 1) <= (more + 1) / more * 1.01
        if most < node:
            assert seconds(most + 1, most) <= seconds(most, most) * 1.35
            assert seconds(most + 1, most + 1) <= seconds(most, most) * 1.2
    assert seconds(node, 1) > seconds(node)


def test_curves_of_before_are_read_as_they_were_measured() -> None:
    cluster = cluster_named("16x8xH100:400Gbps")
    kept = [
        curve
        for curve in cluster.curves
        if curve.nodes is None or curve.ranks == 8 * curve.nodes or curve.ranks == curve.nodes < 16
    ]
    before = cluster.model_copy(update={"curves": tuple(c.model_copy(update={"nodes": None}) for c in kept)})
    assert Cluster.model_validate_json(before.dumps()) == before
    places = [place_of_curve(curve, before) for curve in before.curves if curve.kind == "all_reduce"]
    assert places[3:] == [Place.even(each, 1) for each in (2, 4, 8)] + [Place.even(each, 8) for each in (2, 4, 8, 16)]
    models = [LinkModel(each, each.devices) for each in (before, cluster)]
    for devices in (range(4), range(7), range(16), range(24), range(128), range(0, 32, 8)):
        one, other = (model.collective_s("all_reduce", GIB, model.place(devices)) for model in models)
        assert one == other
    measured = [curve.model_copy(update={"provenance": "measured"}) for curve in before.curves]
    counts = {c.ranks: place_of_curve(c, before) for c in measured if c.kind == "all_gather" and c.level == "network"}
    assert counts[16] == Place.even(16, 1)
    assert counts[32] == Place.even(4, 8)
    uneven = _curve(12, 2, 0.0, 1e6)
    devices = tuple(Device(type="cpu", memory_bytes=1, node=at // 8) for at in range(12))
    assert place_of_curve(uneven, _cluster().model_copy(update={"devices": devices})) == Place(12, "network", 2, 4, 6)
