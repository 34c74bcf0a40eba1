"""Plans of clusters that are listed in another order, or whose nodes have other numbers."""

from dataclasses import replace

import pytest

from autopar.formats.profile import Layer, Profile
from autopar.planner import PlanOptions, plan
from autopar.planner.assemble import candidate_of, simulate
from autopar.planner.candidate import CandidateStage
from autopar.planner.costs.model import CostModel
from autopar.planner.order import as_listed, canonical, numbered
from autopar.planner.shares import by_share
from listed import known, problem, relisted
from random_problems import gpt_profile, hierarchy, local_cluster, random_profile, two_kinds


@pytest.mark.some(1)
@pytest.mark.parametrize("part", range(10))
def test_no_listing_changes_a_plan(part: int) -> None:
    for seed in range(3 * part, 3 * (part + 1)):
        profile, cluster = problem(seed)
        options = PlanOptions(gap=0.0 if seed % 3 == 0 else 0.02, exact=seed % 3 == 1)
        found = plan(profile, cluster, options)
        other = plan(profile, other_cluster := relisted(cluster, seed), options)
        assert known(found) == known(other), f"seed {seed}"
        for each, own in ((found, cluster), (other, other_cluster)):
            types = [tuple(dict.fromkeys(own.devices[at].type for at in stage.devices)) for stage in each.stages]
            assert types == [stage.types for stage in each.stages], f"seed {seed}"
            listed = [node.node for node in each.nodes for _ in range(node.count)]
            assert listed == [device.node for device in own.devices], f"seed {seed}"
            assert max(event.end_s for event in simulate(each, profile, own)) == pytest.approx(each.predicted.step_s)


def test_devices_stand_node_by_node_the_fastest_first_and_keep_their_listing() -> None:
    moved = 0
    for seed in range(40):
        profile, cluster = problem(seed)
        costs, other = (
            canonical(CostModel(profile, each, PlanOptions())) for each in (cluster, relisted(cluster, seed))
        )
        looks = [
            [(device.type, device.memory_bytes, of.kind_of[at]) for at, device in enumerate(of.devices)]
            for of in (costs, other)
        ]
        assert looks[0] == looks[1], f"seed {seed}"
        assert [cluster.devices[at] for at in costs.listed] == costs.devices
        nodes = [device.node for device in costs.devices]
        assert all(node not in nodes[:at] or nodes[at - 1] == node for at, node in enumerate(nodes))
        assert [costs.listed[at] for at in as_listed(costs)] == list(range(len(nodes)))
        moved += costs.listed != tuple(range(len(nodes)))
    assert moved > 20
    costs = CostModel(gpt_profile(), local_cluster(4), PlanOptions())
    assert canonical(costs) is costs


def test_left_over_rows_and_turns_are_those_of_faster_devices() -> None:
    profile, cluster = two_kinds(random_profile(3, batches=(6,)), hierarchy(3, [4]), 3)
    profile = profile.model_copy(update={"layers": tuple(_slower(profile, 3.0))})
    types = ("test", "other", "test", "other")
    devices = [one.model_copy(update={"type": each}) for one, each in zip(cluster.devices, types, strict=True)]
    costs = CostModel(profile, cluster.model_copy(update={"devices": tuple(devices)}), PlanOptions())
    stage = CandidateStage(0, costs.layer_count, (0, 1, 2, 3), (1, 2, 1, 2), 1)
    assert by_share(costs, stage).devices == (0, 1, 2, 3)
    assert by_share(costs, stage._replace(shares=(2, 1, 2, 1))).devices == (1, 0, 3, 2)
    assert by_share(costs, stage._replace(shares=(6,) * 4, division="round-robin")).devices == (1, 3, 0, 2)
    assert by_share(costs, stage._replace(devices=(2, 0), shares=(1, 2))).devices == (2, 0)


def _slower(profile: Profile, factor: float) -> list[Layer]:
    """The first kind's layers, so many times as slow as the second's."""
    return [
        layer.model_copy(
            update={
                "costs": tuple(
                    cost.model_copy(update={"forward_s": factor * cost.forward_s + 1e-3, "backward_s": 1.0})
                    for cost in layer.costs
                )
            }
        )
        for layer in profile.others[0].layers
    ]


def test_dictated_stages_take_devices_as_they_are_listed() -> None:
    for seed in range(3):
        profile, cluster = two_kinds(random_profile(seed, most_layers=4, batches=(4,)), hierarchy(seed, [2, 2]), seed)
        last = len(profile.layers) - 1
        text = f"0-{last}:1" if last == 0 else f"0:1,1-{last}:1"
        options = PlanOptions(stages=text, gpus=4)
        found = plan(profile, cluster, options)
        assert found.devices == tuple(range(len(found.stages)))
        costs = canonical(CostModel(profile, cluster, replace(options, stages=None)))
        candidate = numbered(costs, candidate_of(found, profile))
        assert tuple(costs.listed[at] for at in candidate.devices) == found.devices
