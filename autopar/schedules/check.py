"""Check: a program, perhaps edited, is complete, within its in-flight depth, and free of deadlock, before it runs.

    autopar simulate --write-program program.json      # writes the program of plan.json
    autopar simulate --program program.json            # predicts when its actions run, edited or not
    autopar rehearse --steps 1 --program program.json  # performs it in virtual time
    autopar run --program program.json                 # runs it in place of the plan's own

A program lists every rank's actions in order, one text each. Before any rank starts, it is checked against its plan:
nothing is missing, added or there twice; an action stands behind all that it needs; messages are received in the order
in which they are sent; no rank waits forever; ranks that reduce together begin their reductions in one order; the
update is every rank's last action; and no stage keeps more micro-batches, or messages, than the plan's own program, for
which memory was planned. Of a pipeline that is never flushed, the file has one repetition: forwards and messages may
stand elsewhere, as long as every forward sees the version that the policy's rule says; backwards, sums and updates keep
their order. A refusal names rank, stage, and action or position.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Container, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from autopar.errors import FileError
from autopar.formats.plan import Plan
from autopar.formats.program import (
    BACKWARD,
    BACKWARDS,
    BEGIN_SUM,
    FORWARD,
    INPUT_BACKWARD,
    KINDS,
    PREDICT,
    PULL,
    PUSH,
    RECEIVE,
    RECEIVE_GRADIENT,
    RECEIVES,
    REDUCE,
    REDUCE_TIED,
    REDUCTIONS,
    SEND,
    SEND_GRADIENT,
    SENDS,
    UPDATE,
    WEIGHT_BACKWARD,
    Action,
    Program,
    RankProgram,
)
from autopar.schedules.expand import Message, closing_of, expand, messages
from autopar.schedules.order import holdings, in_flight
from autopar.schedules.repetition import Repetition, filling, written_out

_NO_PART = "is not part of the plan, or is there twice"
_MOST_IN_CIRCLE = 8
"""Ranks of a circle that an error names."""


class ProgramError(FileError):
    """A program is incomplete, exceeds its in-flight depth, or would deadlock."""


def check(program: Program, plan: Plan, kinds: Collection[str] = KINDS) -> None:
    """Refuse a program that does not carry out its plan.

    Args:
        program: what ranks would do.
        plan: what they should.
        kinds: of actions that are asked for; without backwards, nothing is kept for them.

    Raises:
        ProgramError: names the rank and the action.
    """
    count = len(plan.devices)
    if len(program.ranks) != count:
        raise ProgramError(f"the program has {len(program.ranks)} ranks, the plan {count}")
    shift = plan.policy.shift(plan.micro_batches * plan.span)
    if program.shift != shift:
        raise ProgramError(f"$.shift: the plan's repetitions have {shift} micro-batches, found {program.shift}")
    _check_teams(program, plan)
    movable, mini_batches = plan.policy.movable or KINDS, filling(plan)
    fixed = [kind for kind in kinds if kind not in movable]
    own = expand(plan) if fixed else program
    written = written_out(program, plan, mini_batches)
    for rank, flowing in enumerate(_messages_by_rank(plan)):
        _check_reach(rank, program.ranks[rank], plan, kinds)
        _check_kept_order(rank, program.ranks[rank], own.ranks[rank], fixed)
        _check_rank(rank, written.ranks[rank], plan, flowing, [kind for kind in kinds if kind in (*movable, BACKWARD)])
    if plan.policy.reduces_at_backward:
        # The sum of a shared parameter begins with each holder's last backward: it waits for nothing behind these.
        ranks = (RankProgram.of(each for each in actions if each.kind != REDUCE_TIED) for actions in written.ranks)
        written = Program(tuple(ranks))
    _check_flow(written, plan)


def _check_teams(program: Program, plan: Plan) -> None:
    """The ranks of a team compute in the same order: they add up what their parts give as they go."""
    if all(stage.tensor_parallel == 1 for stage in plan.stages):
        return
    for rank, actions in enumerate(program.ranks):
        first = plan.ownership.ranks[rank].team[0]
        own, other = (
            [each for each in some if each.kind in (FORWARD, *BACKWARDS)] for some in (actions, program.ranks[first])
        )
        for one, another in zip_longest(own, other):
            if one != another:
                raise ProgramError(
                    f"rank {rank}: {one or 'nothing'} stands where rank {first}, with which it runs a replica, has "
                    f"{another or 'nothing'}; ranks of a team compute in one order"
                )


def _messages_by_rank(plan: Plan) -> list[list[Message]]:
    """Return the messages that every rank sends or receives."""
    found: list[list[Message]] = [[] for _ in plan.devices]
    for message in messages(plan):
        for rank in {message.sender, message.receiver}:
            found[rank].append(message)
    return found


def _check_reach(rank: int, actions: RankProgram, plan: Plan, kinds: Collection[str]) -> None:
    """No action is of another kind, or of a mini-batch that begins in a later repetition."""
    here, reach = Repetition(0, plan.micro_batches, 1), plan.lead + plan.span
    for action in actions:
        if action.kind not in kinds or here.step_of(action) >= reach:
            raise ProgramError(f"rank {rank} (stage {action.stage}): {action} {_NO_PART}")


def _check_kept_order(rank: int, actions: RankProgram, own: RankProgram, fixed: Collection[str]) -> None:
    """Actions of kinds that may not move are in the order of the plan's own repetition."""
    found, expected = ([each for each in some if each.kind in fixed] for some in (actions, own))
    for one, other in zip_longest(found, expected):
        if one != other:
            at = one or other
            assert at is not None
            raise ProgramError(
                f"rank {rank} (stage {at.stage}): {one or 'nothing'} stands where the plan's own program has "
                f"{other or 'nothing'}; without flushes, only forwards and messages may stand elsewhere"
            )


