"""Programs of any schedule, at any number of stages, micro-batches and replicas; and broken ones."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autopar.formats.plan import Plan, SharedParameter, layout_of
from autopar.formats.program import Action, Program, RankProgram
from autopar.schedules import SCHEDULES
from autopar.schedules.check import ProgramError, check
from autopar.schedules.expand import expand, rank_of, stages_of
from autopar.schedules.order import in_flight
from autopar.schedules.route import even_shares, routes
from drawn_plans import LINES, chain, crossing, make, plans


def _largest(schedule: str, named: str) -> Plan:
    chunks = 2 if layout_of(schedule) == "vee" else 1
    depths = list(SCHEDULES[schedule].warmups(8, chunks, 32)[named])
    skips = [crossing("skip", 0, (3, 7)), crossing("mask", 2, (4,), gradient=False)]
    tied = (SharedParameter(parameter="w", stages=(0, 7), bytes=4),)
    shares = [even_shares(11, width) for width in (8, 1, 8, 5, 8, 3, 2, 8)]
    return make(schedule, 32, shares, depths, (*chain(8 * chunks), *skips), tied)


@pytest.mark.slow
@settings(max_examples=100)
@example(_largest("gpipe", "all"))
@example(_largest("1f1b", "PA"))
@example(_largest("1f1b", "PB"))
@example(_largest("zb-h1", "PA"))
@example(_largest("zb-h2", "PB"))
@example(_largest("zb-v", "all"))
@example(_largest("dualpipe-v", "all"))
@given(plans())
def test_any_program_is_complete_and_free_of_deadlock_and_holds_what_its_depth_says(plan: Plan) -> None:
    program = expand(plan)
    check(program, plan)
    sent: dict[tuple[int, int], list[tuple[str, int, int, int]]] = {}
    received: dict[tuple[int, int], list[tuple[str, int, int, int]]] = {}
    for rank, actions in enumerate(program.ranks):
        chunks, _ = stages_of(plan, rank)
        assert in_flight(actions) == {stage: min(plan.stages[stage].warmup, plan.micro_batches) for stage in chunks}
        for kind, own_stage, micro_batch, peer, peer_stage, _ in actions:
            if kind in ("S", "SG"):
                sent.setdefault((rank, peer), []).append((kind, micro_batch, own_stage, peer_stage))
            elif kind in ("R", "RG"):
                entry = ("S" if kind == "R" else "SG", micro_batch, peer_stage, own_stage)
                received.setdefault((peer, rank), []).append(entry)
    assert sent == received


@given(plans(most_groups=5, most_micro_batches=6, most_replicas=4))
def test_every_row_reaches_every_reader_once(plan: Plan) -> None:
    for tensor in plan.tensors:
        for consumer in tensor.consumers:
            found = routes(plan.stages[tensor.producer], plan.stages[consumer])
            for micro_batch in range(plan.micro_batches):
                mine = [route for route in found if route.carries(micro_batch)]
                rows = sorted(row for route in mine for row in range(int(route.start), int(route.stop)))
                assert rows == list(range(plan.micro_batch_size))
    for rank in range(len(plan.devices)):
        chunks, replica = stages_of(plan, rank)
        assert [rank_of(plan, stage, replica) for stage in chunks] == [rank] * len(chunks)


@given(plans(most_groups=4, most_micro_batches=4, most_replicas=3))
def test_a_program_survives_its_text(plan: Plan) -> None:
    program = expand(plan)
    again = Program(tuple(RankProgram.of(Action.parse(str(action)) for action in rank) for rank in program.ranks))
    assert again == program


_Change = Callable[[list[Action], int], list[Action]]


def _drop(actions: list[Action], at: int) -> list[Action]:
    return actions[:at] + actions[at + 1 :]


def _repeat(actions: list[Action], at: int) -> list[Action]:
    return [*actions[: at + 1], *actions[at:]]


def _rename(actions: list[Action], at: int) -> list[Action]:
    renamed = actions[at]._replace(micro_batch=actions[at].micro_batch + 100)
    return [*actions[:at], renamed, *actions[at + 1 :]]


@pytest.mark.parametrize("change", [_drop, _repeat, _rename])
@settings(max_examples=60)
@given(data=st.data())
def test_a_program_with_an_action_missing_repeated_or_renamed_is_refused(change: _Change, data: st.DataObject) -> None:
    plan = data.draw(plans(most_groups=4, most_micro_batches=4, most_replicas=3))
    program = expand(plan)
    rank = data.draw(st.integers(0, len(program.ranks) - 1))
    actions = list(program.ranks[rank])
    broken = RankProgram.of(change(actions, data.draw(st.integers(0, len(actions) - 1))))
    with pytest.raises(ProgramError, match=f"rank {rank} "):
        check(Program((*program.ranks[:rank], broken, *program.ranks[rank + 1 :])), plan)


@settings(max_examples=60)
@given(data=st.data())
def test_a_computation_before_its_receive_or_after_its_send_is_refused(data: st.DataObject) -> None:
    plan = data.draw(plans(most_groups=4, most_micro_batches=4, most_replicas=3))
    program = expand(plan)
    needed = {("R", "F"), ("RG", "B"), ("RG", "I"), ("F", "S"), ("B", "SG"), ("I", "SG")}
    pairs = [
        (rank, at)
        for rank, actions in enumerate(program.ranks)
        for at, (before, after) in enumerate(pairwise(actions))
        if before[1:3] == after[1:3] and (before.kind, after.kind) in needed
    ]
    if not pairs:
        return
    rank, at = data.draw(st.sampled_from(pairs))
    actions = list(program.ranks[rank])
    actions[at], actions[at + 1] = actions[at + 1], actions[at]
    broken = (*program.ranks[:rank], RankProgram.of(actions), *program.ranks[rank + 1 :])
    with pytest.raises(ProgramError, match=r"stands before .*, which it needs"):
        check(Program(broken), plan)


def _two_stages(micro_batches: int, depths: list[int], schedule: str = "1f1b") -> Plan:
    return make(schedule, micro_batches, [(1,), (1,)], depths, (crossing("t", 0, (1,)),))


def test_more_in_flight_than_the_plan_allows_is_refused() -> None:
    deep = expand(_two_stages(4, [4, 4], "gpipe"))
    with pytest.raises(ProgramError, match=r"rank 0 \(stage 0\) keeps 4 micro-batches in flight, allowed 2"):
        check(deep, _two_stages(4, [2, 1]))


def test_a_later_stage_that_waits_for_more_than_an_earlier_one_sends_is_a_deadlock() -> None:
    shallow, deep = _two_stages(4, [1, 1]), _two_stages(4, [3, 3])
    mixed = Program((expand(shallow).ranks[0], expand(deep).ranks[1]))
    with pytest.raises(ProgramError, match=r"deadlock: rank 0 \(stage 0\) waits forever at RG0@0<1@1") as caught:
        check(mixed, deep)
    ring = "; rank 0 waits for rank 1 at RG0@0<1@1; rank 1 waits for rank 0 at R1@1<0@0"
    assert str(caught.value).endswith(ring)


def test_messages_in_another_order_than_they_are_received_are_refused() -> None:
    plan = _two_stages(2, [2, 1])
    program = expand(plan)
    actions = list(program.ranks[0])
    sends = [at for at, action in enumerate(actions) if action.kind == "S"]
    late = [actions[at] for at in sends]
    rest = [action for action in actions if action.kind != "S"]
    begun = next(at for at, action in enumerate(rest) if action.kind == "RG")
    swapped = RankProgram.of([*rest[:begun], *reversed(late), *rest[begun:]])
    with pytest.raises(ProgramError, match=r"rank 1 expects R0@1<0@0, but rank 0 sends S1@0>1@1 first"):
        check(Program((swapped, program.ranks[1])), plan)


def test_a_program_for_another_number_of_ranks_is_refused() -> None:
    program = expand(_two_stages(2, [2, 1]))
    with pytest.raises(ProgramError, match="the program has 1 ranks, the plan 2"):
        check(Program(program.ranks[:1]), _two_stages(2, [2, 1]))


@pytest.mark.parametrize("micro_batches", [1, 3, 8])
def test_depths_depend_on_the_stages_behind_alone(micro_batches: int) -> None:
    for schedule in map(SCHEDULES.__getitem__, LINES):
        deepest = schedule.warmups(8, 1, micro_batches)
        for stages in range(1, 8):
            for name, depths in schedule.warmups(stages, 1, micro_batches).items():
                assert depths == deepest[name][8 - stages :]
                assert list(depths) == sorted(depths, reverse=True)
