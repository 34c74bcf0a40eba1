"""Plans without their programs, against those that are played; dictated runs; shares of time, moment by moment."""

import random
from itertools import pairwise

import numpy as np
import pytest

from autopar.errors import UsageError
from autopar.formats.cluster import Overlap
from autopar.formats.timeline import Event, Timeline, track_of
from autopar.ownership import Replicas
from autopar.planner import PlanOptions
from autopar.planner import assemble as assembling
from autopar.planner.assemble import DictatedRun, assemble, time_shares
from autopar.planner.candidate import Family, place, with_depths
from autopar.planner.costs.model import CostModel, durations
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
    dictated = DictatedRun(costs, family, cuts, widths)
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
        DictatedRun(costs, Family(2, size, schedule), (costs.layer_count,), widths)


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
