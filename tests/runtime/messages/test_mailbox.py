"""Sends are let go only when the program proves that they have arrived, and receives are posted before their use."""

import itertools
import random
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from autopar.capture.graph import TensorSpec
from autopar.formats.plan import Plan
from autopar.formats.program import (
    BACKWARD,
    FORWARD,
    RECEIVE,
    RECEIVE_GRADIENT,
    SEND,
    SEND_GRADIENT,
    Action,
    Program,
    RankProgram,
)  # fmt: skip
from autopar.ownership import even_shares
from autopar.planner.candidate import CandidateStage
from autopar.runtime.messages.mailbox import Mailbox, receives_ahead, retirements, retirements_by_repetition
from autopar.schedules import SCHEDULES
from autopar.schedules.expand import expand
from autopar.schedules.repetition import Repetition, repetition_positions, written_out
from drawn_plans import chain, crossing, make

ANSWERS = {SEND: RECEIVE, SEND_GRADIENT: RECEIVE_GRADIENT}


def program_of(widths: Sequence[int], micro_batches: int, schedule: str) -> Program:
    """Every stage sends to the next, and the first to the last."""
    depths = next(iter(SCHEDULES[schedule].warmups(len(widths), 1, micro_batches).values()))
    last = len(widths) - 1
    tensors = (*chain(len(widths)), *([crossing("skip", 0, (last,))] if last > 1 else []))
    return expand(make(schedule, micro_batches, [even_shares(6, width) for width in widths], depths, tensors))


def in_turns(plan: Plan, turning: Sequence[int]) -> Plan:
    """Have replicas of some stages take turns."""
    stages = list(plan.stages)
    for at in turning:
        whole = {"shares": (6,) * len(stages[at].devices), "division": "round-robin"}
        stages[at] = stages[at].model_copy(update=whole)
    return plan.model_copy(update={"stages": tuple(stages)})


def deepened(plan: Plan, depths: Sequence[int], policy: str = "stash") -> Plan:
    """Have a plan never flush, unless its policy is another, with depths of which some are more than a step has."""
    deep = (stage.model_copy(update={"warmup": depth}) for stage, depth in zip(plan.stages, depths, strict=True))
    return plan.model_copy(update={"stages": tuple(deep), "weight_policy": policy})


