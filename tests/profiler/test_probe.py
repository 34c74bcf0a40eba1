"""Which operations a probe measures among which ranks, and what two real ranks find."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.hardware.clusters import message_sizes
from autopar.planner.costs.links import LinkModel
from autopar.profiler.links import measure_links, measured_cluster
from autopar.profiler.operations import slowdowns
from autopar.profiler.probe import LinkMeasurements, MeasuredCurve, Probe, groups_of


def test_a_node_is_probed_in_groups_that_double() -> None:
    found = groups_of([0] * 6)
    assert [len(each.members[0]) for each in found if each.kind == "all_reduce"] == [2, 4, 6]
    assert {each.kind for each in found} == {"p2p", "all_reduce", "all_gather", "reduce_scatter"}
    assert {each.level for each in found} == {"node"}
    assert [each.members for each in found if each.kind == "p2p"] == [((0, 1), (2, 3), (4, 5))]


def test_nodes_are_probed_with_all_of_their_ranks_sending() -> None:
    found = [each for each in groups_of([0, 0, 0, 1, 1, 1, 2, 2, 2]) if each.level == "network"]
    found = [each for each in found if each.kind in ("p2p", "all_reduce")]
    assert [(each.kind, each.members) for each in found] == [
        ("p2p", ((0, 3), (1, 4), (2, 5))),
        ("all_reduce", ((0, 3), (1, 4), (2, 5))),
        ("all_reduce", ((0, 3, 6), (1, 4, 7), (2, 5, 8))),
        ("all_reduce", (tuple(range(9)),)),
    ]


@pytest.mark.parametrize("nodes", [[0, 1], [0, 1, 2, 3], [0, 0, 1], [0, 0, 0, 1, 1, 2]])
def test_no_two_groups_are_of_one_operation_level_and_size(nodes: list[int]) -> None:
    keys = [(each.kind, each.level, len(each.members[0])) for each in groups_of(nodes)]
    assert len(keys) == len(set(keys))
    for each in groups_of(nodes):
        members = [rank for group in each.members for rank in group]
        assert len(members) == len(set(members))
        assert {len(group) for group in each.members} == {len(each.members[0])}


def test_nodes_of_one_rank_have_no_links_of_their_own() -> None:
    curve = MeasuredCurve(kind="p2p", ranks=2, level="network", sizes=[1024, 2048], seconds=[1e-3, 2e-3])
    memory = [2**30, 2**31]
    measured = LinkMeasurements(
        curves=[curve], overlaps=[], nodes=[0, 1], memory_bytes=memory, names=["one", "other"], notes=["seen"]
    )
    cluster = measured_cluster(measured, "cpu", "two")
    assert {device.type for device in cluster.devices} == {"cpu"}
    assert [device.type for device in measured_cluster(measured, "cuda", "two").devices] == ["one", "other"]
    measured["names"] = ["one", "one"]
    assert {device.type for device in measured_cluster(measured, "cuda", "two").devices} == {"cuda"}
    assert [(link.level, link.provenance) for link in cluster.links] == [("node", "estimated"), ("network", "measured")]
    assert [(device.node, device.memory_bytes) for device in cluster.devices] == [(0, 2**30), (1, 2**31)]
    assert cluster.notes == ("seen",)


@pytest.mark.parametrize("seconds", [[1e-3, 4e-3, 3e-3], [2e-3, 2e-3, 2e-3]])
def test_messages_beyond_a_curve_that_ends_flat_go_at_the_links_bandwidth(seconds: list[float]) -> None:
    sizes = [1024, 10**6, 3 * 10**6]
    curves = [MeasuredCurve(kind="p2p", ranks=2, level="node", sizes=sizes, seconds=seconds)]
    curves.append(MeasuredCurve(kind="all_reduce", ranks=4, level="node", sizes=sizes, seconds=seconds))
    same = {"nodes": [0] * 4, "memory_bytes": [2**30] * 4, "names": ["one"] * 4}
    measured = LinkMeasurements(curves=curves, overlaps=[], notes=[], **same)  # type: ignore[typeddict-item]
    cluster = measured_cluster(measured, "cpu", "four")
    (link,) = cluster.links
    assert link.bytes_per_s < 2e9
    last_s = cluster.curves[0].seconds[-1]
    assert last_s == pytest.approx((seconds[1] + seconds[2]) / 2, rel=1e-3)
    model = LinkModel(cluster, cluster.devices)
    for more in (10**6, 10**9):
        beyond_s = more / link.bytes_per_s
        assert model.message_s(sizes[-1] + more, "node") == pytest.approx(last_s + beyond_s, rel=1e-6)
        line = model._lines["all_reduce", 4, "node"]
        # A ring of four sends every byte one and a half times.
        assert float(line(np.array([sizes[-1] + more]))[0]) == pytest.approx(last_s + 1.5 * beyond_s, rel=1e-3)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ((1.0, 1.0, 1.0, 1.0), (1.0, 1.0)),
        ((1.0, 3.0, 1.2, 3.1), (1.2, 1.2 / 1.1)),
        ((3.0, 1.0, 3.5, 2.0), (2.0 / 1.5, 2.0)),
        ((1.0, 1.0, 0.9, 0.9), (1.0, 1.0)),
    ],
)
def test_what_runs_on_undisturbed_does_not_count_as_slowed(
    times: tuple[float, float, float, float], expected: tuple[float, float]
) -> None:
    assert slowdowns(*times) == pytest.approx(expected)


def test_two_local_ranks_are_probed() -> None:
    said: list[tuple[str, float]] = []
    measured = measure_links(2, "cpu", 1, Probe(largest_bytes=2**20), lambda what, share: said.append((what, share)))
    cluster = measured_cluster(measured, "cpu", "local")
    assert [(curve.kind, curve.ranks) for curve in cluster.curves] == [
        ("p2p", 2),
        ("all_reduce", 2),
        ("all_gather", 2),
        ("reduce_scatter", 2),
    ]
    for curve in cluster.curves:
        assert curve.provenance == "measured"
        # One more where the two largest took as long as each other.
        assert set(message_sizes(2**20)) <= set(curve.sizes)
        assert len(curve.sizes) <= 13
        assert 0 < curve.seconds[0] <= curve.seconds[-1]
    (overlap,) = cluster.overlaps
    assert (overlap.level, overlap.provenance) == ("node", "measured")
    assert [what for what, share in said] == [
        "p2p among 2 ranks in a node",
        "all-reduce among 2 ranks in a node",
        "all-gather among 2 ranks in a node",
        "reduce-scatter among 2 ranks in a node",
        "computing while communicating",
    ]
    assert [share for what, share in said] == sorted(share for what, share in said)
