"""Programs from files in place of a plan's own: read back, checked, and refused by one clear line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import FileError
from autopar.formats.plan import Plan
from autopar.formats.program import RECEIVE, REDUCE, SEND, Action, Program, RankProgram
from autopar.formats.stage import SharedParameter
from autopar.schedules.check import ProgramError, _check_flow, check_bounds, read_program
from autopar.schedules.expand import expand
from autopar.schedules.order import holdings, in_flight
from drawn_plans import chain, make, plans
from edits import edited

Edit = Callable[[list[str]], list[str]]


@settings(max_examples=60)
@given(plans(most_groups=5, most_micro_batches=8, most_replicas=3))
def test_a_plans_own_program_is_within_its_bounds(plan: Plan) -> None:
    check_bounds(expand(plan), plan)


def test_ranks_that_wait_for_a_later_reduction_of_others_wait_for_ever() -> None:
    reduction, sent = Action(REDUCE, 0), Action(SEND, 0, 1, 1, 1)
    received = Action(RECEIVE, 1, 1, 0, 0)
    sound = [reduction, sent, reduction], [reduction, received, reduction]
    _check_flow(Program(tuple(map(RankProgram.of, sound))), _TWO)
    stuck = [reduction, reduction, sent], [reduction, received, reduction]
    with pytest.raises(ProgramError, match=r"deadlock: rank 0 \(stage 0\) waits forever at A@0, position 1; rank"):
        _check_flow(Program(tuple(map(RankProgram.of, stuck))), _TWO)


@settings(max_examples=30)
@given(plans(most_groups=3, most_micro_batches=4, most_replicas=2), st.integers(0, 2**16))
def test_an_edited_program_that_is_accepted_holds_no_more_than_the_plans_own(plan: Plan, seed: int) -> None:
    for actions, own in zip(edited(plan, seed).ranks, expand(plan).ranks, strict=True):
        allowed = holdings(own)
        for stage, holding in holdings(actions).items():
            assert _counted(actions, stage) == holding.micro_batches <= allowed[stage].micro_batches
            assert in_flight(actions)[stage] <= plan.stages[stage].warmup
            assert holding.received_messages <= allowed[stage].received_messages
            assert holding.unsent_messages <= allowed[stage].unsent_messages


def _counted(actions: RankProgram, stage: int) -> int:
    """Return the most micro-batches that a stage holds, position by position."""
    texts = [str(action) for action in actions]
    most = 0
    for position in range(len(texts) + 1):
        done = set(texts[:position])
        numbers = [text[1 : text.index("@")] for text in done if text[0] == "F" and text.endswith(f"@{stage}")]
        most = max(most, sum(not {f"B{n}@{stage}", f"W{n}@{stage}"} & done for n in numbers))
    return most


def test_a_written_program_reads_back_and_one_of_another_length_is_refused(tmp_path: Path) -> None:
    plan = make("gpipe", 1, [(3,), (1, 2)], [1, 1], chain(2))
    waiting = plan.stages[1].model_copy(update={"division": "round-robin", "shares": (3, 3)})
    turning = plan.model_copy(update={"stages": (plan.stages[0], waiting)})
    assert [str(action) for action in expand(turning).ranks[2]] == ["A@1", "U@1"]
    for each in (turning, make("zb-v", 3, [(1, 2), (3,)], [3, 3, 2, 1], chain(4))):
        expand(each).save(tmp_path / "p.json")
        assert read_program(tmp_path / "p.json", each) == expand(each)
    plan = make("1f1b", 2, [(1,), (1,)], [1, 1], chain(2)).model_copy(update={"weight_policy": "stash"})
    (tmp_path / "p.json").write_text(json.dumps({**json.loads(expand(plan).dumps()), "shift": 3}))
    with pytest.raises(FileError, match=r"p.json: \$\.shift: the plan's repetitions have 2 micro-batches, found 3"):
        read_program(tmp_path / "p.json", plan)
    tied = (SharedParameter(parameter="w", stages=(0, 1), bytes=4),)
    plan = make("1f1b", 1, [(1, 1), (1, 1)], [1, 1], chain(2), tied)
    check_bounds(expand(plan), plan)


def _moved(action: str, behind: str) -> Edit:
    def move(actions: list[str]) -> list[str]:
        rest = [each for each in actions if each != action]
        at = rest.index(behind) + 1
        return [*rest[:at], action, *rest[at:]]

    return move


RING = "; rank 0 waits for rank 1 at RG0@0<1@1; rank 1 waits for rank 0 at R0@1<0@0$"


_TWO = make("1f1b", 2, [(1,), (1,)], [2, 1], chain(2))
_STAGES = tuple(stage.model_copy(update={"warmup": depth}) for stage, depth in zip(_TWO.stages, (3, 1), strict=True))
PLANS = {
    "1f1b": make("1f1b", 4, [(1,), (1,)], [2, 1], chain(2)),
    "zb-h1": make("zb-h1", 4, [(1,), (1,)], [2, 1], chain(2)),
    "zb-v": make("zb-v", 2, [(1, 1)], [2, 1], chain(2)),
    "stash": _TWO.model_copy(update={"weight_policy": "stash", "stages": _STAGES}),
}


@pytest.mark.parametrize(
    ("plan", "rank", "edit", "message"),
    [
        ("1f1b", 0, lambda actions: actions[1:], r"rank 0 \(stage 0\): F0@0 is missing"),
        ("1f1b", 0, lambda actions: [*actions, "F9@0"], r"rank 0 \(stage 0\): F9@0 is not part of the plan"),
        ("1f1b", 1, lambda actions: [*actions[:2], "Q"], r"\$\.ranks\[1\], position 2: not an action: 'Q'"),
        ("1f1b", 0, _moved("S0@0>1@1", "S1@0>1@1"), r"rank 1 expects R0@1<0@0, but rank 0 sends S1@0>1@1 first"),
        ("1f1b", 1, _moved("F0@1", "B0@1"), r"rank 1 \(stage 1\), position 1: B0@1 stands before F0@1, which it needs"),
        ("1f1b", 0, _moved("F0@0", "S0@0>1@1"), r"S0@0>1@1 stands before F0@0, which it needs"),
        ("1f1b", 1, _moved("B0@1", "SG0@1>0@0"), r"SG0@1>0@0 stands before B0@1, which it needs"),
        ("1f1b", 0, _moved("F2@0", "RG0@0<1@1"), r"rank 0 \(stage 0\) keeps 3 micro-batches in flight, allowed 2"),
        ("1f1b", 0, _moved("U@0", "F3@0"), r"rank 0 \(stage 0\), position \d+: U@0 stands before .*, which it needs"),
        (
            "1f1b",
            1,
            _moved("R2@1<0@0", "R1@1<0@0"),
            r"rank 1 \(stage 1\) holds 2 messages that are not yet computed with",
        ),
        ("1f1b", 1, _moved("SG0@1>0@0", "B1@1"), r"rank 1 \(stage 1\) holds 2 messages that are not yet sent"),
        ("1f1b", 0, _moved("RG0@0<1@1", "F0@0"), r"deadlock: rank 0 \(stage 0\) waits forever at RG0@0<1@1.*" + RING),
        ("zb-h1", 1, _moved("W0@1", "F2@1"), r"3 micro-batches whose backward is not complete, and .* planned for 2"),
        (
            "zb-v",
            1,
            _moved("W1@1", "B1@0"),
            "rank 1 begins to reduce stage 0 where .* with stage 1; they must keep one",
        ),
        ("stash", 0, _moved("F4@0", "B1@0v1"), r"F4@0, counted through .* stands where it would not see version 1"),
        ("stash", 0, _moved("B0@0v1", "U@0"), r"N3@0 stands where the plan's own program has B0@0v1; without flushes"),
        ("stash", 1, lambda actions: [each for each in actions if each != "F1@1"], r"rank 1 .*: F\d@1 is missing"),
        ("stash", 1, _moved("R1@1<0@0", "F2@1"), r"F\d@1 stands before R\d@1<0@0, which it needs"),
        ("stash", 0, lambda actions: [*actions[-2:], *actions[:-2]], "would not see version|keeps 4 micro-batches"),
    ],
)
def test_a_broken_program_is_refused_by_rank_and_action(
    tmp_path: Path, plan: str, rank: int, edit: Edit, message: str
) -> None:
    content = json.loads(expand(PLANS[plan]).dumps())
    content["ranks"][rank] = " ".join(edit(content["ranks"][rank].split()))
    (tmp_path / "p.json").write_text(json.dumps(content))
    with pytest.raises(FileError, match=message) as refused:
        read_program(tmp_path / "p.json", PLANS[plan])
    assert str(refused.value).startswith(f"{tmp_path / 'p.json'}: ")
    assert "\n" not in str(refused.value)
