"""Stages that are dictated with several devices for each replica."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import InfeasibleError, UsageError
from autopar.formats.cuts import ParameterCut
from autopar.formats.plan import Plan
from autopar.formats.profile import Layer, LayerPart, LayerSplit, Profile
from autopar.formats.program import ActionPrices
from autopar.hardware.clusters import cluster_named
from autopar.planner import PlanOptions, action_prices, plan, simulate
from autopar.planner.simulator.simulate import pipeline_times
from autopar.schedules.check import check
from autopar.schedules.expand import expand
from random_problems import gpt_profile, hierarchy, in_parts, local_cluster

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


def part_of(layer: Layer, count: int) -> LayerPart:
    """Return a part that takes as long as the layer, and holds as much less as it has less parameters."""
    names = ("parameters_bytes", "trainable_bytes", "gradient_bytes", "optimizer_bytes", "update_bytes")
    return LayerPart(costs=layer.costs, **{name: -(-getattr(layer, name) // count) for name in names})


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


def halved(profile: Profile) -> Profile:
    """Return a profile whose backwards are in halves, too."""
    layers = []
    for layer in profile.layers:
        costs = (
            each.model_copy(
                update={
                    "backward_input_s": 0.6 * each.backward_s,
                    "backward_weight_s": 0.5 * each.backward_s,
                    "weight_saved_bytes": each.saved_bytes,
                }
            )
            for each in layer.costs
        )
        layers.append(layer.model_copy(update={"costs": tuple(costs)}))
    return profile.model_copy(update={"layers": tuple(layers)})


def any_teams(rng: random.Random, layers: int) -> str:
    """Return stages of up to three of so many layers, on teams of any size that parts are known of."""
    ends = [*sorted(rng.sample(range(2, layers, 2), rng.randint(0, 2))), layers]
    parts = zip([0, *ends], ends, strict=False)
    return ",".join(f"{first}-{stop - 1}:{rng.randint(1, 2)}x{rng.choice([1, 2, 4])}" for first, stop in parts)


@settings(max_examples=4, deadline=None)
@given(st.integers(0, 2**31))
def test_any_dictated_teams_make_a_program(seed: int) -> None:
    stages = any_teams(random.Random(seed), LAYERS)
    made = plan(splitting(layers=range(LAYERS)), local_cluster(24), PlanOptions(stages=stages))
    check(expand(made), made)
    assert sorted(made.devices) == list(range(len(made.devices)))


@pytest.mark.some(2)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"schedule": "zb-h1"},
        {"schedule": "gpipe", "recompute": "full"},
        {"shard": "optimizer"},
        {"policy": "2bw"},
        {"policy": "pipemare", "anneal_steps": 10},
        {"division": "round-robin"},
    ],
)
def test_any_dictated_teams_take_what_their_plan_says_and_no_less_than_their_bound(
    seed: int, options: dict[str, Any]
) -> None:
    rng = random.Random(seed)
    profile, cluster = in_parts(halved(gpt_profile(blocks=7)), seed), hierarchy(seed, [8, 8, 8])
    if options.get("policy") == "pipemare":
        profile = profile.model_copy(update={"tied": ()})
    # No two layers after each other are whole.
    stages = any_teams(rng, LAYERS)
    made = plan(profile, cluster, PlanOptions(stages=stages, **options))
    timeline = simulate(made, profile, cluster)
    assert timeline.rank_count() == len(made.devices)
    period_s = timeline.end_s if not made.lead else pipeline_times(timeline, made).period_s
    assert made.predicted.step_s == pytest.approx(period_s, rel=1e-12)
    assert made.predicted.lower_bound_s <= made.predicted.step_s
    prices = action_prices(made, profile, cluster)
    for team in {team for teams in made.ownership.replicas for team in teams}:
        assert len({tuple(sorted(_computing(prices, rank).items())) for rank in team}) == 1


def _computing(prices: ActionPrices, rank: int) -> dict[str, float]:
    return {key: seconds for key, seconds in prices.ranks[rank].seconds.items() if not key.startswith("S")}
