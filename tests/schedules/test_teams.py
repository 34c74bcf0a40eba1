"""Programs of plans whose replicas several ranks run together."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.formats.plan import Plan
from autopar.formats.program import FORWARD, Program, RankProgram
from autopar.schedules.check import ProgramError, check
from autopar.schedules.expand import action_count, expand, messages
from drawn_plans import chain, make, plans, resized


@st.composite
def team_plans(draw: st.DrawFn, most_groups: int = 4) -> Plan:
    """Draw plans with one to four ranks for every replica of a group."""
    plan = draw(plans(most_groups=most_groups, most_micro_batches=4, most_replicas=3))
    sizes = {chunks: draw(st.sampled_from([1, 2, 3, 4])) for chunks in plan.groups}
    return resized(plan, [sizes[chunks] for stage, _ in enumerate(plan.stages) for chunks in sizes if stage in chunks])


@settings(max_examples=80)
@given(team_plans())
def test_teams_are_complete_and_every_row_goes_to_one_once(plan: Plan) -> None:
    program = expand(plan)
    check(program, plan)
    assert action_count(plan) == sum(map(len, program.ranks))
    seen = set()
    for rank, own in enumerate(plan.ownership.ranks):
        assert own.rank == rank
        assert all(plan.ownership.replicas[each][own.replica] == own.team for each in own.stages)
        assert own.team[own.part] == own.copies[own.replica] == rank
        assert len(own.team) == plan.stages[own.stage].tensor_parallel
        seen.add((own.stage, own.replica, own.part))
    assert len(seen) == len(plan.devices)
    found = messages(plan)
    for tensor in range(len(plan.tensors)):
        producer = plan.tensors[tensor].producer
        for consumer in plan.tensors[tensor].consumers:
            flows = [each for each in found if (each.producer, each.consumer) == (producer, consumer)]
            same = plan.stages[producer].devices == plan.stages[consumer].devices
            for micro_batch in range(plan.micro_batches):
                carried = [each for each in flows if each.samples.has(micro_batch) and tensor in each.tensors]
                assert all(each.local == same for each in carried)
                rows = Counter(row for each in carried for row in range(*map(int, each.samples[:2])))
                times = plan.stages[consumer].tensor_parallel if same else 1
                assert rows == dict.fromkeys(range(plan.micro_batch_size), times)
                assert set(Counter((each.sender, each.receiver) for each in carried).values()) <= {1}


def test_as_many_send_and_receive_and_ranks_in_another_order_are_refused() -> None:
    plan = resized(make("1f1b", 2, [(8,), (8,)], [2, 1], chain(2)), [2, 4])
    found = [(each.sender, each.receiver, *each.samples[:2]) for each in messages(plan)]
    assert found == [(0, 2, 0, 2), (1, 3, 2, 4), (0, 4, 4, 6), (1, 5, 6, 8)]
    plan = resized(make("gpipe", 3, [(4,)], [3], ()), [2])
    program = expand(plan)
    actions = list(program.ranks[1])
    forwards = [at for at, action in enumerate(actions) if action.kind == FORWARD]
    actions[forwards[0]], actions[forwards[1]] = actions[forwards[1]], actions[forwards[0]]
    with pytest.raises(ProgramError, match="rank 1: F1@0 stands where rank 0, with which it runs a replica, has F0@0"):
        check(Program((program.ranks[0], RankProgram.of(actions))), plan)
