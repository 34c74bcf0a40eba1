"""Plans whose replicas teams may run: the fastest of all, and teams where and as large as they serve."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from autopar.errors import InfeasibleError, UsageError
from autopar.formats.cluster import Cluster, Device, Link
from autopar.formats.cuts import ParameterCut
from autopar.formats.plan import Plan
from autopar.formats.profile import Layer, LayerSplit, PartCosts, PartSum, Profile
from autopar.ownership import Replicas
from autopar.planner import PlanOptions, plan
from autopar.planner.candidate import Candidate, Family, place, splits_backward, with_depths
from autopar.planner.costs.model import CostModel
from autopar.planner.degrees import degree_notes
from autopar.planner.search.judge import Best
from autopar.planner.simulator.simulate import Simulator
from autopar.schedules import SCHEDULES
from chunked import halved
from in_parts import in_parts
from random_problems import gpt_profile, random_cluster, random_profile
from searched import agreed, exhausted
from team_problems import placed_team_problem, planned_s, team_problem

BLOCKS = 4
SIZES = ("parameters_bytes", "trainable_bytes", "gradient_bytes", "optimizer_bytes", "update_bytes")


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.some(7)
def test_an_exact_search_finds_the_fastest_of_all_plans_with_teams(seed: int) -> None:
    agreed(*team_problem(seed), seed)


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.some(6)
def test_an_exact_search_finds_the_fastest_where_teams_stand_on_nodes_and_racks(seed: int) -> None:
    agreed(*placed_team_problem(seed), seed)


def test_a_number_is_the_degree_of_every_stage_of_problems_that_are_drawn() -> None:
    """Of one kind of device or two, whatever others' plans would take."""
    kept = 0
    for seed in range(12):
        profile, cluster, options = placed_team_problem(seed)
        for asked in (replace(options, tensor=2, gap=0.02, exact=seed % 2 == 0), replace(options, tensor=2)):
            try:
                made = plan(profile, cluster, asked)
            except (InfeasibleError, UsageError):
                continue
            assert set(teams_of(made)) == {2}, f"seed {seed}"
            kept += 1
    assert kept > 6


@pytest.mark.parametrize("seed", range(100, 124))
@pytest.mark.some(4)
def test_no_bound_is_above_the_fastest_plan_that_teams_make_and_milp_finds_it(seed: int) -> None:
    profile, cluster, options = team_problem(seed)
    every_s = exhausted(profile, cluster, options)[0].step_s
    least_s = min(every_s, planned_s(profile, cluster, options))
    # The program knows stages of one kind of device each.
    program = replace(options, solver="milp")
    programmed_s, apart_s = planned_s(profile, cluster, program), exhausted(profile, cluster, program)[0].step_s
    assert least_s * (1 - 1e-9) <= programmed_s <= apart_s * (1 + 1e-9)
    assert every_s < apart_s or programmed_s == pytest.approx(least_s, rel=1e-9)
    for exact in (True, False):
        asked = replace(options, gap=0.02, exact=exact)
        try:
            made = plan(profile, cluster, asked)
        except InfeasibleError:
            assert least_s == float("inf")
            continue
        assert made.predicted.lower_bound_s <= least_s * (1 + 1e-9)
        assert made.predicted.step_s >= least_s * (1 - 1e-9)
        alone = replace(asked, tensor=1, across_nodes=False)
        assert not exact or made.predicted.step_s <= planned_s(profile, cluster, alone) * (1 + 1e-9)


