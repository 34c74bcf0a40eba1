"""Where ranks' time went, what steps were spent on, and what actions take by themselves, by hand and slower counts."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from autopar.errors import FileError
from autopar.formats.program import Action
from autopar.formats.timeline import (
    CAUSES,
    Timeline,
    TimeUse,
    compare_paths,
    compare_times,
    critical_path,
    medians,
    own_times,
    sending_of,
    time_use,
    time_use_between,
)
from autopar.planner import PlanOptions, action_prices, simulate
from autopar.planner.assemble import assemble
from autopar.planner.costs.model import CostModel
from autopar.runtime.rehearsal.steps import rehearse_steps
from drawn import random_candidate
from played import play, small_plan, timeline
from random_problems import random_cluster, random_profile

# Rank 1 waits from 0 until the send begins at 3, and then for the transfer until 5; what follows is told likewise.
DRAWN = (
    "F0@0 1 3  S0@0>1@1 3 3.5  F1@0 3.5 5.5  S1@0>1@1 5.5 6  RG0@0<1@1 6 9  B0@0 9 11  U@0 11 12",
    "R0@1<0@0 0 5  F0@1 5 6  B0@1 6 8  SG0@1>0@0 8 8.5  R1@1<0@0 8.5 8.5  A@1 7 10  U@1 10 10.5",
)


def test_a_step_is_parted_as_it_was_drawn_and_a_simulated_send_occupies_no_rank() -> None:
    first, second = time_use_between([timeline("measured", *DRAWN)], 0, 13)
    assert first == TimeUse(compute_s=6, update_s=1, reduce_s=0, waiting_s=2, transfer_s=2, idle_s=2)
    # The reduction's first second is hidden by the backward; sending counts as reducing while both go on.
    assert second == TimeUse(compute_s=3, update_s=0.5, reduce_s=2, waiting_s=3, transfer_s=2, idle_s=2.5)
    rows = ("F0@0 0 2  S0@0>1@1 2 5  U@0 2 2", "R0@1<0@0 0 5  F0@1 5 6  U@1 6 7")
    first, second = time_use(timeline("simulated", *rows))
    assert first == TimeUse(compute_s=2, idle_s=5)
    assert second == TimeUse(compute_s=1, update_s=1, waiting_s=2, transfer_s=3)


def test_what_a_rank_that_is_ahead_does_of_the_next_step_counts_in_the_one_that_others_end() -> None:
    this = timeline("measured", "F0@0 0 2  S0@0>1@1 2 3", "R0@1<0@0 0 4  F0@1 4 8")
    after = timeline("measured", "F0@0 3 5  S0@0>1@1 5 6", "R0@1<0@0 8 8  F0@1 8 12")
    first, second = time_use_between([this, after], 1, 8)
    assert first == TimeUse(compute_s=3, transfer_s=2, idle_s=2)
    assert second == TimeUse(compute_s=4, waiting_s=1, transfer_s=2)


def test_a_message_counts_where_its_receiver_waited_for_it_alone_and_a_reduction_from_when_its_last_rank_came() -> None:
    own = own_times(timeline("measured", *DRAWN))
    forth, late, back = (Action.parse(text) for text in ("S0@0>1@1", "S1@0>1@1", "SG0@1>0@0"))
    assert own[0, forth] == 2
    # The receiver came after the message; nothing tells when that arrived.
    assert (0, late) not in own
    assert own[1, back] == 1
    assert own[1, Action.parse("A@1")] == 3
    assert own[0, Action.parse("F1@0")] == 2
    assert not any(action.kind in ("R", "RG") for _, action in own)
    rows = ("S0@0>1@1 0 0.1  S1@0>1@1 0.2 0.3", "R0@1<0@0 0 4  R1@1<0@0 4 5")
    own = own_times(timeline("measured", *rows))
    assert own == {(0, Action.parse("S0@0>1@1")): 4}
    own = own_times(timeline("measured", "A@0 1 7", "A@0 4 7", "T0@1 2 3", "T0@2 2.5 3"))
    assert [own[rank, Action.parse("A@0")] for rank in (0, 1)] == [3, 3]
    assert own[2, Action.parse("T0@1")] == own[3, Action.parse("T0@2")] == 0.5


def test_measured_over_predicted_is_the_median_of_the_actions_that_both_know() -> None:
    actions = [Action("F", 0, index) for index in range(3)]
    measured = medians(
        {(0, action): step * (index + 1.0) for index, action in enumerate(actions)} for step in (1, 2, 3)
    )
    assert [measured[0, action] for action in actions] == [2, 4, 6]
    predicted = {(0, action): 2.0 for action in actions} | {(0, Action("U", 0)): 0.0, (0, Action("B", 0, 0)): 1.0}
    (row,) = compare_times(measured, predicted)
    assert (row.kind, row.actions, row.measured_s, row.predicted_s, row.ratio) == ("F", 3, 4, 2, 2)


@pytest.mark.parametrize("seed", range(20))
def test_parts_sum_to_the_step_and_agree_with_a_count_instant_by_instant(seed: int) -> None:
    draw = random.Random(seed)
    made, spans = Timeline("measured"), {}
    for text in ("F0@0", "B0@0", "W0@0", "U@0", "A@0", "S0@0>1@1", "RG0@0<1@1", "SG0@1>0@0", "R0@1<0@0"):
        action, start = Action.parse(text), draw.randrange(40)
        spans[action.kind] = action.stage, start, start + draw.randrange(20)
        made.add(action.stage, action, *spans[action.kind][1:])
    where = time_use_between([made], 0, 70)
    begun = {"R": spans["S"][1], "RG": spans["SG"][1]}
    for rank in range(2):
        counted = Counter[str]()
        for instant in range(70):
            kinds = {kind for kind, (at, start, end) in spans.items() if at == rank and start <= instant < end}
            causes = {
                "compute_s": kinds & set("FBW"),
                "update_s": "U" in kinds,
                "reduce_s": "A" in kinds,
                "waiting_s": any(instant < begun.get(kind, 0) for kind in kinds),
                "transfer_s": kinds,
                "idle_s": True,
            }
            counted[next(cause for cause, holds in causes.items() if holds)] += 1
        assert where[rank] == TimeUse(**counted)
        assert sum(where[rank]) == pytest.approx(70)


COUNTED = timeline("rehearsed", "F0@0 0 1", "F0@1 0 1")
COUNTED.memory[1] = [(0.0, 5), (0.5, 7), (0.75, 5)]
COUNTED.limits_bytes[1] = 9


def test_what_was_held_is_written_and_read(tmp_path: Path) -> None:
    COUNTED.save(tmp_path / "trace.json")
    again = Timeline.load(tmp_path / "trace.json")
    assert (again.memory, again.limits_bytes, again.peaks_bytes()) == (COUNTED.memory, {1: 9}, {1: 7})


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-v"])
@pytest.mark.parametrize("jitter", [0.0, 0.5])
def test_every_message_leads_from_within_its_send_to_within_its_receive(
    tmp_path: Path, schedule: str, jitter: float
) -> None:
    plan = small_plan((1, 1, 1) if jitter else (2, 1, 3), 6, schedule, chunks=2 if schedule == "interleaved" else 1)
    made = play(plan, "measured" if jitter else "simulated", jitter)
    made.save(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    spans = [each for each in trace["traceEvents"] if each["ph"] == "X"]
    ends = {(each["ph"], each["id"]): each for each in trace["traceEvents"] if each["ph"] in "sf"}
    receives = [event for event in made if event.action.kind in ("R", "RG")]
    assert len(ends) == 2 * len(receives) > 0
    for number, event in enumerate(receives):
        rank, action = sending_of(event)
        for kind, pid, name in (("s", rank, action), ("f", event.rank, event.action)):
            end = ends[kind, number]
            around = [
                each["name"]
                for each in spans
                if (each["pid"], each["tid"]) == (end["pid"], end["tid"]) and each["pid"] == pid
                if each["ts"] <= end["ts"] <= each["ts"] + each["dur"]
            ]
            assert str(name) in around
        assert ends["s", number]["ts"] <= ends["f", number]["ts"]
        assert ends["f", number]["bp"] == "e"
    # A trace of before had none, and is read alike.
    trace["traceEvents"] = [each for each in trace["traceEvents"] if each["ph"] not in "sf"]
    (tmp_path / "older.json").write_text(json.dumps(trace))
    both = (Timeline.load(tmp_path / f"{name}.json") for name in ("trace", "older"))
    assert len({tuple(each) for each in both}) == 1


def test_a_message_that_ends_before_it_was_sent_has_no_flow(tmp_path: Path) -> None:
    odd = timeline("measured", "S0@0>1@1 3 4  S1@0>1@1 4 5", "R0@1<0@0 0 2  R1@1<0@0 2 6  R2@1<0@0 6 7")
    odd.save(tmp_path / "trace.json")
    flows = [each for each in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if each["ph"] in "sf"]
    assert [(each["ph"], each["pid"], each["ts"]) for each in flows] == [("s", 0, 4e6), ("f", 1, 5e6)]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"bytes": 5', '"bytes": -5', r"traceEvents\[\d+\]\.args\.bytes: .* 0, found -5"),
        ('"name": "memory"', '"name": "other"', r"traceEvents\[\d+\]\.name: .* 'memory', found .other"),
        ('"limits_bytes": {"1": 9}', '"limits_bytes": {"one": 9}', r"limits_bytes\.one: String should match pattern"),
        (
            '"limits_bytes": {"1": 9}',
            '"limits_bytes": [9]',
            r"limits_bytes: Input should be an object, found a list of 1",
        ),
    ],
)
def test_counters_that_are_none_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "trace.json"
    COUNTED.save(path)
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(FileError, match=message):
        Timeline.load(path)


def test_a_step_is_spent_on_what_was_waited_for_and_a_reduction_on_the_last_rank() -> None:
    rows = (
        "F0@0 1 3  S0@0>1@1 3.5 4  RG0@0<1@1 4 11  B0@0 11 13  U@0 13 14",
        "R0@1<0@0 0 5  F0@1 5 6  B0@1 6 8  SG0@1>0@0 8 9  U@1 9 10",
    )
    path = critical_path(timeline("measured", *rows))
    # Back: update 1, backward 2, message 8-11, backward 2, forward 1, message 3.5-5, 0.5 between, forward 2, 1 before.
    took = {"forwards": 3.0, "backwards": 4.0, "messages": 4.5, "reductions": 0.0, "updates": 1.0}
    assert path == {**took, "loading": 0.0, "between actions": 1.5}
    rows = ("B0@0 0 2  A@0 1 7  U@0 7 8", "B0@0 0 5  A@0 4 7  U@0 7 8")
    path = critical_path(timeline("simulated", *rows))
    assert (path["backwards"], path["reductions"], path["updates"]) == (5.0, 2.0, 1.0)


def test_what_timelines_are_not_of_lies_between_actions() -> None:
    one, other = timeline("measured", "F0@0 1 3"), timeline("simulated", "F0@0 0 1.5")
    # Before the first action, and while the rank computes.
    one.loading.extend([(0, -0.75, 0.5), (0, 1.5, 2.0)])
    causes = {each.cause: (each.measured_s, each.predicted_s) for each in compare_paths(one, other, 4.0, 2.0)}
    assert causes["forwards"] == (2.0, 1.5)
    assert (causes["loading"], causes["between actions"]) == ((1.25, 0.0), (0.75, 0.5))
    assert [each.loading_s for each in time_use_between([one], -1.0, 3.0)] == [1.25]
    assert [sum(column) for column in zip(*causes.values(), strict=True)] == [4.0, 2.0]


@pytest.mark.parametrize("seed", range(14))
def test_the_parts_add_up_and_are_as_simulated(seed: int) -> None:
    rng = random.Random(seed)
    profile, cluster = random_profile(seed, most_layers=8, batches=(2, 4, 6)), random_cluster(seed, 4)
    costs = CostModel(profile, cluster, PlanOptions(gpus=4))
    try:
        planned = assemble(costs, random_candidate(rng, costs), PlanOptions(), 0.0, (), ())
    except ValueError:
        pytest.skip("more in flight than the stage before has")
    inputs = planned, profile, cluster
    simulated = simulate(*inputs)
    performed = rehearse_steps(planned, profile, action_prices(*inputs), threads=True, timeout_s=30.0).timeline
    for each in (simulated, performed):
        path = critical_path(each)
        assert set(path) == set(CAUSES)
        assert min(path.values()) >= 0.0
        assert sum(path.values()) == pytest.approx(each.end_s, rel=1e-9)
    causes = compare_paths(performed, simulated, performed.end_s, simulated.end_s)
    assert sum(each.measured_s - each.predicted_s for each in causes) == pytest.approx(0.0, abs=1e-12)


def test_a_rehearsed_step_is_parted_as_a_measured_one() -> None:
    rehearsed, measured = (time_use(timeline(origin, *DRAWN)) for origin in ("rehearsed", "measured"))
    assert rehearsed == measured
