"""When the actions of ranks run that never flush: written down from the rule of the order alone, without programs.

Rank s performs B(m) and then F(m + K_s), m counting through; its update follows the last backward of a mini-batch, or
that of some micro-batches later. A message takes its link from the end of what made it, in the order of making. Stages
that share a parameter wait, before their updates, for the sum of its gradients, which takes its time from the last of
their last backwards on. Nothing else holds anybody up.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple


class StageTimes(NamedTuple):
    forward_s: float
    backward_s: float
    update_s: float
    forth_s: float
    """Of a message to the stage behind."""
    back_s: float
    """Of a gradient to the stage before; its way is the stage's own queue to it."""


def update_ends(
    stages: Sequence[StageTimes],
    depths: Sequence[int],
    micro_batches: int,
    count: int,
    lags: Sequence[int],
    shared: Sequence[int] = (),
    sum_s: float = 0.0,
) -> list[list[float]]:
    """Return when every stage's updates end; stages have one replica each, and gradients flow back everywhere."""
    total = count * micro_batches

    def order(stage: int) -> list[tuple[str, int]]:
        found = [("F", number) for number in range(min(depths[stage], total))]
        for number in range(total + lags[stage]):
            if number < total:
                found.append(("B", number))
            late = number - lags[stage]
            if late >= 0 and late % micro_batches == micro_batches - 1:
                found.append(("U", late // micro_batches))
            if number + depths[stage] < total:
                found.append(("F", number + depths[stage]))
        return found

    orders = [order(stage) for stage in range(len(stages))]
    place = [{action: at for at, action in enumerate(each)} for each in orders]

    @cache
    def end(stage: int, at: int) -> float:
        """Return when an action ends."""
        kind, number = orders[stage][at]
        times = stages[stage]
        ready = end(stage, at - 1) if at else 0.0
        if kind == "F" and stage:
            ready = max(ready, arrived(stage - 1, stage, "F", number))
        if kind == "B" and stage + 1 < len(stages):
            ready = max(ready, arrived(stage + 1, stage, "B", number))
        if kind == "U" and stage in shared:
            ready = max(ready, summed(number))
        return ready + {"F": times.forward_s, "B": times.backward_s, "U": times.update_s}[kind]

    @cache
    def arrived(sender: int, receiver: int, kind: str, number: int) -> float:
        takes_s = stages[sender].forth_s if kind == "F" else stages[sender].back_s
        begins = end(sender, place[sender][kind, number])
        return takes_s + (max(begins, arrived(sender, receiver, kind, number - 1)) if number else begins)

    @cache
    def summed(step: int) -> float:
        last = (step + 1) * micro_batches - 1
        begins = max(end(stage, place[stage]["B", last]) for stage in shared)
        return sum_s + (max(begins, summed(step - 1)) if step else begins)

    # Each action is asked for in turn, so that recursion stays shallow.
    for number in range(total):
        for stage in range(len(stages)):
            for kind in ("F", "B"):
                if place[stage].get((kind, number), 0) <= 2 * number:
                    end(stage, place[stage][kind, number])
    return [[end(stage, place[stage]["U", step]) for step in range(count)] for stage in range(len(stages))]
