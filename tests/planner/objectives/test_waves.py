"""Plans of several pipelines: priced, held against memory, simulated, rehearsed; what they do not have is refused."""

import math
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from autopar.errors import InfeasibleError, UsageError
from autopar.formats.cluster import Cluster
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile, TiedParameter, Writes
from autopar.formats.timeline import Timeline
from autopar.options.plan import PlanOptions, check_policy
from autopar.ownership import SINGLE
from autopar.planner.assemble import action_prices, candidate_of, simulate
from autopar.planner.candidate import Family, place
from autopar.planner.constraints import Question
from autopar.planner.objectives import waves
from autopar.planner.objectives.dealings import Cutter
from autopar.planner.order import numbered
from autopar.planner.peers.hetpipe import can_partition, makeup_of
from autopar.planner.plan import plan
from autopar.planner.simulator.simulate import mini_batches, pipeline_times
from autopar.runtime.rehearsal.steps import rehearse_steps
from priced import nodes_of
from random_problems import local_cluster, random_cluster, random_profile, two_kinds


def drawn(seed: int) -> tuple[Plan, Profile, Cluster]:
    """Return a plan of two to four pipelines that cut a random profile in unlike ways."""
    draw, profile = random.Random(seed), random_profile(seed, batches=(1, 2, 4))
    layers, texts, devices = len(profile.layers), list[str](), 0
    for _ in range(draw.randint(2, 4)):
        cuts = sorted(draw.sample(range(1, layers), draw.randint(0, min(3, layers - 1))))
        devices += len(cuts) + 1
        texts.append(",".join(f"{first}-{stop - 1}" for first, stop in zip((0, *cuts), (*cuts, layers), strict=True)))
    options = PlanOptions(
        policy="wsp",
        stages="/".join(texts),
        micro_batches=1,
        wave=draw.choice([None, 1, 2, 5]),
        staleness=draw.choice([None, 0, 1, 3]),
        eager=draw.choice([False, True]),
    )
    cluster = random_cluster(seed, devices)
    with suppress(UsageError):
        return plan(profile, cluster, options), profile, cluster
    # Its stages share a parameter, which is refused.
    alone = profile.model_copy(update={"tied": ()})
    return plan(alone, cluster, options), alone, cluster


def ends(timeline: Timeline) -> list[tuple[int, str, float]]:
    """Return when what ranks compute, push and pull ended, in their order."""
    found = [(each.rank, each.end_s, str(each.action)) for each in timeline if each.action.peer < 0]
    return [(rank, text, end_s) for rank, end_s, text in sorted(found)]


@pytest.mark.some(5)
@pytest.mark.parametrize("seed", range(40))
def test_pipelines_take_as_long_as_simulated(seed: int) -> None:
    made, profile, cluster = drawn(seed)
    simulated, prices = simulate(made, profile, cluster), action_prices(made, profile, cluster)
    rehearsed = rehearse_steps(made, profile, prices, mini_batches(made), threads=True)
    assert ends(rehearsed.timeline) == [
        (rank, text, pytest.approx(end_s, rel=1e-9, abs=1e-9 * simulated.end_s))
        for rank, text, end_s in ends(simulated)
    ]
    assert made.predicted.step_s == pytest.approx(pipeline_times(simulated, made).period_s)
    assert made.predicted.lower_bound_s <= made.predicted.step_s
    assert Plan.parse(made.dumps(), Path("plan.json")) == made


PIPELINES = "0-1,2-4/0-2,3-3,4-4"


