"""Which operations a probe measures among which ranks, what connects them, and how that becomes a cluster."""

import random
import statistics

import numpy as np
import pytest

from autopar.formats.cluster import Cluster, Curve, CurveKind, Device, Overlap
from autopar.hardware.clusters import message_sizes
from autopar.hardware.topology import Place
from autopar.planner.costs.communication import LinkModel
from autopar.profiler import probe
from autopar.profiler.device import choose, describe
from autopar.profiler.operations import slowdowns
from autopar.ranks.meeting import node_of_each


def test_groups_double_in_a_node_and_nodes_are_probed_with_all_of_their_ranks_sending() -> None:
    found = probe.groups_of([0] * 6)
    assert [len(each.members[0]) for each in found if each.kind == "all_reduce"] == [2, 4, 6]
    assert {each.kind for each in found} == {"p2p", "all_reduce", "all_gather", "reduce_scatter"}
    assert {each.level for each in found} == {"node"}
    assert [each.members for each in found if each.kind == "p2p"] == [((0, 1), (2, 3), (4, 5))]
    found = [each for each in probe.groups_of([0, 0, 0, 1, 1, 1, 2, 2, 2]) if each.level == "network"]
    found = [each for each in found if each.kind in ("p2p", "all_reduce")]
    assert [(each.kind, each.members) for each in found] == [
        ("p2p", ((0, 3), (1, 4), (2, 5))),
        ("all_reduce", ((0, 3), (1, 4), (2, 5))),
        ("all_reduce", (tuple(range(6)),)),
        ("all_reduce", ((0, 3, 6), (1, 4, 7), (2, 5, 8))),
        ("all_reduce", (tuple(range(9)),)),
    ]
    assert node_of_each([("a", 0), ("b", 0), ("a", 1), ("b", 1)]) == [0, 1, 0, 1]


@pytest.mark.parametrize("nodes", [[0, 1], [0, 1, 2, 3], [0, 0, 1], [0, 0, 0, 1, 1, 2]])
def test_no_two_groups_are_of_one_operation_level_size_and_number_of_nodes(nodes: list[int]) -> None:
    keys = [(each.kind, each.level, len(each.members[0]), each.nodes) for each in probe.groups_of(nodes)]
    assert len(keys) == len(set(keys))
    for each in probe.groups_of(nodes):
        members = [rank for group in each.members for rank in group]
        assert len(members) == len(set(members))
        assert {len(group) for group in each.members} == {len(each.members[0])}


def test_links_are_probed_where_ranks_are_and_nodes_of_one_have_none() -> None:
    assert slowdowns(1.0, 1.0, 1.0, 1.0) == (1.0, 1.0)
    assert slowdowns(1.0, 3.0, 1.2, 3.1) == pytest.approx((1.2, 1.2 / 1.1))
    assert slowdowns(3.0, 1.0, 3.5, 2.0) == pytest.approx((2.0 / 1.5, 2.0))
    assert slowdowns(1.0, 1.0, 0.9, 0.9) == (1.0, 1.0)
    one, other = (Overlap(level="node", compute=n, communication=3 * n) for n in (1.0, 2.0))
    assert probe._merge_overlaps([one, other]) == (Overlap(level="node", compute=1.5, communication=4.5),)
    found = [each for each in probe.groups_of([0, 1, 1, 1]) if each.level == "node"]
    assert [each.members for each in found if each.kind == "all_reduce"] == [((1, 2),), ((1, 2, 3),)]
    curve = Curve(kind="p2p", ranks=2, level="network", sizes=(1024, 2048), seconds=(1e-3, 2e-3))
    ranks = [{"name": name, "memory": 2 ** (30 + node)} for node, name in enumerate(("one", "other"))]
    types = {kind: [device.type for device in probe._devices(ranks, [0, 1], kind)] for kind in ("cpu", "cuda")}
    assert types == {"cpu": ["cpu", "cpu"], "cuda": ["one", "other"]}
    assert {device.type for device in probe._devices([ranks[0], ranks[0]], [0, 1], "cuda")} == {"cuda"}
    cluster = probe.measured_cluster(probe._devices(ranks, [0, 1], "cpu"), [curve], notes=["seen"])
    assert [(link.level, link.provenance) for link in cluster.links] == [("node", "estimated"), ("network", "measured")]
    assert [(device.node, device.memory_bytes) for device in cluster.devices] == [(0, 2**30), (1, 2**31)]
    assert cluster.notes == ("seen",)