def _part(layer: Layer, count: int, exchanged: int) -> PartCosts:
    """Return a part that computes and holds 1 / count of a layer, and sums so many bytes a sample each way."""

    def sums(rows: int) -> tuple[PartSum, ...]:
        each = ("forward", "backward_input")
        return tuple(PartSum(kind="all_reduce", at=at, ranks=count, bytes=exchanged * rows) for at in each)

    costs = tuple(
        cost.model_copy(
            update={
                "forward_s": cost.forward_s / count,
                "backward_s": cost.backward_s / count,
                "sums": sums(cost.micro_batch),
            }
        )
        for cost in layer.costs
    )
    return PartCosts(costs=costs, **{name: -(-getattr(layer, name) // count) for name in SIZES})


def splitting(names: Collection[str] | None = None, batch: int = 16, exchanged: int = 100_000) -> Profile:
    """Return a chain whose layers of some names split in 2 and 4, by default all."""
    profile = gpt_profile(blocks=BLOCKS, batch=batch).model_copy(update={"tied": ()})

    def split(layer: Layer) -> Layer:
        if names is not None and layer.name not in names:
            return layer
        found = []
        for count in (2, 4):
            cut = ParameterCut(parameter=f"{layer.name}.w", dim=0, parts=tuple(((at, at + 1),) for at in range(count)))
            found.append(LayerSplit(count=count, cuts=(cut,), part=_part(layer, count, exchanged)))
        return layer.model_copy(update={"splits": tuple(found)})

    return profile.model_copy(update={"layers": tuple(map(split, profile.layers))})


def cluster_of(devices: int = 8, node: int = 8, bytes_per_s: float = 1e10) -> Cluster:
    every = tuple(Device(type="cpu", memory_bytes=2**33, node=at // node) for at in range(devices))
    links = (
        Link(level="node", latency_s=1e-5, bytes_per_s=bytes_per_s),
        Link(level="network", latency_s=5e-5, bytes_per_s=bytes_per_s / 10),
    )
    return Cluster(devices=every, links=links)


def teams_of(made: Plan) -> list[int]:
    return [stage.tensor_parallel for stage in made.stages]


def test_a_micro_batch_of_one_row_is_divided_by_teams_and_links_ten_times_slower_turn_them_off() -> None:
    profile, asked = splitting(batch=1, exchanged=3_000_000), PlanOptions(gpus=4, schedule="1f1b", exact=True)
    quick, slow = (plan(profile, cluster_of(4, bytes_per_s=each), asked) for each in (1e10, 1e9))
    assert set(teams_of(quick)) == {4}
    assert set(teams_of(slow)) == {1}
    # A number is kept to where single devices are faster, and where others' plans have them.
    for exact in (False, True):
        assert set(teams_of(plan(profile, cluster_of(4, bytes_per_s=1e9), replace(asked, tensor=2, exact=exact)))) == {
            2
        }
    assert quick.predicted.step_s < 0.6 * plan(profile, cluster_of(4), replace(asked, tensor=1)).predicted.step_s


def test_only_the_last_stage_has_a_team_where_only_its_layer_fits_no_device() -> None:
    profile = splitting({"head"})
    heavy = {name: 40 * getattr(profile.layers[-1], name) for name in SIZES}
    parts = tuple(
        each.model_copy(update={"part": _part(profile.layers[-1].model_copy(update=heavy), each.count, 100_000)})
        for each in profile.layers[-1].splits
    )
    head = profile.layers[-1].model_copy(update={**heavy, "splits": parts})
    profile = profile.model_copy(update={"layers": (*profile.layers[:-1], head)})
    limit = head.parameters_bytes + head.gradient_bytes + head.optimizer_bytes
    asked = PlanOptions(gpus=8, memory_bytes=limit * 3 // 8, schedule="1f1b", shard="none")
    made = plan(profile, cluster_of(), asked)
    assert teams_of(made)[-1] == 4
    assert set(teams_of(made)[:-1]) == {1}
    with pytest.raises(InfeasibleError, match="tensor='auto'"):
        plan(profile, cluster_of(), replace(asked, tensor=1, gpus=8))


def test_no_team_crosses_nodes_unless_it_may_and_no_stage_has_one_with_nothing_to_divide() -> None:
    profile, cluster = splitting({"h.0", "h.1"}, batch=1), cluster_of(8, node=3)
    for across in (False, True):
        made = plan(profile, cluster, PlanOptions(across_nodes=across, schedule="1f1b", exact=True))
        nodes = [device.node for device in cluster.devices]
        for stage in made.stages:
            size = stage.tensor_parallel
            each = [stage.devices[at : at + size] for at in range(0, len(stage.devices), size)]
            assert across or all(len({nodes[device] for device in team}) == 1 for team in each)
            assert size == 1 or {"h.0", "h.1"} & set(stage.layers)
        assert max(teams_of(made)) > 1


@pytest.mark.parametrize(
    ("changes", "asked", "said"),
    [
        ({"compiled": True}, {"tensor": 2}, "`tensor=2`: the profile of model.py is of compiled layers"),
        ({"indivisible": "it sorts"}, {"across_nodes": True}, "cannot step parts of parameters: it sorts"),
        ({}, {"tensor": 8}, "in 2, 4 parts only, and not in 8; profile again"),
        ({}, {"tensor": 2, "sequence_parallel": "on"}, "nothing between the layers can be kept in slices"),
        ({}, {"tensor": 2, "stages": "0-5:1"}, "`tensor` does not go with `stages`"),
        ({}, {"tensor": 1, "sequence_parallel": True}, "`tensor` is 1; leave out one"),
        ({"layers": gpt_profile(blocks=BLOCKS).layers}, {"tensor": 2}, "no layer of model.py splits"),
    ],
    ids=str,
)
def test_teams_that_cannot_be_are_refused_with_the_option(
    changes: dict[str, Any], asked: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        plan(splitting().model_copy(update=changes), cluster_of(), PlanOptions(**asked))


def test_a_number_is_the_degree_of_every_stage_and_the_best_uniform_layout_stands_beside_the_plan() -> None:
    made = plan(splitting(batch=4), cluster_of(), PlanOptions(tensor=2))
    assert set(teams_of(made)) == {2}
    found = plan(splitting(batch=4), cluster_of(), PlanOptions(exact=True))
    uniform = [each.step_s for each in found.alternatives if each.name.startswith("best uniform layout")]
    assert uniform
    assert found.predicted.step_s <= min(each for each in uniform if each is not None) * (1 + 1e-9)
    alone = plan(splitting(batch=4), cluster_of(), PlanOptions(tensor=1))
    assert not [each for each in alone.alternatives if each.name.startswith("best uniform layout")]
    assert alone.predicted == plan(gpt_without_ties(), cluster_of(), PlanOptions()).predicted


def gpt_without_ties() -> Profile:
    return gpt_profile(blocks=BLOCKS, batch=4).model_copy(update={"tied": ()})


def test_a_plan_says_why_its_stages_have_teams_and_what_single_devices_would_cost() -> None:
    profile, asked = splitting(batch=1, exchanged=3_000_000), PlanOptions(gpus=4, schedule="1f1b", exact=True)
    quick, slow = (" ".join(plan(profile, cluster_of(4, bytes_per_s=each), asked).notes) for each in (1e10, 1e9))
    assert "4 devices run each replica, since a micro-batch of 1 sample has none for each of 4 replicas" in quick
    assert "with one device a replica everywhere, the fastest plan met takes +" in quick
    factor = float(quick.split("takes less than about ")[1].split(" times")[0])
    assert 1 < factor < 10
    assert "run each replica" not in slow
    asked = PlanOptions(schedule="1f1b")
    wide = {size: plan(splitting(exchanged=size), cluster_of(), asked).notes for size in (100_000, 3_000_000)}
    assert any("with one each a step would take +" in each for each in wide[100_000])
    assert any("together: the fastest plan met in which some do takes +" in each for each in wide[3_000_000])


def test_why_devices_run_several_stages_together_is_asked_of_all_stages_that_they_run() -> None:
    costs, family = CostModel(splitting(batch=8), cluster_of(), PlanOptions()), Family(2, 4, "interleaved")
    depths, simulator = next(iter(SCHEDULES[family.schedule].warmups(2, 2, 2).values())), Simulator(costs)

    def candidate(*groups: Replicas) -> Candidate:
        return with_depths(family, place(family, (1, 3, 4, costs.layer_count), groups), depths)

    team, each = Replicas(2, team=2), Replicas(4)
    step_s = simulator.step_s(candidate(team, team))
    first, second = (simulator.step_s(candidate(*groups)) / step_s - 1 for groups in ((each, team), (team, each)))
    notes = degree_notes(simulator, Best(), candidate(team, team))
    since = "2 devices run each replica, since with one each a step would take"
    wanted = [f"stage {at}: {since} {(first, second)[at % 2]:+.1%}" for at in range(4)]
    assert notes[:4] == wanted


@pytest.mark.some(2)
@pytest.mark.parametrize("schedule", ["auto", "zb-h1", "zb-v", "interleaved"])
def test_parts_whose_halves_were_not_measured_are_left_out_of_schedules_that_need_them(schedule: str) -> None:
    for seed in (1, 6):
        # Layers have halves, and their parts have none.
        profile = halved(in_parts(random_profile(seed, 7, (4, 8)), seed), seed)
        made = plan(profile, random_cluster(seed, 4), PlanOptions(gpus=4, schedule=schedule, exact=seed == 1))
        assert not splits_backward(made.schedule) or set(teams_of(made)) == {1}
