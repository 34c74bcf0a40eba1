"""Programs edited at random, as a user may edit them: still sound, and within what was planned for."""

from __future__ import annotations

import random
from dataclasses import replace

from autopar.formats.plan import Plan
from autopar.formats.program import Program, RankProgram
from autopar.schedules.check import ProgramError, check, check_bounds
from autopar.schedules.expand import expand


def edited(plan: Plan, seed: int, attempts: int = 40) -> Program:
    """Return the plan's program after moves of single actions, of which those that the checks refuse are undone."""
    draw, program = random.Random(seed), expand(plan)
    for _ in range(attempts):
        rank = draw.randrange(len(program.ranks))
        actions = list(program.ranks[rank])
        moved = actions.pop(draw.randrange(len(actions)))
        actions.insert(draw.randrange(len(actions) + 1), moved)
        changed = replace(program, ranks=(*program.ranks[:rank], RankProgram.of(actions), *program.ranks[rank + 1 :]))
        try:
            check(changed, plan)
            check_bounds(changed, plan)
        except ProgramError:
            continue
        program = changed
    return program