def test_waves_and_versions_are_charged_and_a_period_is_the_slowest_pipelines() -> None:
    """Beside versions as under stashing: the weights that all have, and of D + 1 waves what was changed and its sum."""
    profile, cluster = random_profile(10), local_cluster(5)
    stash = plan(profile, cluster, PlanOptions(policy="stash", stages="0-1,2-4", micro_batches=1, recompute="none"))
    trained = [sum(one.trainable_bytes for one in profile.layers[own]) for own in (slice(2), slice(2, 5))]
    for staleness in (0, 3):
        options = PlanOptions(policy="wsp", stages=PIPELINES, wave=3, staleness=staleness, recompute="none")
        found = plan(profile, cluster, options)
        assert found.pipelines == (2, 3)
        assert [each.warmup for each in found.separate[0].stages] == [each.warmup for each in stash.stages]
        more = [one - other for one, other in zip(found.predicted.peak_bytes, stash.predicted.peak_bytes, strict=False)]
        # Of a wave, what is loaded ahead is more, too.
        assert [each // size for each, size in zip(more, trained, strict=True)] == [1 + 2 * (staleness + 1)] * 2
    with pytest.raises(InfeasibleError, match=r"pipeline 0 of policy wsp does not fit its devices, with the waves"):
        plan(profile, cluster, PlanOptions(policy="wsp", stages=PIPELINES, memory_bytes=1000))


def test_waves_that_eager_pipelines_keep_are_charged() -> None:
    """The weights of the last push, on CPUs 2 D + 2 waves of every other pipeline, and for a while one more."""
    profile, several = random_profile(10), f"{PIPELINES}/0-4"
    trained = [sum(one.trainable_bytes for one in profile.layers[own]) for own in (slice(2), slice(2, 5))]
    on_gpus = profile.model_copy(update={"device": profile.device.model_copy(update={"type": "cuda"})})
    for measured, counts in ((profile, {0: 4, 3: 16}), (on_gpus, {0: 0, 3: 0})):
        for staleness, kept in counts.items():
            options = PlanOptions(policy="wsp", stages=several, wave=3, staleness=staleness, recompute="none")
            peaks = [
                plan(measured, local_cluster(6), replace(options, eager=eager)).predicted.peak_bytes[:2]
                for eager in (False, True)
            ]
            more = [eager - summed for summed, eager in zip(*peaks, strict=True)]
            # Beside the weights that all have, a wave's changes and the sum.
            beside = kept - 2 * (staleness + 1)
            assert all(size * beside <= each <= size * (beside + 1) for each, size in zip(more, trained, strict=True))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"policy": "stash", "stages": PIPELINES}, "several pipelines, apart by slashes, which only `policy='wsp'`"),
        ({"policy": "wsp", "stages": "0-4"}, "trains several pipelines; give the stages of each in `stages`"),
        ({"policy": "wsp", "gpus": 1}, "there is one device; plan with `gpus=2`"),
        ({"policy": "wsp", "stages": "0-4:2/0-4"}, "pipeline 0 has several devices for a stage"),
        ({"policy": "wsp", "stages": PIPELINES, "micro_batches": 2}, "plan with `micro_batches=1`"),
        ({"policy": "wsp", "stages": "0-4/0-3"}, "layer.4 is in no stage|layer.4..layer.4"),
        ({"policy": "stash", "wave": 2}, "`wave` is of `policy='wsp'`; leave it out"),
        ({"policy": "sync", "staleness": 0}, "`staleness` is of `policy='wsp'`; leave it out"),
        ({"policy": "stash", "eager": True}, "`eager` is of `policy='wsp'`; leave it out"),
        ({"policy": "wsp", "stages": PIPELINES, "gpus": 4}, "`stages` needs 5 devices, but `gpus` is 4"),
    ],
)
def test_what_several_pipelines_do_not_have_is_refused_by_name(asked: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        plan(random_profile(10, batches=(4,)), local_cluster(5), PlanOptions(**asked))  # type: ignore[arg-type]


def test_layers_that_write_buffers_are_refused() -> None:
    profile = random_profile(10)
    writing = profile.layers[0].model_copy(update={"writes": Writes(buffers=("count",))})
    profile = profile.model_copy(update={"layers": (writing, *profile.layers[1:])})
    with pytest.raises(UsageError, match=r"layer layer\.0 writes buffers, which pipelines do not tell each other"):
        plan(profile, local_cluster(5), PlanOptions(policy="wsp", stages=PIPELINES))


def test_stages_that_share_a_parameter_are_refused_and_all_its_layers_in_one_stage_are_not() -> None:
    shared = TiedParameter(parameter="w", layers=("layer.3", "layer.4"), bytes=200_000)
    profile = random_profile(10).model_copy(update={"tied": (shared,)})
    with pytest.raises(UsageError, match=r"stages 1 and 2 of pipeline 1 share w; give all layers that use it to one"):
        plan(profile, local_cluster(5), PlanOptions(policy="wsp", stages=PIPELINES))
    found = plan(profile, local_cluster(5), PlanOptions(policy="wsp", stages="0-1,2-4/0-2,3-4"))
    assert found.pipelines == (2, 2)


@pytest.mark.some(5)
@pytest.mark.parametrize("seed", range(40))
def test_pipelines_are_dealt_and_cut_as_well_as_any_by_trying_all_cuts(seed: int) -> None:
    draw = random.Random(seed)
    profile = random_profile(seed, most_layers=5, batches=(1, 2, 4)).model_copy(update={"tied": ()})
    sizes = draw.choice([(2, 2), (4,), (2, 1), (2, 2, 2)])
    devices = sum(sizes)
    profile, cluster = two_kinds(profile, nodes_of(random_cluster(seed, devices), sizes), seed)
    options = PlanOptions(policy="wsp", staleness=1, recompute="none")
    try:
        made = plan(profile, cluster, options)
    except UsageError as error:
        pytest.skip(str(error))
    assert len(made.pipelines) > 1
    for row in made.alternatives:
        assert row.step_s is not None
        assert row.stages is not None
        assert made.predicted.step_s / len(made.pipelines) <= row.step_s / (row.stages.count("/") + 1)
    question = Question.of(profile, cluster, options)
    family, longest = Family(1, profile.batch, "1f1b"), max(made.pipelines)
    asked = Question.of(profile, cluster, check_policy(replace(options, gpus=devices)))
    cutter = Cutter(asked, family, longest, len(made.pipelines))
    for own in made.separate:
        # Together, HetPipe's cuts may be quicker.
        best = cutter.cut(numbered(question.costs, candidate_of(own, profile)).used_devices)
        assert best is not None
        stages = best.candidate.stages
        for cuts in combinations(range(1, len(profile.layers)), len(stages) - 1):
            order = [stage.devices[0] for stage in stages]
            frame = place(family, (*cuts, len(profile.layers)), [SINGLE] * len(stages), order)
            other = cutter.judge.judge(family, frame)
            assert other is None or other.times.period_s >= best.times.period_s * (1 - 1e-9)


def every_dealing(devices: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield all ways to deal devices to pipelines."""
    if not devices:
        yield ()
        return
    first, *others = devices
    for size in range(len(others) + 1):
        for more in combinations(others, size):
            for rest in every_dealing(tuple(each for each in others if each not in more)):
                yield ((first, *more), *rest)


def unlike(seed: int) -> tuple[Profile, Cluster]:
    """Return a profile on two to six devices of two kinds, in one node or two."""
    draw, profile = random.Random(seed), random_profile(seed, most_layers=5, batches=(1, 2, 4))
    sizes = draw.choice([(2,), (3,), (4,), (2, 2), (3, 2), (5,), (6,), (3, 3)])
    found, cluster = two_kinds(profile, nodes_of(random_cluster(seed, sum(sizes)), sizes), seed)
    return found.model_copy(update={"tied": ()}), cluster


@pytest.mark.some(8)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_devices_are_dealt_as_well_as_any_by_trying_all_dealings(seed: int) -> None:
    """Each dealing's pipelines are cut and simulated together as those are that the search finds."""
    profile, cluster = unlike(seed)
    options = check_policy(PlanOptions(policy="wsp", recompute="none"))
    question, family, least_s = Question.of(profile, cluster, options), Family(1, profile.batch, "1f1b"), math.inf
    tried = set[object]()
    for dealing in every_dealing(tuple(range(len(cluster.devices)))):
        makeups = tuple(sorted(makeup_of(question.costs, own)[0] for own in dealing))
        if len(dealing) > 1 and makeups not in tried and all(can_partition(question.costs, own) for own in dealing):
            tried.add(makeups)
            cutter = Cutter(question, family, max(map(len, dealing)), len(dealing))
            found = waves.pipelines_on(cutter, "", dealing)
            least_s = min([least_s, *(each.plan.predicted.step_s / len(dealing) for each in found)])
    made = plan(profile, cluster, PlanOptions(policy="wsp", recompute="none"))
    assert made.predicted.step_s / len(made.pipelines) <= least_s * (1 + 1e-9)


@pytest.mark.some(2)
@pytest.mark.parametrize("seed", range(12))
def test_how_a_cluster_lists_its_devices_changes_no_period(seed: int) -> None:
    profile, cluster = unlike(seed)
    listed = list(cluster.devices)
    random.Random(seed).shuffle(listed)
    asked = PlanOptions(policy="wsp", recompute="none")
    made, other = (
        plan(profile, each, asked) for each in (cluster, cluster.model_copy(update={"devices": tuple(listed)}))
    )
    assert made.pipelines == other.pipelines
    assert made.predicted.step_s == pytest.approx(other.predicted.step_s, rel=1e-9)
