"""Programs as JSON and as text; prices of actions, that of the simulator's own durations; faults as texts."""

import json
import random
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import FileError, UsageError
from autopar.formats.program import REDUCE, SENDS, Action, Fault, FaultKind, Program, RankProgram, price_key
from autopar.formats.timeline import Timeline
from autopar.planner import PlanOptions
from autopar.planner.assemble import action_prices, assemble
from autopar.planner.costs.durations import durations
from autopar.planner.costs.model import CostModel
from autopar.schedules.expand import expand
from drawn import random_candidate
from played import timeline
from random_problems import random_cluster, random_profile

numbers, nobody, versions = st.integers(0, 10**6), st.just(-1), st.integers(0, 3)
computations = st.tuples(st.sampled_from([*"FBIWT"]), numbers, numbers, nobody, nobody, versions)
messages = st.tuples(st.sampled_from(["S", "R", "SG", "RG"]), numbers, numbers, numbers, numbers, versions)
closings = st.tuples(st.sampled_from(["A", "U"]), numbers, nobody, nobody, nobody, st.just(0))
actions = st.one_of(computations, messages, closings).map(lambda fields: Action(*fields))


@given(actions)
def test_an_actions_text_reads_back_as_the_action(action: Action) -> None:
    assert Action.parse(str(action)) == action


NO_ACTIONS = """F F1 1@2 F01@2 F1@2v0 S1@2 S1@0<1@1 R1@1>0@0 F1@2>3@4 X1@2 F-1@0 F@1 C2@0 T@0 F1@2<3@4 S@0>1@1
F2147483648@0 F1@0v9999999999"""


@pytest.mark.parametrize("text", ["", "F1@0 ", *NO_ACTIONS.split()])
def test_what_is_not_an_actions_canonical_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not an action"):
        Action.parse(text)


@given(st.lists(st.lists(actions, max_size=8), min_size=1, max_size=4))
def test_a_program_survives_its_file(ranks: list[list[Action]]) -> None:
    program = Program(tuple(RankProgram.of(rank) for rank in ranks))
    assert [list(rank) for rank in program.ranks] == ranks
    assert [[rank[index] for index in range(len(rank))] for rank in program.ranks] == ranks
    read = Program.parse(program.dumps(), Path("p.json"))
    assert read == program
    assert read.dumps() == program.dumps()


def test_programs_repeat_and_timelines_survive_and_what_is_no_fault_is_refused(tmp_path: Path) -> None:
    rank = RankProgram.of([Action("B", 0, 0, version=1), Action("U", 0), Action("F", 0, 3)])
    program = Program((rank,), shift=2)
    assert '"shift": 2' in program.dumps()
    assert Program.parse(program.dumps(), Path("p.json")) == program
    assert "shift" not in Program((rank,)).dumps()
    repeating = Program((), shift=2)
    assert [repeating.text_of(Action(kind, 0, 3)) for kind in ("F", "T")] == ["F1@0", "T3@0"]
    made = timeline("simulated", "S0@0>1@1 0.123456789 0.5  A@0 1.25 1.5", "F0@1 0.5 1.25")
    made.save(tmp_path / "t.json")
    again = Timeline.load(tmp_path / "t.json")
    assert again.origin == "simulated"
    for read, event in zip(*(sorted(each, key=lambda event: event[:2]) for each in (again, made)), strict=True):
        assert (read.rank, read.action) == (event.rank, event.action)
        assert (read.start_s, read.end_s) == pytest.approx((event.start_s, event.end_s), abs=1.1e-9)
    again.save(tmp_path / "u.json")
    assert (tmp_path / "u.json").read_bytes() == (tmp_path / "t.json").read_bytes()
    texts = ["F0@0", "F1@0", "F0@1", "S0@0>1@1", "S1@0>1@1", "S0@0>2@1", "S0@0>1@2", "T0@0", "T1@0", "A@0", "U@0"]
    keys = [price_key(Action.parse(text)) for text in texts]
    assert (len(set(keys)), keys[0], keys[3]) == (9, keys[1], keys[4])
    for text, message in {
        "kill": r"a fault is KIND@RANK:STEP\[:ACTION\[MICRO-BATCH\]\], such as kill@1:7:B0; found 'kill'",
        "kill@1:7:": "a fault is KIND",
        "kill@-1:1": "a fault is KIND",
        "melt@1:7": "a fault is one of kill, stop, .*; found 'melt'",
        "kill@1:7:ZZ": "an action of a program is one of F, B, .*; found 'ZZ'",
    }.items():
        with pytest.raises(UsageError, match=message):
            Fault.parse(text)


HEAD = '{"format": "autopar.program", "version": 1'
TRACE = '{"otherData": {"format": "autopar.trace", "version": 1, "origin"'