def drawn_plan(drawn: random.Random, micro_batches: int) -> Plan:
    """Stages of some widths that split micro-batches or take turns, as deep as those behind, or a little deeper."""
    widths, depths, turning, behind = list[int](), list[int](), list[int](), 1
    count = drawn.choice([2, 3, 4])
    for at in reversed(range(count)):
        width = drawn.choice([1, 2, 3, 4])
        turns = width if width > 1 and drawn.random() < 0.5 else 1
        depths.insert(0, min(-(-micro_batches // turns), -(-behind // turns) + drawn.choice([0, 0, 1, 2])))
        widths.insert(0, width)
        behind = min(micro_batches, depths[0] * turns)
        turning += [at] if turns > 1 else []
    shares = [even_shares(6, width) for width in widths]
    plan = in_turns(make("1f1b", micro_batches, shares, [1] * count, chain(count)), turning)
    return deepened(plan, depths, "sync")


def mirror(action: Action, rank: int) -> Action:
    """Return the receive, on the peer, of a send of ``rank``; or the send that a receive takes."""
    kinds = ANSWERS | {answer: ask for ask, answer in ANSWERS.items()}
    return Action(kinds[action.kind], action.peer_stage, action.micro_batch, rank, action.stage)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("widths", [[1, 1], [1, 1, 1, 1], [2, 3], [3, 1, 2]])
def test_a_send_is_let_go_once_and_only_behind_a_proof(widths: list[int], schedule: str) -> None:
    program = program_of(widths, 6, schedule)
    for rank, actions in enumerate(program.ranks):
        found = retirements(program, rank)
        retired = [position for positions in found.values() for position in positions]
        assert len(retired) == len(set(retired))
        for proof, positions in found.items():
            peer = list(program.ranks[actions[proof].peer])
            answered = peer.index(mirror(actions[proof], rank))
            for position in positions:
                assert position < proof
                assert actions[position].peer == actions[proof].peer
                assert peer.index(mirror(actions[position], rank)) < answered
            if actions[proof].kind == RECEIVE_GRADIENT and len(program.ranks) == 2:
                # An activation is let go when its gradient returns.
                assert list(actions).index(actions[proof]._replace(kind=SEND)) in positions


@pytest.mark.parametrize("widths", [[1, 1], [2, 3], [1, 1, 1]])
def test_receives_are_posted_two_computations_ahead_in_order(widths: list[int]) -> None:
    program = program_of(widths, 6, "1f1b")
    for rank, actions in enumerate(program.ranks):
        posted: list[int] = []
        kinds = [action.kind for action in actions]
        for position, due in sorted(receives_ahead(program, rank).items()):
            for receive in due:
                assert sum(kind in "FB" for kind in kinds[position:receive]) <= 2
                posted.append(receive)
        assert posted == [i for i, kind in enumerate(kinds) if kind in (RECEIVE, RECEIVE_GRADIENT)]


def test_sent_gradients_wait_for_their_proof_as_many_turns_as_the_planner_charges() -> None:
    drawn, exactly, cases = random.Random(0), 0, 0
    for _ in range(60):
        micro_batches = drawn.choice([8, 12, 24, 37])
        plan = drawn_plan(drawn, micro_batches)
        program, stages = expand(plan), plan.stages
        placed = [
            CandidateStage(0, 1, each.devices, each.shares, each.warmup, division=each.division) for each in stages
        ]
        for at in range(1, len(stages)):
            charged = placed[at].lead(placed[at - 1], micro_batches)
            waiting = max(waiting_gradients(program, rank, placed[at].warmup) for rank in stages[at].devices)
            assert waiting <= min(charged, placed[at].replicas.most(micro_batches))
            exactly += waiting == min(charged, placed[at].replicas.most(micro_batches))
            cases += 1
    assert exactly > 0.9 * cases


@pytest.mark.parametrize(("depths", "micro_batches"), [([3, 2, 1], 1), ([5, 3, 1], 1), ([5, 3, 1], 2), ([4, 2, 2], 4)])
def test_without_flushes_a_send_is_let_go_behind_a_proof_of_a_later_repetition(
    depths: list[int], micro_batches: int
) -> None:
    plan = deepened(make("1f1b", micro_batches, [(6,)] * 3, [1] * 3, chain(3)), depths)
    program, count = expand(plan), 20
    orders = repetition_positions(program, plan, count)
    written = written_out(program, plan, count)
    for rank, actions in enumerate(written.ranks):
        own, places = list(actions), {place: at for at, place in enumerate(orders[rank])}
        let_go: list[int] = []
        let_go_at = retirements_by_repetition(program, rank, plan)
        for at, (number, position) in enumerate(orders[rank]):
            for before, done in let_go_at.get(position, []):
                send = places.get((number - before, done))
                if send is None:
                    # Of a repetition in which the pipeline was yet to be filled.
                    continue
                let_go.append(send)
                peer = list(written.ranks[own[at].peer])
                assert peer.index(mirror(own[send], rank)) < peer.index(mirror(own[at], rank))
        assert len(let_go) == len(set(let_go))
        sends = [at for at, action in enumerate(own) if action.kind in (SEND, SEND_GRADIENT)]
        # All but what is under way in the end.
        assert len(sends) - len(let_go) <= 2 * max(depths) + 2


def waiting_gradients(program: Program, rank: int, deep: int) -> int:
    """Return of how many micro-batches gradients have been sent without proof, beside all ``deep`` in flight."""
    actions, found = list(program.ranks[rank]), retirements(program, rank)
    waiting: set[int] = set()
    most = in_flight = 0
    for position, action in enumerate(actions):
        waiting -= set(found.get(position, ()))
        if action.kind == SEND_GRADIENT:
            waiting.add(position)
        in_flight += (action.kind == FORWARD) - (action.kind == BACKWARD)
        if action.kind in (FORWARD, BACKWARD):
            beside = in_flight + (action.kind == BACKWARD) - deep
            most = max(most, len({actions[each].micro_batch for each in waiting}) + beside)
    return most


class _CountingTransport:
    """Sends nothing, and counts what has not been waited for."""

    waiting, receive = 0, Mock()

    def send(self, tensor: torch.Tensor, peer: int) -> Mock:
        self.waiting += 1
        return Mock(wait=self._waited)

    def _waited(self) -> None:
        self.waiting -= 1


def counting(plan: Plan, rank: int, order: Sequence[int] = ()) -> tuple[Program, _CountingTransport, Mailbox]:
    """Return a rank's mailbox; what it receives of a micro-batch comes in an order, if there is one."""
    program, transport = expand(plan), _CountingTransport()
    if order:
        own, count = list(program.ranks[rank]), len(order)
        places = [at for at, action in enumerate(own) if action.kind == RECEIVE]
        for first in range(0, len(places), count):
            some = places[first : first + count]
            for place, action in zip(some, [own[some[each]] for each in order], strict=True):
                own[place] = action
        program = Program((*program.ranks[:rank], RankProgram.of(own), *program.ranks[rank + 1 :]))
    made: list[Any] = [(each.name, each.producer, each.consumers, (1,), 0, torch.float32) for each in plan.tensors]
    specs = {each.name: TensorSpec(*own, each.gradient) for each, own in zip(plan.tensors, made, strict=True)}
    place: Any = (rank, specs, transport, torch.device("cpu"))
    return program, transport, Mailbox(plan, program, *place)


def test_rows_are_in_their_places_and_messages_wait_where_nothing_comes_back() -> None:
    plan = make("1f1b", 2, [(2, 3, 1), (6,)], [1, 1], (crossing("t0", 0, (1,)),))
    for order in itertools.permutations(range(3)):
        program, _, mailbox = counting(plan, 3, order)
        mailbox._transport = Mock(receive=lambda tensor, peer: (tensor.fill_(peer), Mock())[1])
        mailbox.begin_step(Repetition(0, 2, 1, 0))
        for position, action in enumerate(program.ranks[3]):
            if position in mailbox.due:
                mailbox.post(position)
            if action.kind == RECEIVE:
                mailbox.receive(position)
        for micro_batch in range(2):
            assert mailbox.take(1, micro_batch, 0, "t0").flatten().tolist() == [0, 0, 1, 1, 1, 2]
    plan = make("1f1b", 4, [(6,)] * 2, [2] * 2, (crossing("t0", 0, (1,), gradient=False),))
    program, transport, mailbox = counting(plan, 0)
    sends = [at for at, action in enumerate(program.ranks[0]) if action.kind == SEND]
    for step in range(3):
        mailbox.begin_step(Repetition(step, 4, step + 1, step))
        for place, position in enumerate(sends):
            mailbox.send(position, {"t0": torch.zeros(6, 1)})
            assert transport.waiting == (place + 1 if step == 0 else len(sends))
    mailbox.finish()
    assert transport.waiting == 0


@pytest.mark.pairs
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_no_sends_are_kept_wherever_a_pipeline_is_drained_and_a_turn_ends(
    every: int, gradient: bool, micro_batches: int
) -> None:
    tensors = crossing("t0", 0, (1, 2)), crossing("t1", 1, (2,))
    alone = deepened(make("1f1b", micro_batches, [(6,)] * 3, [1] * 3, tensors), (5, 3, 1))
    turning = make("1f1b", 1, [(2, 2, 2), (3, 3)], [1, 1], (crossing("t0", 0, (1,), gradient),))
    for plan in (alone, deepened(in_turns(turning, (0, 1)), (3, 2))):
        for rank in range(len(plan.devices)):
            most = _most_waiting(plan, rank, every)
            assert max(most[len(most) // 2 :]) <= max(most[: len(most) // 2])


def _most_waiting(plan: Plan, rank: int, every: int) -> list[int]:
    """Return how many sends a rank has not waited for at most, from every fill of a pipeline to its drain."""
    program, transport, mailbox = counting(plan, rank)
    most, values = [], {each.name: torch.zeros(6, 1) for each in plan.tensors}
    for first in range(0, 60, every):
        stop, held = first + every, [0]
        for step in range(first - plan.lead, stop, plan.span):
            repetition = Repetition(step, plan.micro_batches, stop, first, plan.span)
            mailbox.begin_step(repetition)
            for position, action in enumerate(program.ranks[rank]):
                if position in mailbox.due:
                    mailbox.post(position)
                if repetition.has(action) and action.kind in (SEND, SEND_GRADIENT):
                    mailbox.send(position, values)
                    held.append(transport.waiting)
                elif repetition.has(action) and action.kind in (RECEIVE, RECEIVE_GRADIENT):
                    mailbox.receive(position)
        most.append(max(held))
    mailbox.finish()
    assert transport.waiting == 0
    return most
