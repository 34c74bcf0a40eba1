"""Waves against the simulation of the expanded program, action by action."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from autopar.formats.cluster import Cluster
from autopar.planner import PlanOptions
from autopar.planner.candidate import Candidate, CandidateStage
from autopar.planner.costs.durations import Durations, durations
from autopar.planner.costs.model import CostModel
from autopar.planner.simulator.rows import rows_of
from autopar.planner.simulator.simulate import Simulator, run, skeleton
from autopar.planner.simulator.wave import ABSENT_S, ChainTimes, chain_times, simulate_chain
from drawn import long_candidate, random_candidate
from random_problems import random_cluster, random_profile


def _drawn(seed: int) -> tuple[Simulator, Candidate, Durations]:
    rng = random.Random(seed)
    devices = rng.randint(1, 6)
    cluster: Cluster = random_cluster(seed, devices)
    profile = random_profile(seed, batches=(2, 4, 6, 12), skips=rng.choice([0.0, 0.12]))
    costs = CostModel(profile, cluster, PlanOptions(gpus=devices))
    candidate = random_candidate(rng, costs)
    return Simulator(costs), candidate, durations(costs, candidate)


def test_a_wave_takes_as_long_as_its_program() -> None:
    applied = replicated = tied = 0
    for seed in range(600):
        simulator, candidate, times = _drawn(seed)
        holders = [stages for _, stages in simulator.costs.tied_between(candidate.stages)]
        wave = chain_times(candidate, times, holders)
        if wave is not None:
            applied += 1
            replicated += len(times.stage) > len(candidate.stages)
            tied += bool(holders)
            assert simulate_chain(wave) == pytest.approx(run(simulator.rows_of(candidate), times), rel=1e-12)
    assert min(applied, replicated, tied) > 30


def _long(rng: np.random.Generator, stages: int, micro_batches: int) -> ChainTimes:
    """A chain of any depths; some of its messages are never sent, and some stages take no time."""
    depths = np.sort(rng.integers(1, micro_batches + 1, stages))[::-1]
    if rng.random() < 0.3:
        depths = np.minimum(np.arange(stages, 0, -1), micro_batches)
    seconds = rng.lognormal(0.0, 1.0, (6, stages)) * (rng.random((6, stages)) < 0.9)
    sent = rng.random(stages - 1) < 0.9
    activation_s = np.where(sent, seconds[2, 1:] * 0.5, ABSENT_S)
    gradient_s = np.where(sent & (rng.random(stages - 1) < 0.9), seconds[3, 1:] * 0.5, ABSENT_S)
    tied = (((0, stages - 1), 0.7), ((1, 2), 0.1)) if stages > 2 else ()
    depth = tuple(int(each) for each in depths)
    columns = (seconds[0], seconds[1], activation_s, gradient_s, seconds[4], seconds[5])
    return ChainTimes(micro_batches, 0.01, depth, *columns, tied)


def _played(wave: ChainTimes) -> float:
    """The same recurrences, one forward and one backward at a time."""
    stages, count = len(wave.depths), wave.micro_batches
    clock = [wave.overhead_s] * stages
    forth, back = [[ABSENT_S] * (count + 1) for _ in range(stages)], [[ABSENT_S] * (count + 1) for _ in range(stages)]
    todo = []
    for depth in wave.depths:
        order = [("F", m) for m in range(depth)]
        for m in range(count):
            order += [("B", m), *([("F", m + depth)] if m + depth < count else [])]
        todo.append(order[::-1])
    done: set[tuple[str, int, int]] = set()
    while any(todo):
        for stage, order in enumerate(todo):
            kind, m = order[-1] if order else ("", -1)
            before = stage - 1 if kind == "F" else stage + 1
            if not order or (0 <= before < stages and (kind, before, m) not in done):
                continue
            order.pop()
            done.add((kind, stage, m))
            came = forth if kind == "F" else back
            seconds = wave.forward_s if kind == "F" else wave.backward_s
            clock[stage] = max(clock[stage], came[stage][m + 1]) + seconds[stage]
            after = stage + 1 if kind == "F" else stage - 1
            if 0 <= after < stages:
                length = wave.activation_s[stage] if kind == "F" else wave.gradient_s[after]
                came[after][m + 1] = max(clock[stage], came[after][m]) + length
    for stage in range(stages):
        clock[stage] += wave.exposed_s[stage]
    for holders, seconds_s in wave.tied_reductions:
        end = max(clock[stage] for stage in holders) + seconds_s
        for stage in holders:
            clock[stage] = end
    return max(end + update for end, update in zip(clock, wave.update_s, strict=True))


def test_long_chains_of_any_depths_take_as_long_as_one_action_after_the_other() -> None:
    rng = np.random.default_rng(3)
    for _ in range(150):
        wave = _long(rng, int(rng.integers(1, 40)), int(rng.integers(1, 24)))
        assert simulate_chain(wave) == pytest.approx(_played(wave), rel=1e-12)


def test_an_even_chain_without_messages_takes_the_textbook_time_at_any_length() -> None:
    stages, count = 300, 64
    even, free, none = np.ones(stages), np.zeros(stages - 1), np.zeros(stages)
    for depths in ((count,) * stages, tuple(min(stages - stage, count) for stage in range(stages))):
        wave = ChainTimes(count, 0.0, depths, even, 2 * even, free, free, none, none)
        assert simulate_chain(wave) == pytest.approx((count + stages - 1) * 3.0, rel=1e-12)


def _two_stages(shares: tuple[tuple[int, ...], tuple[int, ...]], rows: int) -> tuple[Candidate, Durations]:
    stages, rank = [], 0
    times = Durations(0.0)
    for index, each in enumerate(shares):
        stages.append(CandidateStage(index, index + 1, tuple(range(rank, rank + len(each))), each, 2 - index))
        rank += len(each)
        for column in (times.forward_s, times.backward_s, times.exposed_s, times.reduce_s, times.update_s):
            column.extend([1.0] * len(each))
        times.stage.extend([index] * len(each))
    return Candidate(4, rows, "1f1b", tuple(stages)), times


def test_replicas_are_a_wave_where_the_slowest_messages_pass_between_the_slowest() -> None:
    candidate, times = _two_stages(((2, 2), (1, 2, 1)), 4)
    forth = {(0, 2): 0.25, (0, 3): 0.25, (1, 3): 0.5, (1, 4): 0.25}
    back = {(receiver, sender): 0.5 for sender, receiver in forth}
    rows = rows_of(skeleton(candidate, [(0, 1, True)], ()))
    for message_s, column in (
        (forth | back, {}),
        (forth | back, {"forward_s": [1.0, 2.0, 1.0, 3.0, 2.0]}),
        (forth | back, {"exposed_s": [0.5, 0.25, 1.0, 1.0, 1.0], "backward_s": [0.5, 1.0, 1.0, 1.0, 1.0]}),
    ):
        played = replace(times, message_s=message_s, **column)
        wave = chain_times(candidate, played, ())
        assert wave is not None
        assert simulate_chain(wave) == pytest.approx(run(rows, played), rel=1e-12)


def _is_wave(candidate: Candidate, times: Durations) -> bool:
    return chain_times(candidate, times, ()) is not None


def test_what_may_drift_apart_is_no_wave() -> None:
    candidate, times = _two_stages(((2, 2), (2, 2)), 4)
    forth = {(0, 2): 0.5, (1, 3): 0.5}
    back = {(2, 0): 0.5, (3, 1): 0.5}
    times = replace(times, message_s=forth | back)
    assert _is_wave(candidate, times)
    # One replica computes longer forwards, the other longer backwards.
    assert not _is_wave(candidate, replace(times, forward_s=[1.0, 1.0, 1.0, 2.0], backward_s=[1.0, 1.0, 2.0, 1.0]))
    # The slower replicas of two stages do not hear of each other.
    assert not _is_wave(candidate, replace(times, forward_s=[1.0, 2.0, 2.0, 1.0]))
    # The slowest activation and the slowest gradient travel between different replicas.
    assert not _is_wave(candidate, replace(times, message_s={**forth, (0, 2): 0.6} | {**back, (3, 1): 0.6}))
    # The replica that is done first begins a longer reduction.
    assert not _is_wave(candidate, replace(times, backward_s=[1.0, 2.0, 1.0, 1.0], exposed_s=[3.0, 1.0, 1.0, 1.0]))
    turns = tuple(stage._replace(shares=(4, 4), division="round-robin") for stage in candidate.stages)
    assert not _is_wave(candidate._replace(stages=turns), times)
    deeper = candidate._replace(stages=(candidate.stages[0]._replace(warmup=1), candidate.stages[1]._replace(warmup=2)))
    assert not _is_wave(deeper, times)


def test_long_chains_of_unequal_shares_take_as_long_as_their_programs() -> None:
    applied = unequal = 0
    for seed in range(200):
        candidate, times, flows = long_candidate(seed, turns=0.0, skips=0.0)
        wave = chain_times(candidate, times, ())
        if wave is not None:
            applied += 1
            unequal += any(len(set(stage.shares)) > 1 for stage in candidate.stages)
            expected = run(rows_of(skeleton(candidate, flows, ())), times)
            assert simulate_chain(wave) == pytest.approx(expected, rel=1e-12)
    assert min(applied, unequal) > 30


def test_a_message_that_skips_a_stage_is_no_wave() -> None:
    candidate, times = _two_stages(((4,), (4,)), 4)
    third = CandidateStage(2, 3, (2,), (4,), 1)
    columns = {name: [1.0] * 3 for name in ("forward_s", "backward_s", "exposed_s", "reduce_s", "update_s")}
    chain = replace(times, stage=[0, 1, 2], message_s={(0, 1): 0.1, (1, 2): 0.1}, **columns)
    longer = candidate._replace(stages=(*candidate.stages, third))
    assert _is_wave(longer, chain)
    assert not _is_wave(longer, replace(chain, message_s={**chain.message_s, (0, 2): 0.1}))
