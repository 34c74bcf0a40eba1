"""Plans of teams, and their prices by rank, made of plans of single devices: a team takes what its device did.

So what a simulator says of the single devices is true of the teams, whose ranks really go.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

from autopar.formats.cuts import ParameterCut, SequenceCut
from autopar.formats.plan import Plan
from autopar.formats.program import ActionPrices, Program, RankPrices, RankProgram, price_key
from autopar.formats.stage import Stage
from autopar.schedules.expand import expand
from drawn_plans import resized

_TEAMS = (1, 2, 2, 4)


def teams_of(plan: Plan, seed: int, sizes: Sequence[int] = _TEAMS, slices: float = 0.4) -> Plan:
    """Return a plan whose replicas are run by teams; some tensors between teams of one size are in slices."""
    draw = random.Random(seed)
    size_of = {stage: size for chunks in plan.groups for size in [draw.choice(sizes)] for stage in chunks}
    made = resized(plan.model_copy(update={"nodes": ()}), [size_of[stage] for stage in range(len(plan.stages))])
    sequences: list[list[SequenceCut]] = [[] for _ in plan.stages]
    for tensor in plan.tensors:
        stages = tensor.producer, *tensor.consumers
        between = {size_of[stage] for stage in stages}
        if len(between) == 1 and between != {1} and draw.random() < slices:
            for stage in stages:
                sequences[stage].append(SequenceCut(tensor=tensor.name, dim=1))
    divided = tuple(map(_divided, made.stages, sequences))
    return made.model_copy(update={"stages": divided})


def _divided(stage: Stage, sequence: Sequence[SequenceCut]) -> Stage:
    parts, name = tuple(((part, part + 1),) for part in range(stage.tensor_parallel)), f"{stage.layers[0]}.w"
    cuts = (ParameterCut(parameter=name, dim=0, parts=parts),) if stage.tensor_parallel > 1 else ()
    return stage.model_copy(update={"cuts": cuts, "sequence": tuple(sequence)})


def single_ranks(plan: Plan, teams: Plan) -> list[int]:
    """Return the rank of a plan of single devices by the rank of one of teams."""
    ranks = {(own.group, own.replica): own.rank for own in plan.ownership.ranks}
    return [ranks[own.group, own.replica] for own in teams.ownership.ranks]


def team_prices(
    plan: Plan, teams: Plan, prices: ActionPrices, seed: int, program: Program | None = None
) -> ActionPrices:
    """Return the prices of teams, given those of the single devices.

    Of the ways between two teams, the one from last rank to last rank takes longest; all others are any quicker.
    """
    draw, single = random.Random(seed), single_ranks(plan, teams)
    last = [own.part == len(own.team) - 1 for own in teams.ownership.ranks]
    count = len(last)
    shares = [[1.0 if last[a] and last[b] else draw.uniform(0.2, 1.0) for b in range(count)] for a in range(count)]

    def by_rank(rank: int, actions: RankProgram) -> RankPrices:
        own, seconds = prices.ranks[single[rank]], dict[str, float]()
        for action in set(actions):
            sent = action.peer >= 0
            key = price_key(action._replace(peer=single[action.peer]) if sent else action)
            if key in own.seconds:
                seconds[price_key(action)] = own.seconds[key] * (shares[rank][action.peer] if sent else 1.0)
        return replace(own, seconds=seconds)

    ranks = tuple(map(by_rank, range(count), (program or expand(teams)).ranks))
    return replace(prices, ranks=ranks, holds=tuple(prices.holds[rank] for rank in single) if prices.holds else ())
