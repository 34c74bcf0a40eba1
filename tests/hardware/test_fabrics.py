"""Fabrics: they give back what was measured, name by name, and never let larger messages take less."""

import csv
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import UsageError
from autopar.formats.cluster import Cluster, CurveKind
from autopar.hardware.clusters import cluster_named
from autopar.hardware.collectives import bus_bandwidth_factor, collective_s
from autopar.hardware.fabrics import FABRICS, Fabric, fabric_s, find_fabric
from autopar.hardware.gpus import GPUS
from autopar.hardware.topology import Place

KINDS: tuple[CurveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter")
LINKS = find_fabric("efa").links
NETWORKS = [fabric for fabric in FABRICS if fabric.is_network]


@pytest.mark.parametrize("fabric", FABRICS, ids=lambda fabric: fabric.name)
def test_a_fabric_gives_back_every_number_that_was_measured_of_it_and_says_where_that_is_from(fabric: Fabric) -> None:
    for kind in KINDS:
        for nodes, size_bytes, bytes_per_s in getattr(fabric, kind):
            place = Place.even(nodes, fabric.links.devices)
            seconds = fabric_s(fabric, kind, size_bytes, place, fabric.links)
            assert bus_bandwidth_factor(kind, place.ranks) * size_bytes / seconds == pytest.approx(bytes_per_s)
            assert bytes_per_s < (2 if nodes <= 2 else 1) * max(
                fabric.device_bytes_per_s * 8, fabric.links.bus_bytes_per_s
            )
    assert len(fabric.source) > 60
    place = Place.even(2, 1)
    assert fabric_s(fabric, "p2p", 2**20, place, LINKS) == collective_s("p2p", 2**20, place, LINKS)


def test_gpus_have_fabrics_that_join_the_devices_of_a_node() -> None:
    named = {gpu.name: find_fabric(gpu.fabric) for gpu in GPUS if gpu.fabric is not None}
    assert {"H100-SXM", "B200-HGX", "GB200"} < set(named)
    assert not any(fabric.is_network for fabric in named.values())
    for gpu in GPUS:
        if gpu.fabric is not None:
            assert named[gpu.name].links.bus_bytes_per_s == gpu.collective_bytes_per_s


@pytest.mark.skipif("AUTOPAR_DATA" not in os.environ, reason="AUTOPAR_DATA names no folder of published data")
def test_efa_is_what_the_playbook_measured() -> None:
    path = Path(os.environ["AUTOPAR_DATA"]) / "nanotron" / "collectives.csv"
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if int(row["gpus"]) > 8]
    assert len(rows) == 18
    for row in rows:
        kind = row["metric"].removesuffix("_busbw_GB_per_s")
        measured = {each.nodes: each.bytes_per_s for each in getattr(find_fabric("efa"), kind)}
        assert measured[int(row["gpus"]) // 8] == pytest.approx(float(row["value"]) * 1e9)


@given(
    fabric=st.sampled_from(FABRICS),
    kind=st.sampled_from(KINDS),
    nodes=st.integers(1, 128),
    per_node=st.integers(1, 16),
    size=st.integers(0, 2**36),
)
def test_nothing_takes_no_time_and_one_nodes_fabric_is_none_of_several(
    fabric: Fabric, kind: CurveKind, nodes: int, per_node: int, size: int
) -> None:
    place = Place.even(nodes, per_node)
    if place.ranks < 2:
        return
    seconds, formula_s = (fabric_s(each, kind, size, place, LINKS) for each in (fabric, None))
    if fabric.is_network or nodes == 1:
        assert 0 < seconds < float("inf")
    if fabric.is_network != (nodes > 1):
        assert seconds == formula_s


def _curves(cluster: Cluster) -> dict[tuple[object, ...], tuple[float, ...]]:
    return {(curve.kind, curve.level, curve.ranks, curve.nodes): curve.seconds for curve in cluster.curves}


@given(
    racks=st.integers(1, 3),
    nodes=st.integers(2, 5),
    gpus=st.integers(1, 9),
    gpu=st.sampled_from([gpu.name for gpu in GPUS]),
    rate=st.sampled_from(["100Gbps", "400Gbps/gpu", "25GB/s", "3.2Tbps"]),
    fabric=st.sampled_from(NETWORKS),
    data=st.data(),
)
def test_a_name_says_the_fabric_of_all_its_networks_and_links_stay_what_they_are(
    racks: int, nodes: int, gpus: int, gpu: str, rate: str, fabric: Fabric, data: st.DataObject
) -> None:
    plain = f"{racks}x{nodes}x{gpus}x{gpu}:{rate}"
    said = data.draw(st.sampled_from([fabric.name, *fabric.aliases, fabric.name.upper()]))
    cluster, without = cluster_named(f"{plain}:{said}"), cluster_named(plain)
    assert (cluster.links, cluster.devices) == (without.links, without.devices)
    named, formula = _curves(cluster), _curves(without)
    assert named.keys() == formula.keys()
    for key, seconds in named.items():
        assert list(seconds) == sorted(seconds)
        if key[0] == "p2p" or key[1] == "node" or not fabric.all_reduce:
            assert seconds == formula[key]
        else:
            assert seconds != formula[key]
    way = f"as {fabric.name} was measured" if fabric.all_reduce else f"by formula, as of {fabric.name}"
    assert any(f"between nodes {way}" in note for note in cluster.notes)
    assert any("between nodes by formula (`:NAME`" in note for note in without.notes)


def test_a_fabric_without_a_bandwidth_has_that_with_which_it_was_measured() -> None:
    cluster = cluster_named("8x8xH100:efa")
    assert cluster.links == cluster_named("8x8xH100:400Gbps/gpu").links
    assert _curves(cluster) == _curves(cluster_named("8x8xH100:400Gbps/gpu:efa"))
    assert any("8x8xH100:200Gbps:efa would say another" in note for note in cluster.notes)
    formula, measured = (cluster_named(f"64x8xH100:400Gbps/gpu{each}") for each in ("", ":efa"))
    key = ("all_reduce", "network", 512, 64)
    assert 5 < _curves(measured)[key][-1] / _curves(formula)[key][-1] < 9


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("2x8xH100:400Gbps:eaf", "no fabric called 'eaf' is known: infiniband, efa, roce; did you mean 'efa'?"),
        ("2x8xH100:nvlink4", "'nvlink4' joins the devices of a node, and no nodes; write one of infiniband, efa, roce"),
        ("8xH100:efa", "is one node, which needs no network; leave out :efa"),
        ("8xH100:400Gbps/gpu:efa", "leave out :400Gbps/gpu:efa"),
        ("2x2x8xH100:1Gbps:2Gbps:3Gbps", "no fabric called '3Gbps' is known: infiniband, efa, roce"),
        ("2x8xH100:400Gbps:1Gbps:efa", "has no racks for :1Gbps to connect"),
    ],
)
def test_what_is_no_fabric_is_refused_with_those_that_are(name: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        cluster_named(name)
    assert message in str(caught.value)


def test_one_node_keeps_its_links_whatever_network_its_name_says() -> None:
    said, usual = cluster_named("8xH100:400Gbps/gpu"), cluster_named("8xH100")
    assert (said.links, said.curves, said.devices) == (usual.links, usual.curves, usual.devices)
    assert any("400Gbps/gpu is of a network, which has no other node to reach" in note for note in said.notes)