@pytest.mark.slow
def test_two_local_ranks_are_probed_and_make_a_cluster() -> None:
    said: list[tuple[str, float]] = []
    measured = probe.measure_links(
        2, "cpu", 1, probe.Probe(largest_bytes=2**18), lambda what, share: said.append((what, share))
    )
    kinds = ["p2p", "all_reduce", "all_gather", "reduce_scatter"]
    both = probe.cluster_of(measured)
    four = probe.local_cluster(measured, describe(choose("cpu"), 1), 4)
    for cluster in (both, four):
        assert [(curve.kind, curve.ranks) for curve in cluster.curves] == [(kind, 2) for kind in kinds]
        for curve in cluster.curves:
            assert curve.provenance == "measured"
            # One more where the two largest took as long as each other.
            assert set(message_sizes(2**18)) <= set(curve.sizes)
            assert len(curve.sizes) <= len(message_sizes(2**18)) + 1
            assert curve.seconds[0] > 0
            assert list(curve.seconds) == sorted(curve.seconds)
    (overlap,) = both.overlaps
    assert (overlap.level, overlap.provenance) == ("node", "measured")
    assert len(four.devices) == 4
    assert "estimated" in four.notes[0]
    names = [f"{name} among 2 ranks in a node" for name in ("p2p", "all-reduce", "all-gather", "reduce-scatter")]
    assert [what for what, _ in said] == [*names, "computing while communicating"]
    assert [share for _, share in said] == sorted(share for _, share in said)


DGX = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV12\tNV12\tNV12\tPXB\tSYS\t48-63,176-191\t3\t\tN/A
GPU1\tNV12\t X \tNV12\tNV12\tPXB\tSYS\t48-63,176-191\t3\t\tN/A
GPU2\tNV12\tNV12\t X \tNV12\tSYS\tPXB\t16-31,144-159\t1\t\tN/A
GPU3\tNV12\tNV12\tNV12\t X \tSYS\tPXB\t16-31,144-159\t1\t\tN/A
NIC0\tPXB\tPXB\tSYS\tSYS\t X \tSYS\t\t\t\t
NIC1\tSYS\tSYS\tPXB\tPXB\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
"""


def test_the_drivers_table_is_told_in_words_and_falling_times_are_made_to_rise() -> None:
    pairs = probe.parse_topology(DGX)
    assert (pairs["GPU0", "GPU3"], pairs["GPU2", "NIC1"], len(pairs)) == ("NV12", "PXB", 6 + 8 + 1)
    assert probe.topology_notes(DGX) == [
        "GPUs are connected by 12 NVLinks (NV12): 6 pairs",
        "GPUs and network cards are connected by several PCIe switches (PXB): 4 pairs, "
        "by the link between NUMA nodes (SYS): 4 pairs",
    ]
    ways = {"PIX": "one PCIe switch", "PHB": "the host's PCIe bridge", "NODE": "PCIe bridges of one NUMA node"}
    for code, words in ways.items():
        text = f"\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \t{code}\t0-11\nGPU1\t{code}\t X \t0-11\n"
        assert probe.topology_notes(text) == [f"GPUs are connected by {words} ({code}): 1 pair"]
    single = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-15\t0\t\tN/A\n"
    failed = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    assert [probe.topology_notes(text) for text in (single, "", failed)] == [[], [], []]
    draw = random.Random(4)
    for _ in range(30):
        count = draw.randint(2, 9)
        seconds = [draw.uniform(1e-3, 2e-3) for _ in range(count)]
        (found,) = in_a_node(2, ("p2p", 2, [1024 * 2**place for place in range(count)], seconds)).curves
        # Isotonic regression in closed form: the largest, over beginnings, of the least mean of what follows.
        expected = [
            max(
                min(statistics.fmean(seconds[first : last + 1]) for last in range(place, count))
                for first in range(place + 1)
            )
            for place in range(count)
        ]
        assert found.seconds == pytest.approx(expected)


def in_a_node(ranks: int, *curves: tuple[CurveKind, int, list[int], list[float]]) -> Cluster:
    """Return the cluster of so many ranks in a node that measured these curves."""
    found = [
        probe._curve(probe.RankGroups(kind, "node", (tuple(range(count)),)), tuple(sizes), [seconds])
        for kind, count, sizes, seconds in curves
    ]
    return probe.measured_cluster([Device(type="cpu", memory_bytes=2**30)] * ranks, found)


@pytest.mark.parametrize("seconds", [[1e-3, 4e-3, 3e-3], [2e-3, 2e-3, 2e-3]])
def test_messages_beyond_a_curve_that_ends_flat_go_at_the_links_bandwidth(seconds: list[float]) -> None:
    sizes = [1024, 10**6, 3 * 10**6]
    cluster = in_a_node(4, ("p2p", 2, sizes, seconds), ("all_reduce", 4, sizes, seconds))
    (link,) = cluster.links
    assert link.bytes_per_s < 2e9
    last_s = cluster.curves[0].seconds[-1]
    assert last_s == pytest.approx((seconds[1] + seconds[2]) / 2, rel=1e-3)
    model = LinkModel(cluster, cluster.devices)
    for more in (10**6, 10**9):
        beyond_s = more / link.bytes_per_s
        assert model.message_s(sizes[-1] + more, "node") == pytest.approx(last_s + beyond_s, rel=1e-6)
        line = model._collectives["all_reduce", "node"].at(Place(4))
        assert line is not None
        # A ring of four sends every byte one and a half times.
        assert float(line(np.array([sizes[-1] + more]))[0]) == pytest.approx(last_s + 1.5 * beyond_s, rel=1e-3)
