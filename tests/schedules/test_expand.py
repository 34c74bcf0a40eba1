"""Programs of any schedule, at any number of stages, micro-batches and replicas; and broken ones."""

from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autopar.formats.plan import Plan
from autopar.formats.program import BEGIN_SUM, REDUCE_TIED, UPDATE, Action, Program, RankProgram
from autopar.formats.stage import SharedParameter, layout_of
from autopar.ownership import even_shares
from autopar.schedules import SCHEDULES
from autopar.schedules.check import ProgramError, check
from autopar.schedules.expand import FORWARDS, expand, expand_forwards
from autopar.schedules.order import in_flight
from drawn_plans import LINES, chain, crossing, make, plans


def _largest(schedule: str, named: str) -> Plan:
    chunks = 2 if layout_of(schedule) == "vee" else 1
    depths = list(SCHEDULES[schedule].warmups(8, chunks, 32)[named])
    skips = [crossing("skip", 0, (3, 7)), crossing("mask", 2, (4,), gradient=False)]
    tied = (SharedParameter(parameter="w", stages=(0, 7), bytes=4),)
    shares = [even_shares(11, width) for width in (8, 1, 8, 5, 8, 3, 2, 8)]
    return make(schedule, 32, shares, depths, (*chain(8 * chunks), *skips), tied)


@settings(max_examples=15)
@example(_largest("1f1b", "PB"))
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
        chunks = plan.ownership.ranks[rank].stages
        assert in_flight(actions) == {stage: min(plan.stages[stage].warmup, plan.micro_batches) for stage in chunks}
        for kind, own_stage, micro_batch, peer, peer_stage, _ in actions:
            if kind in ("S", "SG"):
                sent.setdefault((rank, peer), []).append((kind, micro_batch, own_stage, peer_stage))
            elif kind in ("R", "RG"):
                entry = ("S" if kind == "R" else "SG", micro_batch, peer_stage, own_stage)
                received.setdefault((peer, rank), []).append(entry)
    assert sent == received


def test_shared_parameters_are_summed_among_all_ranks_and_broken_programs_refused() -> None:
    tied = (SharedParameter(parameter="w", stages=(0, 3), bytes=4),)
    for shares, count in (((1, 1), 2), ((2,), 0)):
        ranks = expand(make("zb-v", 2, [shares, (2,)], [2, 2, 2, 1], chain(4), tied)).ranks
        assert sum(action.kind == REDUCE_TIED for actions in ranks for action in actions) == count
    tied = (SharedParameter(parameter="w", stages=(0, 1), bytes=4),)
    plan = make("1f1b", 2, [(1,), (1,)], [2, 1], chain(2), tied).model_copy(update={"weight_policy": "2bw"})
    kinds = [[action.kind for action in actions] for actions in expand(plan).ranks]
    assert [each[each.index(REDUCE_TIED) + 1] for each in kinds] == [BEGIN_SUM, UPDATE]
    plan = make("1f1b", 2, [(4,), (4,)], [2, 1], chain(2))
    with pytest.raises(ProgramError, match="the program has 1 ranks, the plan 2"):
        check(Program(expand(plan).ranks[:1]), plan)
    first, second = (list(rank) for rank in expand_forwards(plan).ranks)
    for broken, said in (
        ((first[:-1], second), r"rank 0 \(stage 0\): S1@0>1@1 is missing"),
        ((first, [second[1], second[0], *second[2:]]), r"F0@1 stands before R0@1<0@0"),
        (([*first, list(expand(plan).ranks[0])[-1]], second), r"U@0 is not part of the plan"),
    ):
        with pytest.raises(ProgramError, match=said):
            check(Program(tuple(RankProgram.of(actions) for actions in broken)), plan, FORWARDS)


_Change = Callable[[list[Action], int], list[Action]]


CHANGES: dict[str, _Change] = {
    "missing": lambda actions, at: actions[:at] + actions[at + 1 :],
    "repeated": lambda actions, at: [*actions[: at + 1], *actions[at:]],
    "renamed": lambda actions, at: [*actions[:at], actions[at]._replace(micro_batch=100), *actions[at + 1 :]],
}


@pytest.mark.parametrize("change", CHANGES)
@settings(max_examples=60)
@given(data=st.data())
def test_a_program_with_an_action_missing_repeated_or_renamed_is_refused(change: str, data: st.DataObject) -> None:
    plan = data.draw(plans(most_groups=4, most_micro_batches=4, most_replicas=3))
    program = expand(plan)
    rank = data.draw(st.integers(0, len(program.ranks) - 1))
    actions = list(program.ranks[rank])
    broken = RankProgram.of(CHANGES[change](actions, data.draw(st.integers(0, len(actions) - 1))))
    with pytest.raises(ProgramError, match=f"rank {rank} "):
        check(Program((*program.ranks[:rank], broken, *program.ranks[rank + 1 :])), plan)


@pytest.mark.parametrize("micro_batches", [1, 3, 8])
def test_depths_depend_on_the_stages_behind_alone(micro_batches: int) -> None:
    for schedule in map(SCHEDULES.__getitem__, LINES):
        deepest = schedule.warmups(8, 1, micro_batches)
        for stages in range(1, 8):
            for name, depths in schedule.warmups(stages, 1, micro_batches).items():
                assert depths == deepest[name][8 - stages :]
                assert list(depths) == sorted(depths, reverse=True)


@given(plans(most_groups=4, most_micro_batches=6, most_replicas=3))
def test_programs_of_forwards_are_those_of_training_in_its_order_and_end(plan: Plan) -> None:
    program = expand_forwards(plan)
    check(program, plan, FORWARDS)
    for forwards, whole in zip(program.ranks, expand(plan).ranks, strict=True):
        assert list(forwards) == [action for action in whole if str(action.kind) in ("F", "S", "R")]
