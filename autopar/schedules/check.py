"""Check: a program is complete, within its in-flight depth, and free of deadlock, before anything runs."""

from __future__ import annotations

from collections import Counter, deque

from autopar.errors import FileError
from autopar.formats.plan import Plan
from autopar.formats.program import (
    BACKWARD,
    FORWARD,
    RECEIVE,
    RECEIVE_GRADIENT,
    REDUCE,
    REDUCE_TIED,
    SEND,
    SEND_GRADIENT,
    UPDATE,
    Action,
    Program,
    RankProgram,
)
from autopar.schedules.expand import Message, messages, mine, stage_of

__all__ = ["ProgramError", "check", "in_flight"]


class ProgramError(FileError):
    """A program is incomplete, exceeds its in-flight depth, or would deadlock."""


def check(program: Program, plan: Plan) -> None:
    """Refuse a program that does not carry out its plan.

    Raises:
        ProgramError: names the rank and the action.
    """
    count = len(plan.devices)
    if len(program.ranks) != count:
        raise ProgramError(f"the program has {len(program.ranks)} ranks, the plan {count}")
    own: list[list[Message]] = [[] for _ in range(count)]
    for message in messages(plan):
        own[message.sender].append(message)
        own[message.receiver].append(message)
    for rank, actions in enumerate(program.ranks):
        stage, _ = stage_of(plan, rank)
        _check_complete(rank, stage, actions, plan, own[rank])
        depth, allowed = in_flight(actions), plan.stages[stage].warmup
        if depth > allowed:
            raise ProgramError(f"rank {rank} (stage {stage}) keeps {depth} micro-batches in flight, allowed {allowed}")
    _check_flow(program)


def in_flight(actions: RankProgram) -> int:
    """Return the most micro-batches whose forward is done and whose backward is not."""
    depth = deepest = 0
    for action in actions:
        if action.kind == FORWARD:
            depth += 1
            deepest = max(deepest, depth)
        elif action.kind == BACKWARD:
            depth -= 1
    return deepest


def _check_complete(rank: int, stage: int, actions: RankProgram, plan: Plan, flowing: list[Message]) -> None:
    """Every action that the plan asks of the rank is there once, and its own order makes sense.

    ``flowing`` are the messages that the rank sends or receives.
    """
    expected: Counter[Action] = Counter()
    before: dict[Action, list[Action]] = {}
    own = mine(plan, rank)
    for micro_batch in own:
        forward, backward = Action(FORWARD, stage, micro_batch), Action(BACKWARD, stage, micro_batch)
        before[backward], before[forward] = [forward], []
        for message in flowing:
            if not message.carries(micro_batch):
                continue
            if message.receiver == rank:
                peer = (micro_batch, message.sender, message.producer)
                before[forward].append(Action(RECEIVE, stage, *peer))
                if message.gradients:
                    before[Action(SEND_GRADIENT, stage, *peer)] = [backward]
            if message.sender == rank:
                peer = (micro_batch, message.receiver, message.consumer)
                before[Action(SEND, stage, *peer)] = [forward]
                if message.gradients:
                    before[backward].append(Action(RECEIVE_GRADIENT, stage, *peer))
    backwards = [Action(BACKWARD, stage, micro_batch) for micro_batch in own]
    closing = [Action(REDUCE, stage)] if plan.stages[stage].replicas > 1 else []
    closing += [Action(REDUCE_TIED, stage, i) for i, tied in enumerate(plan.tied) if stage in tied.stages]
    before.update(dict.fromkeys(closing, backwards))
    before[Action(UPDATE, stage)] = backwards + closing
    for after, earlier in before.items():
        expected.update([after])
        expected.update(action for action in earlier if action not in before)
    found = Counter(actions)
    for action in expected.keys() | found.keys():
        if found[action] != 1 or action not in expected:
            problem = "is missing" if not found[action] else "is not part of the plan, or is there twice"
            raise ProgramError(f"rank {rank} (stage {stage}): {action} {problem}")
    position = {action: index for index, action in enumerate(actions)}
    for after, earlier in before.items():
        for action in earlier:
            if position[action] > position[after]:
                raise ProgramError(f"rank {rank} (stage {stage}): {after} stands before {action}, which it needs")


def _check_flow(program: Program) -> None:
    """Run the program without time: messages of an ordered pair of ranks form one in-order queue.

    A send occupies its queue, not its rank; a receive blocks its rank until its message is the head of the queue;
    a reduction blocks until all of its group reach it.
    """
    queues: dict[tuple[int, int], deque[Action]] = {}
    position = [0] * len(program.ranks)
    groups: dict[tuple[str, int], set[int]] = {}
    for rank, actions in enumerate(program.ranks):
        for action in actions:
            if action.kind in (REDUCE, REDUCE_TIED):
                groups.setdefault(_group(action), set()).add(rank)
    arrived: dict[tuple[str, int], set[int]] = {key: set() for key in groups}
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(program.ranks):
            while position[rank] < len(actions) and _advance(rank, actions[position[rank]], queues, groups, arrived):
                position[rank] += 1
                moved = True
    for rank, actions in enumerate(program.ranks):
        if position[rank] < len(actions):
            stuck = actions[position[rank]]
            raise ProgramError(f"deadlock: rank {rank} (stage {stuck.stage}) waits forever at {stuck}")
    for (sender, receiver), queue in queues.items():
        if queue:
            raise ProgramError(f"rank {receiver} never receives {queue[0]} of rank {sender}")


def _group(action: Action) -> tuple[str, int]:
    return (action.kind, action.micro_batch if action.kind == REDUCE_TIED else action.stage)


def _advance(
    rank: int,
    action: Action,
    queues: dict[tuple[int, int], deque[Action]],
    groups: dict[tuple[str, int], set[int]],
    arrived: dict[tuple[str, int], set[int]],
) -> bool:
    if action.kind in (SEND, SEND_GRADIENT):
        queues.setdefault((rank, action.peer), deque()).append(action)
    elif action.kind in (RECEIVE, RECEIVE_GRADIENT):
        queue = queues.get((action.peer, rank))
        if not queue:
            return False
        sent = queue[0]
        kind = SEND if action.kind == RECEIVE else SEND_GRADIENT
        if sent != Action(kind, action.peer_stage, action.micro_batch, rank, action.stage, action.version):
            raise ProgramError(f"rank {rank} expects {action}, but rank {action.peer} sends {sent} first")
        queue.popleft()
    elif action.kind in (REDUCE, REDUCE_TIED):
        key = _group(action)
        arrived[key].add(rank)
        return arrived[key] == groups[key]
    return True