def event(**change: object) -> str:
    """Return a trace of one event with other fields."""
    made = {"ph": "X", "pid": 0, "name": "F0@0", "ts": 0, "dur": 1, **change}
    return f'{TRACE}: "measured"}}, "traceEvents": [{json.dumps(made)}]}}'


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (Program, HEAD + ', "shift": -1, "ranks": []}', r"\$\.shift: Input should be .* 0, found -1"),
        (Program, HEAD + ', "shift": true, "ranks": []}', r"\$\.shift: .* integer, found true"),
        (Program, HEAD + ', "ranks": ["F0@0 Q"]}', r"\$\.ranks\[0\], position 1: not an action: 'Q'"),
        (Program, HEAD + ', "ranks": [1]}', r"\$\.ranks\[0\]: Input should be a valid string, found 1"),
        (Program, HEAD + ', "shifts": 1, "ranks": []}', r"\$\.shifts: Extra inputs are not permitted"),
        (Program, "[]", r"\$: expected an object with \"format\": \"autopar.program\""),
        (Timeline, "[]", r"\$: Input should be an object, found a list of 0"),
        (Timeline, TRACE + ': "dreamt"}}', r"\$\.otherData\.origin"),
        (Timeline, '{"traceEvents": []}', r"\$\.otherData: Field required"),
        (Timeline, TRACE + ': "measured"}, "traceEvents": [{"ph": "X"}]}', r"\$\.traceEvents\[0\]"),
        (Timeline, event(pid=True), r"\$\.traceEvents\[0\]\.pid: .* integer, found true"),
        (Timeline, event(pid=10**9), r"\.pid: Input should be less than 65536, found 1000000000"),
        (Timeline, event(pid=60_000), r"\$\.traceEvents: 1 events are too few for 60001 ranks"),
        (Timeline, event(ts="1"), r"\.ts: Input should be a valid number, found .1"),
        (Timeline, event(dur=1e300), r"\.dur: Input should be less than 1000000000000000000, found 1e\+300"),
        (Timeline, event(dur=None), r"\.dur: .* number, found null"),
        (Timeline, event(name="dance"), r"\.name: .*not an action: 'dance'"),
        (Timeline, event(ph="B"), r"\$\.traceEvents\[0\]: Input tag 'B' found using 'ph'"),
    ],
)
def test_a_malformed_program_or_trace_is_refused_with_its_path(
    tmp_path: Path, kind: type[Program | Timeline], text: str, message: str
) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(FileError, match=message):
        kind.load(tmp_path / "p.json")


@pytest.mark.parametrize("seed", range(10))
def test_prices_are_the_durations_of_the_rank_that_acts(seed: int) -> None:
    rng = random.Random(seed)
    profile, cluster = random_profile(seed, batches=(2, 4)), random_cluster(seed, 4)
    costs = CostModel(profile, cluster, PlanOptions(gpus=4))
    candidate = random_candidate(rng, costs)
    try:
        plan = assemble(costs, candidate, PlanOptions(), 0.0, (), ())
    except ValueError:
        pytest.skip("more in flight than the stage before has")
    times, prices = durations(costs, candidate), action_prices(plan, profile, cluster)
    columns = {"F": times.forward_s, "B": times.backward_s, "U": times.update_s, REDUCE: times.reduce_s}
    for rank, (actions, own) in enumerate(zip(expand(plan).ranks, prices.ranks, strict=True)):
        for action in actions:
            seconds = own.seconds.get(price_key(action))
            if action.kind in columns:
                assert seconds == columns[action.kind][rank]
            elif action.kind in SENDS:
                assert seconds == times.message_s[rank, action.peer]
    assert prices.overhead_s == times.overhead_s


@pytest.mark.parametrize("seed", range(5))
def test_a_fault_is_written_and_read_and_comes_at_the_first_action_that_it_names(seed: int) -> None:
    draw = random.Random(seed)
    actions = [Action.parse(text) for text in ("F0@0", "S0@0>1@1", "F1@0", "I0@0", "W0@0", "B1@0", "A@0", "U@0")]
    for _ in range(30):
        kind, micro = draw.choice(get_args(FaultKind)), draw.choice((None, 0, 1))
        action = None if micro is None and draw.random() < 0.5 else draw.choice("FBIWS")
        fault = Fault(kind, draw.randrange(9), draw.randrange(99), action, micro)
        assert Fault.parse(str(fault)) == fault
        at = fault.position(actions)
        if kind == "nan" and action != "F":
            assert actions[at].kind == "U"
            continue
        names = {"B": "BI"}.get(action or "", action)
        fits = [action is None or (each.kind in str(names) and micro in (None, each.micro_batch)) for each in actions]
        # Of a send, what follows is the first that is noticed.
        first = fits.index(True) if any(fits) else 0
        assert at == first + (actions[first].kind == "S")
