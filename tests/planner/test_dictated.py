"""Stages that are dictated with several devices for each replica."""

from typing import Any

import pytest

from autopar.errors import InfeasibleError, UsageError
from autopar.formats.cuts import ParameterCut
from autopar.formats.plan import Plan
from autopar.formats.profile import Layer, LayerSplit, PartCosts, Profile
from autopar.formats.program import ActionPrices
from autopar.hardware.clusters import cluster_named
from autopar.planner import PlanOptions, action_prices, plan, simulate
from autopar.planner.simulator.simulate import pipeline_times
from autopar.schedules.check import check
from autopar.schedules.expand import expand
from in_parts import dictated_teams
from random_problems import gpt_profile, local_cluster

LAYERS = len(gpt_profile(blocks=7).layers)


def splitting(counts: tuple[int, ...] = (2, 4), layers: range = range(1, LAYERS)) -> Profile:
    """Return a profile some of whose layers split."""
    profile, found = gpt_profile(blocks=7), []
    for index, layer in enumerate(profile.layers):
        parts = {count: tuple(((8 * at // count, 8 * (at + 1) // count),) for at in range(count)) for count in counts}
        cuts = {count: ParameterCut(parameter=f"w{index}", dim=0, parts=each) for count, each in parts.items()}
        splits = [LayerSplit(count=count, cuts=(cut,), part=part_of(layer, count)) for count, cut in cuts.items()]
        obstacles = ("aten.sort.default: it has no rule",)
        fields: dict[str, Any] = {"splits": tuple(splits)} if index in layers else {"split_obstacles": obstacles}
        found.append(layer.model_copy(update=fields))
    return profile.model_copy(update={"layers": tuple(found)})


def part_of(layer: Layer, count: int) -> PartCosts:
    """Return a part that takes as long as the layer, and holds as much less as it has less parameters."""
    names = ("parameters_bytes", "trainable_bytes", "gradient_bytes", "optimizer_bytes", "update_bytes")
    return PartCosts(costs=layer.costs, **{name: -(-getattr(layer, name) // count) for name in names})


def planned(stages: str, devices: int = 8, **options: Any) -> Plan:  # noqa: ANN401
    return plan(splitting(), local_cluster(devices), PlanOptions(stages=stages, **options))


def test_teams_have_the_cuts_and_memory_of_their_devices() -> None:
    made = planned(f"0-4:2x2,5-{LAYERS - 1}:1x4")
    alone = plan(splitting(), local_cluster(8), PlanOptions(stages=f"0-4:2,5-{LAYERS - 1}:1"))
    assert [stage.devices for stage in made.stages] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [(stage.replicas, stage.tensor_parallel) for stage in made.stages] == [(2, 2), (1, 4)]
    assert [[cut.parameter for cut in stage.cuts] for stage in made.stages] == [
        [f"w{index}" for index in range(1, 5)],
        [f"w{index}" for index in range(5, LAYERS)],
    ]
    assert [stage.shares for stage in made.stages] == [stage.shares for stage in alone.stages]
    assert (made.schedule, made.micro_batches, made.tensors) == (alone.schedule, alone.micro_batches, alone.tensors)
    assert made.refusal is None
    check(expand(made), made)
    options = {"micro_batches": 1, "recompute": "none"}
    least = planned(f"0-{LAYERS - 1}:1", **options).predicted.peak_bytes[0]
    divided = planned(f"0-{LAYERS - 1}:1x2", **options).predicted
    assert divided.peak_bytes[0] < least
    options["memory_bytes"] = (least + divided.peak_bytes[0]) // 2
    with pytest.raises(InfeasibleError):
        planned(f"0-{LAYERS - 1}:1", **options)
    within = planned(f"0-{LAYERS - 1}:1x2", **options).predicted
    assert (within.peak_bytes, within.limit_bytes) == (divided.peak_bytes, (options["memory_bytes"],))


def test_plans_with_teams_survive_their_file_and_stay_on_a_node_unless_asked() -> None:
    made = planned(f"0-{LAYERS - 1}:1x2")
    assert Plan.model_validate_json(made.dumps()) == made
    assert planned(f"0-{LAYERS - 1}:2x1") == planned(f"0-{LAYERS - 1}:2")
    assert simulate(made, splitting(), local_cluster(2)).end_s == pytest.approx(made.predicted.step_s, rel=1e-12)
    with pytest.raises(UsageError, match="a program of your own is not simulated where several devices run a replica"):
        simulate(made, splitting(), local_cluster(2), expand(made))
    made = planned(f"0-{LAYERS - 1}:1x4", devices=2)
    assert made.stages[0].devices == (0, 1, 2, 3)
    assert any("planning for 4 assumes 2 more like them" in note for note in made.notes)
    profile, cluster, end = splitting(), cluster_named("2x4xH100"), LAYERS - 1
    options = PlanOptions(times_of="cpu", stages=f"0-4:1x2,5-{end}:1x4")
    made = plan(profile, cluster, options)
    assert [stage.devices for stage in made.stages] == [(0, 1), (4, 5, 6, 7)]
    wide = PlanOptions(times_of="cpu", stages=f"0-4:3,5-{end}:1x4", micro_batches=1)
    assert plan(profile, cluster, wide).stages[1].devices == (4, 5, 6, 7)
    narrow = cluster_named("4x2xH100")
    with pytest.raises(UsageError, match=r"no node has 4 devices left for a replica of stage 1.*`across_nodes=True`"):
        plan(profile, narrow, options)
    across = PlanOptions(times_of="cpu", stages=options.stages, across_nodes=True)
    assert plan(profile, narrow, across).stages[1].devices == (2, 3, 4, 5)


@pytest.mark.parametrize(
    ("stages", "options", "said"),
    [
        (f"0-{LAYERS - 1}:1x3", {}, "splits in 3 parts; the profile has splits in 2, 4; .*: aten.sort.default: it has"),
        (f"0-0:1x2,1-{LAYERS - 1}:1", {}, r"nothing in stage 0 .* splits in 2 parts; .* has none of its layers"),
        (f"0-{LAYERS - 1}:2x4", {"gpus": 4}, "`stages` needs 8 devices, but `gpus` is 4"),
        (f"0-{LAYERS - 1}:1xx2", {}, "write layers:replicas, such as 0-5:2, or with the devices that run each replica"),
        (f"0-{LAYERS - 1}:1x0", {}, "write layers:replicas"),
        (f"0-{LAYERS - 1}:1x2", {"sequence_parallel": True}, "nothing between the layers of these stages"),
        (f"0-{LAYERS - 1}:1", {"sequence_parallel": True}, "`sequence_parallel` is of `stages` with several devices"),
        (f"0-{LAYERS - 1}:2", {"across_nodes": True}, "`across_nodes` is of `stages` with several devices"),
    ],
)
def test_stages_that_cannot_be_so_are_refused(stages: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        planned(stages, **options)


@pytest.mark.some(1)
@pytest.mark.parametrize("part", range(3))
def test_any_dictated_teams_make_a_program_and_take_what_their_plan_says(part: int) -> None:
    found = [made for seed in range(10 * part, 10 * (part + 1)) if (made := dictated_teams(seed)) is not None]
    assert len(found) > 1
    for made, profile, cluster in found:
        check(expand(made), made)
        timeline = simulate(made, profile, cluster)
        assert timeline.rank_count() == len(made.devices)
        assert made.predicted.step_s == pytest.approx(timeline.end_s, rel=1e-12)
        assert made.predicted.lower_bound_s <= made.predicted.step_s * (1 + 1e-12)
        _check_alike(made, action_prices(made, profile, cluster))


@pytest.mark.parametrize(
    "options",
    [{"policy": "2bw"}, {"policy": "stash"}, {"policy": "predict"}, {"policy": "pipemare", "anneal_steps": 10}],
    ids=lambda options: options["policy"],
)
def test_teams_go_on_without_flushes(options: dict[str, Any]) -> None:
    profile, cluster = splitting().model_copy(update={"tied": ()}), local_cluster(8)
    made = plan(profile, cluster, PlanOptions(stages=f"0-4:1x2,5-{LAYERS - 1}:1x4", **options))
    period_s = pipeline_times(simulate(made, profile, cluster), made).period_s
    assert made.predicted.step_s == pytest.approx(period_s, rel=1e-12)
    _check_alike(made, action_prices(made, profile, cluster))


def _check_alike(made: Plan, prices: ActionPrices) -> None:
    """Check that whatever ranks of a team compute is priced alike."""
    for team in {team for teams in made.ownership.replicas for team in teams}:
        each = [prices.ranks[rank].seconds.items() for rank in team]
        assert len({tuple(sorted(item for item in own if not item[0].startswith("S"))) for own in each}) == 1
