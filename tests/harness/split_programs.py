"""Programs with backwards in two halves."""

from __future__ import annotations

import random

from autopar.formats.program import BACKWARD, INPUT_BACKWARD, WEIGHT_BACKWARD, Program, RankProgram


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
