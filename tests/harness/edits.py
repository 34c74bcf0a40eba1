"""Programs edited at random, as a user may edit them: still sound, and within what was planned for; or in halves."""

import random
from collections.abc import Collection
from dataclasses import replace

from autopar.formats.plan import Plan
from autopar.formats.program import BACKWARD, INPUT_BACKWARD, WEIGHT_BACKWARD, Program, RankProgram
from autopar.schedules.check import ProgramError, check, check_bounds
from autopar.schedules.expand import expand


def edited(plan: Plan, seed: int, attempts: int = 40, fixed: Collection[str] = ()) -> Program:
    """Return the plan's program after moves of single actions, of which those that the checks refuse are undone.

    Nothing moves past actions of the kinds that are ``fixed``.
    """
    draw, program = random.Random(seed), expand(plan)
    for _ in range(attempts):
        rank = draw.randrange(len(program.ranks))
        actions = list(program.ranks[rank])
        before, after = draw.randrange(len(actions)), draw.randrange(len(actions))
        if any(action.kind in fixed for action in actions[min(before, after) : max(before, after) + 1]):
            continue
        actions.insert(after, actions.pop(before))
        changed = replace(program, ranks=(*program.ranks[:rank], RankProgram.of(actions), *program.ranks[rank + 1 :]))
        try:
            check(changed, plan)
            check_bounds(changed, plan)
        except ProgramError:
            continue
        program = changed
    return program


def split(program: Program, seed: int, share: float = 1.0) -> Program:
    """Split some backwards of a program; their second halves follow anywhere later, in order, before the reductions."""
    draw = random.Random(seed)
    ranks = []
    for actions in program.ranks:
        halved, waiting = [], []
        for action in actions:
            if action.kind == BACKWARD and draw.random() < share:
                halved.append(action._replace(kind=INPUT_BACKWARD))
                waiting.append(action._replace(kind=WEIGHT_BACKWARD))
                continue
            # Sums are taken in the order of the micro-batches, in which whole backwards stand.
            if action.kind == BACKWARD or action.micro_batch < 0 or action.kind == "T":
                halved += waiting
                waiting.clear()
            while waiting and draw.random() < 0.2:
                halved.append(waiting.pop(0))
            halved.append(action)
        ranks.append(RankProgram.of(halved))
    return Program(tuple(ranks))
