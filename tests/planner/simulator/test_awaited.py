"""Messages that nobody waits for, against programs with and without them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.planner.candidate import Candidate, CandidateStage
from autopar.planner.costs.model import Durations
from autopar.planner.simulator.levels import action_levels, drop_covered_messages, simulate_levels
from autopar.planner.simulator.rows import rows_of
from autopar.planner.simulator.simulate import run, skeleton
from drawn import long_candidate


def test_a_step_takes_as_long_without_the_messages_that_nobody_waits_for() -> None:
    dropped = kept = 0
    for seed in range(200):
        candidate, times, flows = long_candidate(seed, turns=0.0 if seed % 4 else 0.2, skips=0.15)
        needed, levels = drop_covered_messages(candidate, times), action_levels(candidate)
        assert levels is not None
        missing = times.message_s.keys() - needed.message_s.keys()
        assert not any(abs(times.stage[sender] - times.stage[receiver]) == 1 for sender, receiver in missing)
        dropped += bool(missing)
        kept += any(abs(times.stage[sender] - times.stage[receiver]) > 1 for sender, receiver in needed.message_s)
        expected = run(rows_of(skeleton(candidate, flows, ())), times)
        assert simulate_levels(candidate, needed, (), levels) == pytest.approx(expected, rel=1e-12)
    assert min(dropped, kept) > 50


def _skipping(past_s: float, hand_s: float) -> tuple[Candidate, Durations]:
    """Three stages with forwards of a second; the first one's tensor goes to both others."""
    stages = tuple(CandidateStage(at, at + 1, (at,), (1,), 6) for at in range(3))
    messages = {(0, 1): hand_s, (1, 2): hand_s, (1, 0): hand_s, (2, 1): hand_s, (0, 2): past_s}
    columns = [[1.0] * 3 for _ in range(5)]
    return Candidate(6, 1, "1f1b", stages), Durations(0.0, [0, 1, 2], *columns, message_s=messages)


def test_a_message_stays_where_it_may_come_last_or_has_to_queue() -> None:
    for past_s, hand_s, stays in ((1.0, 0.0, False), (1.0, 2.0, False), (1.1, 0.0, True), (2.0, 2.0, False)):
        candidate, times = _skipping(past_s, hand_s)
        assert ((0, 2) in drop_covered_messages(candidate, times).message_s) == stays
    # Shorter than path, longer than pace: six of them queue, and delay the last one.
    candidate, times = _skipping(2.9, 1.0)
    assert (0, 2) in drop_covered_messages(candidate, times).message_s
    rows = rows_of(skeleton(candidate, [(0, 1, True), (1, 2, True), (0, 2, False)], ()))
    without = rows_of(skeleton(candidate, [(0, 1, True), (1, 2, True)], ()))
    assert run(rows, times) > run(without, times)


def test_a_message_stays_where_a_stage_between_hands_nothing_on() -> None:
    candidate, times = _skipping(0.5, 1.0)
    broken = {pair: seconds for pair, seconds in times.message_s.items() if pair != (1, 2)}
    assert (0, 2) in drop_covered_messages(candidate, replace(times, message_s=broken)).message_s