def _check_rank(rank: int, actions: RankProgram, plan: Plan, flowing: list[Message], kinds: Collection[str]) -> None:
    """All of a rank's actions of some kinds are there once, behind what they need, and forwards see what is due."""
    newest = RankProgram.of(each._replace(version=0) for each in actions if each.kind in kinds)
    _check_order(rank, newest, _prerequisites(rank, plan, flowing, Counter(newest)), kinds)
    _check_versions(rank, actions, plan)
    for stage in in_flight(actions) if BACKWARD in kinds else ():
        _check_depth(rank, stage, actions, plan)


def _check_versions(rank: int, actions: RankProgram, plan: Plan) -> None:
    """All of a rank's forwards see the version that the policy's rule says."""
    own, policy, depths = plan.ownership.ranks[rank], plan.policy, plan.depths
    updates, pulls, begun, prepared, predicts = 0, 0, -1, -1, any(each.kind == PREDICT for each in actions)
    for action in actions:
        mini_batch = action.micro_batch // plan.micro_batches
        if action.kind == UPDATE:
            updates += 1
        elif action.kind == PULL:
            pulls += 1
        elif action.kind == PREDICT:
            prepared = mini_batch
        elif action.kind == BEGIN_SUM:
            begun = mini_batch
        elif action.kind == FORWARD:
            due = policy.forward_version(depths[action.stage], action.micro_batch // own.turns)
            late = mini_batch <= begun and not policy.sums_gradients
            unprepared = predicts and mini_batch != prepared
            if late or unprepared or max(0, updates - action.version) != max(0, due):
                raise ProgramError(
                    f"rank {rank} (stage {action.stage}): {action}, counted through all mini-batches, stands where it "
                    f"would not see version {max(0, due)} of the weights, as {plan.weight_policy} has it"
                )
            if pulls != policy.pulls_before(action.micro_batch):
                raise ProgramError(
                    f"rank {rank} (stage {action.stage}): {action}, counted through all mini-batches, stands behind "
                    f"{pulls} pulls, where {plan.weight_policy} has {policy.pulls_before(action.micro_batch)}"
                )


def _check_depth(rank: int, stage: int, actions: RankProgram, plan: Plan) -> None:
    depth, allowed = in_flight(actions)[stage], plan.stages[stage].warmup
    if depth > allowed:
        raise ProgramError(f"rank {rank} (stage {stage}) keeps {depth} micro-batches in flight, allowed {allowed}")


def _check_order(
    rank: int, actions: RankProgram, prerequisites: Mapping[Action, list[Action]], kinds: Collection[str]
) -> None:
    """Every action is there once that has prerequisites and is of these kinds, and behind all of them."""
    found = Counter(actions)
    before = {after: earlier for after, earlier in prerequisites.items() if after.kind in kinds}
    expected = before.keys() | {action for earlier in before.values() for action in earlier}
    wrong = [action for action in expected | found.keys() if found[action] != 1 or action not in expected]
    if wrong:
        action = min(wrong)
        problem = "is missing" if not found[action] else _NO_PART
        raise ProgramError(f"rank {rank} (stage {action.stage}): {action} {problem}")
    position = {action: index for index, action in enumerate(actions)}
    for after, earlier in before.items():
        for action in earlier:
            if position[action] > position[after]:
                where = f"rank {rank} (stage {after.stage}), position {position[after]}"
                raise ProgramError(f"{where}: {after} stands before {action}, which it needs")


def _prerequisites(
    rank: int, plan: Plan, flowing: list[Message], program_actions: Container[Action]
) -> dict[Action, list[Action]]:
    """Return what the rank has to do, each with what must stand before it; backwards in halves as the program has."""
    own = plan.ownership.ranks[rank]
    micro_batches = own.samples.of(filling(plan) * plan.micro_batches)
    stages, before = own.stages, _flow(rank, plan, flowing, program_actions, micro_batches)
    last: dict[int, list[Action]] = {stage: [] for stage in stages}
    for action in before:
        if action.kind in BACKWARDS:
            last[action.stage].append(action)
    closing = [Action(kind, stage, index) for kind, stage, index, *_ in closing_of(plan, stages)]
    *reductions, update = closing
    for reduction in reductions:
        tied = plan.tied[reduction.micro_batch].stages if reduction.kind == REDUCE_TIED else (reduction.stage,)
        before[reduction] = [action for stage in stages if stage in tied for action in last[stage]]
    # Ranks may meet in their updates, over the loss or the gradients' norm: nobody can wait for what follows one.
    before[update] = list(before)
    return before


def _flow(
    rank: int, plan: Plan, flowing: list[Message], program_actions: Container[Action], micro_batches: Sequence[int]
) -> dict[Action, list[Action]]:
    """Return forwards, backwards and messages of a rank's micro-batches, each with what must stand before it."""
    before: dict[Action, list[Action]] = {}
    for stage in plan.ownership.ranks[rank].stages:
        for micro_batch in micro_batches:
            forward, backward = Action(FORWARD, stage, micro_batch), _backward(stage, micro_batch, program_actions)
            before[forward], before[backward] = [], [forward]
            if backward.kind == INPUT_BACKWARD:
                before[Action(WEIGHT_BACKWARD, stage, micro_batch)] = [backward]
    for message in flowing:
        for micro_batch in micro_batches:
            if message.samples.has(micro_batch):
                _add_message(before, rank, message, micro_batch, program_actions)
    return before


def _backward(stage: int, micro_batch: int, program_actions: Container[Action]) -> Action:
    """Return the backward that others wait for: its first half, where the program has halves."""
    half = Action(INPUT_BACKWARD, stage, micro_batch)
    return half if half in program_actions else Action(BACKWARD, stage, micro_batch)


def _add_message(
    before: dict[Action, list[Action]],
    rank: int,
    message: Message,
    micro_batch: int,
    program_actions: Container[Action],
) -> None:
    """Add a message's sending or receiving on this rank, or what its stages on one rank wait for of each other."""
    made, read = message.producer, message.consumer
    if message.local:
        before[Action(FORWARD, read, micro_batch)].append(Action(FORWARD, made, micro_batch))
        if message.gradients:
            before[_backward(made, micro_batch, program_actions)].append(_backward(read, micro_batch, program_actions))
    elif message.receiver == rank:
        peer = (micro_batch, message.sender, made)
        before[Action(FORWARD, read, micro_batch)].append(Action(RECEIVE, read, *peer))
        if message.gradients:
            before[Action(SEND_GRADIENT, read, *peer)] = [_backward(read, micro_batch, program_actions)]
    else:
        peer = (micro_batch, message.receiver, read)
        before[Action(SEND, made, *peer)] = [Action(FORWARD, made, micro_batch)]
        if message.gradients:
            before[_backward(made, micro_batch, program_actions)].append(Action(RECEIVE_GRADIENT, made, *peer))


def _check_flow(program: Program, plan: Plan) -> None:
    """Run the program without time: messages of an ordered pair of ranks form one in-order queue.

    A send occupies its queue, not its rank; a receive blocks its rank until its message is the head of the queue;
    a reduction blocks until all of its group reach it, each as often; a rank's n-th pull until all who hold layers of
    its stage have pushed n waves, less those pulls that wait for none.
    """
    queues: dict[tuple[int, int], deque[Action]] = {}
    waves, reached = _Waves(plan), Reached()
    for rank, actions in enumerate(program.ranks):
        for action in actions:
            if action.kind in REDUCTIONS:
                reached.setdefault(action.reduction, {})[rank] = set()
    # Every rank's actions, and the one that it stands at, until it is done.
    ahead = [enumerate(actions) for actions in program.ranks]
    current = {rank: next(actions, None) for rank, actions in enumerate(ahead)}
    moved = True
    while moved:
        moved = False
        for rank, at in current.items():
            while at is not None and _advance(rank, *at, queues, reached, waves):
                current[rank] = at = next(ahead[rank], None)
                moved = True
    positions = {rank: at[0] for rank, at in current.items() if at is not None}
    stuck = {rank: at[1] for rank, at in current.items() if at is not None}
    if stuck:
        rank, action = next(iter(stuck.items()))
        where = f"rank {rank} (stage {action.stage})"
        around = _circle(stuck, reached, waves)
        ring = "".join(f"; rank {each} waits for rank {other} at {stuck[each]}" for each, other in around)
        raise ProgramError(f"deadlock: {where} waits forever at {action}, position {positions[rank]}{ring}")
    for (sender, receiver), queue in queues.items():
        if queue:
            raise ProgramError(f"rank {receiver} never receives {queue[0]} of rank {sender}")


Reduction = tuple[str, int]
"""Its kind, and its stage or shared parameter."""


class _Waves:
    """How many waves every rank has pushed and pulled."""

    def __init__(self, plan: Plan) -> None:
        self._pushed, self._pulled, self._early = Counter[int](), Counter[int](), plan.early_pulls
        self._peers: dict[int, set[int]] = {}
        for each in plan.shared_layers:
            for rank in each.ranks:
                self._peers.setdefault(rank, set()).update(each.ranks)

    def push(self, rank: int) -> None:
        self._pushed[rank] += 1

    def pull(self, rank: int) -> bool:
        """Take the next wave, if all have pushed it."""
        done = not self.awaited(rank)
        self._pulled[rank] += done
        return done

    def awaited(self, rank: int) -> set[int]:
        """Return the ranks that have not pushed the wave that a rank takes next."""
        return {peer for peer in self._peers[rank] if self._pushed[peer] <= self._pulled[rank] - self._early}


Reached = dict[Reduction, dict[int, set[int]]]
"""Of every reduction, where each rank of its group has reached it, one mini-batch after the other."""


def _awaited_ranks(rank: int, at: dict[int, set[int]]) -> set[int]:
    """Return the ranks that have reached a reduction less often than one of them."""
    return {other for other, positions in at.items() if len(positions) < len(at[rank])}


def _circle(stuck: dict[int, Action], reached: Reached, waves: _Waves) -> list[tuple[int, int]]:
    """Return ranks that wait for each other in a circle, each with the next; none where one waits for what is done."""
    import networkx as nx

    def awaited(rank: int, own: Action) -> set[int]:
        if own.kind in REDUCTIONS:
            return _awaited_ranks(rank, reached[own.reduction])
        return waves.awaited(rank) if own.kind == PULL else {own.peer}

    try:
        found: list[tuple[int, int]] = nx.find_cycle(
            nx.DiGraph({rank: awaited(rank, own) for rank, own in stuck.items()})
        )
    except nx.NetworkXNoCycle:
        return []
    return found[:_MOST_IN_CIRCLE]


def _advance(
    rank: int,
    position: int,
    action: Action,
    queues: dict[tuple[int, int], deque[Action]],
    reached: Reached,
    waves: _Waves,
) -> bool:
    if action.kind == PULL:
        return waves.pull(rank)
    if action.kind == PUSH:
        waves.push(rank)
    elif action.kind in SENDS:
        queues.setdefault((rank, action.peer), deque()).append(action)
    elif action.kind in RECEIVES:
        queue = queues.get((action.peer, rank))
        if not queue:
            return False
        sent = queue[0]
        kind = SEND if action.kind == RECEIVE else SEND_GRADIENT
        if sent != Action(kind, action.peer_stage, action.micro_batch, rank, action.stage, action.version):
            raise ProgramError(f"rank {rank} expects {action}, but rank {action.peer} sends {sent} first")
        queue.popleft()
    elif action.kind in REDUCTIONS:
        own = reached[action.reduction]
        own[rank].add(position)
        return not _awaited_ranks(rank, own)
    return True


_NOUNS = {
    "micro_batches": "micro-batches whose backward is not complete",
    "received_messages": "messages that are not yet computed with",
    "unsent_messages": "messages that are not yet sent",
}
"""What takes memory; a weight half that is to come belongs to a backward that is not complete."""


def read_program(path: Path, plan: Plan) -> Program:
    """Read a program that is to be run in place of the plan's own.

    Raises:
        FileError: it is missing or malformed.
        ProgramError: it does not carry out its plan, would deadlock, or holds more at once than was planned for.
    """
    program = Program.load(path)
    try:
        check(program, plan)
        check_bounds(program, plan)
    except ProgramError as error:
        raise ProgramError(f"{path}: {error}") from error
    return program


def check_bounds(program: Program, plan: Plan) -> None:
    """Refuse a sound program that asks for more memory than the plan's own, or reduces in other orders on other ranks.

    Raises:
        ProgramError: names the rank and the stage.
    """
    program, own = (written_out(each, plan, filling(plan)) for each in (program, expand(plan)))
    for rank, (actions, planned) in enumerate(zip(program.ranks, own.ranks, strict=True)):
        allowed = holdings(planned)
        for stage, holding in holdings(actions).items():
            for name, noun in _NOUNS.items():
                count, most = getattr(holding, name), getattr(allowed[stage], name)
                if count > most:
                    where = f"rank {rank} (stage {stage})"
                    raise ProgramError(f"{where} holds {count} {noun}, and memory was planned for {most}")
    check_reductions(program)


def check_reductions(program: Program) -> None:
    """Refuse a program in which ranks that reduce several things among them do not begin them in one order.

    Raises:
        ProgramError: names two ranks, and what each begins with.
    """
    begun = [_reduction_order(actions) for actions in program.ranks]
    members: dict[Reduction, tuple[int, ...]] = {}
    for rank, reductions in enumerate(begun):
        for reduction in reductions:
            members[reduction] = (*members.get(reduction, ()), rank)
    for ranks in dict.fromkeys(members.values()):
        first, *others = ([each for each in begun[rank] if members[each] == ranks] for rank in ranks)
        for rank, order in zip(ranks[1:], others, strict=True):
            if order != first:
                at = next(at for at, pair in enumerate(zip(order, first, strict=True)) if pair[0] != pair[1])
                raise ProgramError(
                    f"rank {rank} begins to reduce {_reduction_text(order[at])} where rank {ranks[0]} begins with "
                    f"{_reduction_text(first[at])}; they must keep one order"
                )


def _reduction_text(reduction: Reduction) -> str:
    kind, index = reduction
    return f"stage {index}" if kind == REDUCE else f"tied parameter {index}"


def _reduction_order(actions: RankProgram) -> list[Reduction]:
    """Return a rank's reductions in the order in which it begins them: a stage's while its last backward runs.

    A replica that takes turns and gets none has no backward, and begins where the reduction stands.
    """
    found: dict[Reduction, int] = {}
    last: dict[int, int] = {}
    for position, (kind, stage, index, *_) in enumerate(actions):
        if kind in BACKWARDS:
            last[stage] = position
        elif kind == REDUCE:
            found[kind, stage] = last.get(stage, position)
        elif kind == REDUCE_TIED:
            found[kind, index] = position
    return sorted(found, key=found.__getitem__)
