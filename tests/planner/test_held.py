"""What ranks hold over a step, by cause: their most is the plan's, and every cause comes and goes when it should."""

import re

import pytest

from autopar.api.pages import plan_charts
from autopar.formats.cluster import Cluster
from autopar.formats.plan import Plan
from autopar.formats.prediction import HELD_FOR, HeldBytes
from autopar.formats.profile import Profile
from autopar.formats.program import FORWARD, UPDATE
from autopar.formats.timeline import Timeline
from autopar.planner import PlanOptions, held_bytes, plan, simulate
from autopar.report.folding import alike_ranks
from autopar.report.html.charts import Chart
from autopar.report.memory import ranks_shown
from autopar.schedules import SCHEDULES
from equal_plans import equal_plan, llama_profile, random_equal
from random_problems import gpt_profile, local_cluster, random_profile


def _held(made: Plan, profile: Profile, cluster: Cluster) -> tuple[Timeline, dict[int, HeldBytes]]:
    timeline = simulate(made, profile, cluster)
    return timeline, held_bytes(made, profile, cluster, timeline, range(timeline.rank_count()))


def _peaks(made: Plan, held: dict[int, HeldBytes]) -> list[int]:
    """Return the most that a replica of every stage holds at any moment."""
    ranks = made.ownership.ranks
    return [
        max(max(held[rank].totals) for rank, share in enumerate(ranks) if at in share.stages)
        for at in range(len(made.stages))
    ]


@pytest.mark.parametrize("seed", range(12))
def test_the_most_that_is_held_is_what_the_plan_says(seed: int) -> None:
    schedules = sorted(SCHEDULES)
    made, profile, cluster = random_equal(seed, [schedules[seed % len(schedules)]])
    _, held = _held(made, profile, cluster)
    assert _peaks(made, held) == list(made.predicted.peak_bytes)
    assert {each.limit_bytes for each in held.values()} == set(made.predicted.limit_bytes)


@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients", "parameters"])
@pytest.mark.parametrize("recompute", [(), (1, 2, 3)])
def test_so_it_is_where_replicas_shard_and_layers_are_recomputed(shard: str, recompute: tuple[int, ...]) -> None:
    profile = llama_profile(6, batch=32)
    made, cluster = equal_plan(profile, "1f1b", 2, 2, 4, shard=shard, recompute=recompute)  # type: ignore[arg-type]
    _, held = _held(made, profile, cluster)
    assert _peaks(made, held) == list(made.predicted.peak_bytes)
    whole, cluster = equal_plan(profile, "1f1b", 2, 2, 4)
    without = _held(whole, profile, cluster)[1][0].causes
    assert (held[0].causes["optimizer state"] < without["optimizer state"]) == (shard != "none")
    assert (max(held[0].causes["activations"]) < max(without["activations"])) == bool(recompute)


@pytest.mark.parametrize("policy", ["stash", "2bw", "predict"])
def test_without_flushes_older_versions_count_and_no_more_is_held_than_planned(policy: str) -> None:
    profile, cluster = random_profile(10), local_cluster(2)
    made = plan(profile, cluster, PlanOptions(policy=policy, min_stages=2))  # type: ignore[arg-type]
    _, held = _held(made, profile, cluster)
    for found, planned in zip(_peaks(made, held), made.predicted.peak_bytes, strict=True):
        assert 0.5 * planned < found <= planned
    if policy == "stash":
        assert held[0].causes["weight versions"][0] > 0


@pytest.mark.parametrize(("eager", "times"), [(False, 3), (True, 5)])
def test_what_is_kept_of_waves_counts(eager: bool, times: int) -> None:
    """Of two pipelines, D = 1: the weights and 2 (D + 1) waves, less two that pass; if eager, 2 D + 2 waves."""
    profile, cluster = random_profile(10), local_cluster(2)
    whole = f"0-{len(profile.layers) - 1}"
    asked = PlanOptions(policy="wsp", stages=f"{whole}/{whole}", micro_batches=1, staleness=1, eager=eager)
    _, held = _held(plan(profile, cluster, asked), profile, cluster)
    trained = sum(layer.trainable_bytes for layer in profile.layers)
    assert held[0].causes["weight versions"][0] == times * trained


def test_causes_come_and_go_with_what_a_rank_does() -> None:
    profile, cluster = gpt_profile(blocks=4), local_cluster(2)
    made = plan(profile, cluster, PlanOptions(gpus=2, stages="0-2:1,3-5:1", schedule="gpipe", micro_batches=4))
    timeline, held = _held(made, profile, cluster)
    for rank, own in held.items():
        assert list(own.causes) == [cause for cause in HELD_FOR if cause in own.causes]
        assert own.times_s == tuple(sorted(own.times_s))
        at = dict(zip(own.times_s, range(len(own.times_s)), strict=True))
        forwards = [event for event in timeline if event.rank == rank and event.action.kind == FORWARD]
        kept = [own.causes["activations"][at[event.end_s]] for event in forwards]
        assert kept == [kept[0] * count for count in (1, 2, 3, 4)] or rank == 1
        assert (own.causes["activations"][-1], own.causes["computing"][-1]) == (0, 0)
        (update,) = (event for event in timeline if event.rank == rank and event.action.kind == UPDATE)
        updating = own.causes.get("update", (0,) * len(own.times_s))
        assert updating[at[update.start_s]] == max(updating)
        assert own.causes["gradients"][at[update.start_s]] == max(own.causes["gradients"])
        assert len(set(own.causes["parameters and buffers"])) == 1


@pytest.mark.parametrize("seed", range(6))
def test_a_plan_without_limits_shows_the_rank_that_holds_most(seed: int) -> None:
    """Older files have none; stages are then as full as their peaks are large."""
    made, profile, cluster = random_equal(seed, ["1f1b", "interleaved"])
    predicted = made.predicted.model_copy(update={"limit_bytes": ()})
    unlimited = made.model_copy(update={"predicted": predicted})
    _, held = _held(made, profile, cluster)
    drawn = next(iter(plan_charts(unlimited, lambda: (profile, cluster))))
    assert isinstance(drawn, Chart)
    (rank,) = re.findall(r"what rank (\d+) holds, the fullest", drawn.about)
    assert max(held[int(rank)].totals) == max(max(each.totals) for each in held.values())
    groups = alike_ranks(simulate(made, profile, cluster))
    assert int(rank) in [
        rank for group in groups if group.members[0] in ranks_shown(unlimited, groups) for rank in group.members
    ]
