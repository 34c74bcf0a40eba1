"""Actions, programs and timelines survive their files; malformed ones are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import FileError
from autopar.formats.program import Action, Program, RankProgram
from autopar.formats.timeline import Timeline

numbers = st.integers(0, 10**6)
nobody = st.just(-1)
computations = st.tuples(
    st.sampled_from(["F", "B", "I", "W", "T"]), numbers, numbers, nobody, nobody, st.integers(0, 3)
)
messages = st.tuples(st.sampled_from(["S", "R", "SG", "RG"]), numbers, numbers, numbers, numbers, st.integers(0, 3))
closings = st.tuples(st.sampled_from(["A", "U"]), numbers, nobody, nobody, nobody, st.just(0))
actions = st.one_of(computations, messages, closings).map(lambda fields: Action(*fields))


@given(actions)
def test_an_actions_text_reads_back_as_the_action(action: Action) -> None:
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F",
        "F1",
        "1@2",
        "F01@2",
        "F1@2v0",
        "S1@2",
        "S1@0<1@1",
        "R1@1>0@0",
        "F1@2>3@4",
        "X1@2",
        "F-1@0",
        "F1@0 ",
        "F@1",
        "C2@0",
        "T@0",
        "F1@2<3@4",
        "S@0>1@1",
        "F2147483648@0",
        "F1@0v9999999999",
    ],
)
def test_what_is_not_an_actions_canonical_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not an action"):
        Action.parse(text)


@given(st.lists(st.lists(actions, max_size=8), min_size=1, max_size=4))
def test_a_program_survives_its_file(ranks: list[list[Action]]) -> None:
    program = Program(tuple(RankProgram.of(rank) for rank in ranks))
    content = json.loads(program.dumps())
    assert [list(rank) for rank in program.ranks] == ranks
    read = Program(tuple(RankProgram.of(Action.parse(text) for text in row.split()) for row in content["ranks"]))
    assert read == program
    assert read.dumps() == program.dumps()
    for rank, row in zip(program.ranks, ranks, strict=True):
        assert [rank[index] for index in range(len(rank))] == row


def test_a_program_that_repeats_says_by_how_many_micro_batches() -> None:
    rank = RankProgram.of([Action("B", 0, 0, version=1), Action("U", 0), Action("F", 0, 3)])
    program = Program((rank,), shift=2)
    assert '"shift": 2' in program.dumps()
    assert Program.parse(program.dumps(), Path("p.json")) == program
    assert "shift" not in Program((rank,)).dumps()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": "autopar.program", "version": 1, "shift": -1, "ranks": []}', r"\$\.shift: expected a number"),
        ('{"format": "autopar.program", "version": 1, "shift": true, "ranks": []}', r"\$\.shift: expected a number"),
        (
            '{"format": "autopar.program", "version": 1, "ranks": ["F0@0 Q"]}',
            r"\$\.ranks\[0\], position 1: not an action: 'Q'",
        ),
        ('{"format": "autopar.program", "version": 1, "ranks": [1]}', r"\$\.ranks: expected a list of texts"),
        ('{"format": "autopar.program", "version": 2, "ranks": []}', r"\$\.format"),
        ("[]", r"\$\.format"),
    ],
)
def test_a_malformed_program_is_refused_with_its_path(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(FileError, match=message):
        Program.load(tmp_path / "p.json")


def test_a_program_file_reads_back(tmp_path: Path) -> None:
    program = Program((RankProgram.of([Action("F", 0, 0), Action("S", 0, 0, 1, 1), Action("U", 0)]),))
    program.save(tmp_path / "p.json")
    assert Program.load(tmp_path / "p.json") == program


def test_a_timeline_survives_its_trace_to_the_nanosecond(tmp_path: Path) -> None:
    timeline = Timeline("simulated")
    timeline.add(1, Action("F", 1, 0), 0.5, 1.25)
    timeline.add(0, Action("S", 0, 0, 1, 1), 0.123456789, 0.5)
    timeline.add(0, Action("A", 0), 1.25, 1.5)
    timeline.save(tmp_path / "t.json")
    again = Timeline.load(tmp_path / "t.json")
    assert again.origin == "simulated"
    assert {(e.rank, e.action) for e in again} == {(e.rank, e.action) for e in timeline}
    for event in timeline:
        read = next(other for other in again if other.action == event.action)
        assert (read.start_s, read.end_s) == pytest.approx((event.start_s, event.end_s), abs=1.1e-9)
    again.save(tmp_path / "u.json")
    assert (tmp_path / "u.json").read_bytes() == (tmp_path / "t.json").read_bytes()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", r"\$: expected an object"),
        ('{"otherData": {"format": "autopar.trace", "version": 1, "origin": "dreamt"}}', r"\$\.otherData\.origin"),
        ('{"traceEvents": []}', r"\$\.otherData\.format"),
        (
            '{"otherData": {"format": "autopar.trace", "version": 1, "origin": "measured"},'
            '"traceEvents": [{"ph": "X"}]}',
            r"\$\.traceEvents\[0\]",
        ),
    ],
)
def test_a_malformed_trace_is_refused_with_its_path(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(FileError, match=message):
        Timeline.load(tmp_path / "t.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pid": True}, r"\$\.traceEvents\[0\]\.pid: expected a rank"),
        ({"pid": -1}, r"\.pid: expected a rank"),
        ({"pid": 10**9}, r"\.pid: expected a rank"),
        ({"pid": 60_000}, r"\$\.traceEvents: 1 events are too few for 60001 ranks"),
        ({"ts": "1"}, r"\.ts: expected microseconds"),
        ({"ts": -1.0}, r"\.ts: expected microseconds"),
        ({"dur": 1e300}, r"\.dur: expected microseconds"),
        ({"dur": None}, r"\.dur: expected microseconds"),
        ({"name": "dance"}, r"\.name: not an action: 'dance'"),
        ({"name": 3}, r"\.name: not an action: '3'"),
        ({"ph": "B"}, r"\.ph: expected a complete event"),
    ],
)
def test_an_edited_event_is_refused_with_its_path(tmp_path: Path, change: dict[str, object], message: str) -> None:
    other = {"format": "autopar.trace", "version": 1, "origin": "measured"}
    event = {"ph": "X", "pid": 0, "name": "F0@0", "ts": 0, "dur": 1}
    (tmp_path / "t.json").write_text(json.dumps({"otherData": other, "traceEvents": [event]}))
    assert len(Timeline.load(tmp_path / "t.json")) == 1
    (tmp_path / "t.json").write_text(json.dumps({"otherData": other, "traceEvents": [{**event, **change}]}))
    with pytest.raises(FileError, match=message):
        Timeline.load(tmp_path / "t.json")
