"""Plans without their programs, against those that are played; dictated runs; shares of time, moment by moment."""

import random
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from autopar.errors import UsageError
from autopar.formats.cluster import Cluster, Overlap
from autopar.formats.plan import Plan
from autopar.formats.stage import layout_of
from autopar.formats.timeline import Event, Timeline, track_of
from autopar.ownership import Replicas
from autopar.planner import PlanOptions, plan
from autopar.planner import assemble as assembling
from autopar.planner.assemble import assemble, reprice, simulate, time_shares
from autopar.planner.candidate import Family, place, with_depths
from autopar.planner.costs.durations import durations
from autopar.planner.costs.model import CostModel
from autopar.planner.dictated_run import DictatedRun
from autopar.planner.simulator.simulate import Simulator, skeleton, trace
from autopar.schedules import SCHEDULES
from autopar.schedules.expand import action_count, expand
from drawn import random_candidate
from random_problems import gpt_profile, local_cluster, random_cluster, random_profile


def test_a_plan_predicts_the_same_with_its_program_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slowed by messages, ranks compute for longer: what a timeline shows as bubble is less, and the step longer."""
    tried = slowed = 0
    for seed in range(80):
        rng = random.Random(seed)
        devices = rng.randint(1, 8)
        cluster = random_cluster(seed, devices)
        if rng.random() < 0.3:
            shared = (link.model_copy(update={"shared_by": 2}) for link in cluster.links)
            cluster = cluster.model_copy(update={"links": tuple(shared)})
        overlaps = [Overlap(level=link.level, compute=1.5, communication=1.2) for link in cluster.links]
        cluster = cluster.model_copy(update={"overlaps": tuple(overlaps if seed % 4 == 0 else ())})
        costs = CostModel(random_profile(seed, batches=(4, 12)), cluster, PlanOptions(gpus=devices))
        candidate = random_candidate(rng, costs)
        depths = [min(stage.in_flight, candidate.micro_batches) for stage in candidate.stages]
        if depths != sorted(depths, reverse=True):
            continue  # Replicas that take turns may be drawn with more in flight than the stage before.
        tried += 1
        monkeypatch.setattr(assembling, "MOST_ACTIONS", 2**16)
        played = assemble(costs, candidate, PlanOptions(), 1e-3, (), ())
        monkeypatch.setattr(assembling, "MOST_ACTIONS", 0)
        quick = assemble(costs, candidate, PlanOptions(), 1e-3, (), ())
        assert action_count(played) == sum(map(len, expand(played).ranks))
        assert quick.predicted.step_s == pytest.approx(played.predicted.step_s, rel=1e-12)
        if seed % 4:
            assert quick.predicted.bubble == pytest.approx(played.predicted.bubble, rel=1e-9, abs=1e-12)
        else:
            assert played.predicted.bubble <= quick.predicted.bubble * (1 + 1e-9) <= 1 + 1e-9
            slowed += played.predicted.bubble < quick.predicted.bubble * (1 - 1e-6)
        times = durations(costs, candidate)
        for seconds, named in ((times.forward_s, "forward_s"), (times.backward_s, "backward_s")):
            own = list(zip(times.stage, seconds, strict=True))
            slowest = tuple(max(each for at, each in own if at == stage) for stage in sorted(set(times.stage)))
            assert getattr(played.predicted, named) == slowest
        assert played.predicted.shares is not None
        assert quick.predicted.shares is None
        same = {"step_s": 0.0, "bubble": 0.0, "lower_bound_s": 0.0, "shares": None}
        assert quick.predicted.model_copy(update=same) == played.predicted.model_copy(update=same)
    assert min(slowed, tried / 66) > 0.9


@pytest.mark.parametrize("seed", range(30))
def test_a_run_with_the_profiles_times_takes_what_the_whole_plan_does(seed: int) -> None:
    draw = random.Random(seed)
    profile = random_profile(seed)
    layers = [layer.model_copy(update={"accumulate_s": draw.choice([0.0, 1e-3])}) for layer in profile.layers]
    profile = profile.model_copy(update={"layers": tuple(layers)})
    costs = CostModel(profile, random_cluster(seed, 4), PlanOptions())
    stages = draw.randint(1, min(2, costs.layer_count))
    cuts = (*sorted(draw.sample(range(1, costs.layer_count), stages - 1)), costs.layer_count)
    widths = (draw.choice((1, 2)),) * stages if seed % 2 else tuple(draw.randint(1, 2) for _ in cuts)
    micro_batches, size = draw.randint(1, 5), draw.choice((2, 3, 4))
    family = Family(micro_batches, size, "1f1b")
    dictated = DictatedRun(costs, family, cuts, list(map(Replicas, widths)))
    forward_s = {rows: list(map(float, np.diff(costs.sums.forward(rows)))) for rows in dictated.rows}
    backward_s = {rows: list(map(float, np.diff(costs.sums.backward(rows, 0.0)))) for rows in dictated.rows}
    accumulate_s, update_s = zip(*((layer.accumulate_s, layer.update_s) for layer in profile.layers), strict=True)
    step_s = dictated.step_s(forward_s, backward_s, accumulate_s, update_s, profile.step_overhead_s)
    depths = SCHEDULES["1f1b"].warmups(len(cuts), 1, micro_batches)["PA"]
    whole = with_depths(family, place(family, cuts, map(Replicas, widths)), depths)
    assert step_s == pytest.approx(Simulator(costs).step_s(whole), rel=1e-12)


@pytest.mark.parametrize(
    ("widths", "size", "schedule", "message"),
    [
        ((4,), 2, "1f1b", "4 replicas share a micro-batch of 2 samples"),
        ((5,), 8, "1f1b", "5 devices are used of a cluster of 4"),
        ((1,), 8, "zigzag", "'zigzag' is none of gpipe, 1f1b"),
    ],
)
def test_a_run_that_cannot_be_is_refused(widths: tuple[int, ...], size: int, schedule: str, message: str) -> None:
    costs = CostModel(gpt_profile(), local_cluster(4), PlanOptions())
    with pytest.raises(UsageError, match=message):
        DictatedRun(costs, Family(2, size, schedule), (costs.layer_count,), list(map(Replicas, widths)))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_plan_priced_again_is_the_one_that_is_assembled_of_its_stages_there(schedule: str) -> None:
    profile, asked = gpt_profile(blocks=7), PlanOptions(schedule=schedule)
    layout, fewer = layout_of(schedule), 0
    chunks = {"line": 1, "loop": 2, "vee": 2}[layout]
    stops = [9 * index // (2 * chunks) for index in range(1, 2 * chunks)] + [9]
    warmups = SCHEDULES[schedule].warmups

    def made(machines: Cluster, micro_batches: int, name: str, **options: Any) -> Plan:  # noqa: ANN401
        costs = CostModel(profile, machines, PlanOptions(gpus=4, **options))
        family = Family(micro_batches, 2, schedule)
        stages = place(family, stops, [Replicas(2)] * 2)
        depths = warmups(2, chunks, micro_batches)[name]
        return assemble(costs, with_depths(family, stages, depths), replace(asked, **options), 0.0, (), ())

    for name in warmups(2, chunks, 4):
        first = made(local_cluster(4), 4, name, batch=8)
        for seed, count in enumerate((1, 2, 4, 12)):
            machines = random_cluster(seed, 6)
            again = reprice(first, profile, machines, batch=2 * count, memory_bytes=2**33, bytes_per_s=1e8)
            there = made(machines, count, name, batch=2 * count, memory_bytes=2**33, bytes_per_s=1e8)
            whole = {"lower_bound_s": again.predicted.lower_bound_s}
            assert again.stages == there.stages
            assert again.predicted == there.predicted.model_copy(update=whole)
            assert 0 < again.predicted.lower_bound_s <= again.predicted.step_s
            assert simulate(again, profile, machines).end_s == again.predicted.step_s
            back = reprice(again, profile, local_cluster(4), batch=8, bytes_per_s=None)
            fewer += back.stages != first.stages
    # Few micro-batches do not tell by which rule a stage is as deep as it is.
    assert fewer <= 2


def test_a_plan_that_nothing_is_asked_of_anew_stays_as_it_is() -> None:
    for seed in range(12):
        rng, cluster = random.Random(seed), random_cluster(seed, 5)
        profile = random_profile(seed, batches=(4, 6))
        costs = CostModel(profile, cluster, PlanOptions(gpus=5))
        made = assemble(costs, random_candidate(rng, costs), PlanOptions(), 0.0, (), ())
        again = reprice(made, profile, cluster)
        assert again.stages == made.stages
        assert again.predicted.step_s == made.predicted.step_s
        assert again.predicted.peak_bytes == made.predicted.peak_bytes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch": 15}, "`batch=15` is no multiple of the plan's micro-batches, of 4 samples; give 12, or plan again"),
        ({"batch": 3}, "give 4, or plan again"),
        ({"cluster": local_cluster(3)}, "the plan is for 4 devices, and the cluster has 3; plan with `gpus=3`"),
    ],
)
def test_what_a_plan_cannot_be_priced_for_is_refused(changes: dict[str, Any], said: str) -> None:
    profile = gpt_profile(blocks=4)
    made = plan(profile, local_cluster(4), PlanOptions(stages="0-2:2,3-5:2", micro_batches=4, recompute="none"))
    with pytest.raises(UsageError, match=re.escape(said)):
        reprice(made, profile, **{"cluster": local_cluster(4), **changes})
    turns = {"stages": "0-2:2,3-5:2", "micro_batches": 4, "division": "round-robin"}
    by_turns = plan(profile, local_cluster(4), PlanOptions(**turns))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="`batch=4` is too little for 2 replicas that take turns; give at least 8"):
        reprice(by_turns, profile, local_cluster(4), batch=4)
    unflushed = plan(profile, local_cluster(2), PlanOptions(policy="stash", stages="0-2:1,3-5:1"))
    with pytest.raises(UsageError, match="a pipeline of `policy='stash'` is never flushed, and not priced again"):
        reprice(unflushed, profile, local_cluster(2))


def _played(seed: int) -> Timeline:
    profile, cluster = random_profile(seed, batches=(4, 6)), random_cluster(seed, 5)
    if seed % 2:
        links = tuple(link.model_copy(update={"shared_by": 2, "duplex": "half"}) for link in cluster.links)
        overlaps = (Overlap(level="node", compute=1.2, communication=1.5),)
        cluster = cluster.model_copy(update={"links": links, "overlaps": overlaps})
    costs = CostModel(profile, cluster, PlanOptions(gpus=5))
    candidate = random_candidate(random.Random(seed), costs)
    exchanges = costs.flows.exchanges([stage.stop for stage in candidate.stages])
    flows = [(producer, consumer, flow.gradients > 0) for producer, consumer, flow in exchanges]
    tied = [holders for _, holders in costs.tied_between(candidate.stages)]
    program = expand(skeleton(candidate, flows, tied))
    return trace(program, durations(costs, candidate), costs.sharing.among(candidate.devices))


def _delivers(send: Event, receive: Event) -> bool:
    kind, stage, micro_batch, peer, peer_stage, _ = receive.action
    sent = {"R": "S", "RG": "SG"}.get(kind), peer_stage, micro_batch, receive.rank, stage
    return (send.rank, send.action[:5]) == (peer, sent)


def _looked_at(timeline: Timeline) -> dict[str, float]:
    events = list(timeline)
    spent = {"computing": 0.0, "messages": 0.0, "reduction": 0.0, "idle": 0.0}
    edges = sorted({0.0, *timeline.starts_s, *timeline.ends_s})
    for rank in range(timeline.rank_count()):
        own = [event for event in events if event.rank == rank]
        for before, after in pairwise(edges):
            now = (before + after) / 2
            under = [event for event in own if event.start_s < now < event.end_s]
            tracks = {track_of(event.action.kind) for event in under}
            moving = any(
                _delivers(send, event) and send.start_s < now
                for event in under
                if track_of(event.action.kind) == "receive"
                for send in events
            )
            what = "computing" if "compute" in tracks else "reduction" if "reduce" in tracks else "idle"
            spent["messages" if what == "idle" and moving else what] += after - before
    total = sum(spent.values())
    return {name: seconds / total for name, seconds in spent.items()}


def test_shares_are_what_a_look_at_every_moment_counts() -> None:
    seen = dict.fromkeys(("computing", "messages", "reduction", "idle"), 0)
    for seed in range(50):
        timeline = _played(seed)
        if timeline.end_s == 0 or len(timeline) > 200:
            continue
        shares = time_shares(timeline)
        for name, expected in _looked_at(timeline).items():
            assert getattr(shares, name) == pytest.approx(expected, abs=1e-9), f"seed {seed}: {name}"
            seen[name] += expected > 0.01
    assert min(seen.values()) >= 6
    # A step without time is idle.
    assert time_shares(Timeline("simulated")).idle == 1
