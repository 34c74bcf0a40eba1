"""Which operations a probe measures among which ranks, and what two real ranks find."""

from __future__ import annotations

import pytest

from autopar.hardware.clusters import message_sizes
from autopar.profiler.operations import slowdowns
from autopar.profiler.probe import Probe, groups_of, measure_links, measured_cluster


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
