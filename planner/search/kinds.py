"""Kinds: splits of a cluster of several kinds of devices, to move on from.

The devices of each kind make some groups that are alike, one kind's behind another's. Each group is a stage, with as
many layers as it is quick. Planners for mixed clusters begin from such splits, too: Um et al., "Metis: Fast Automatic
Distributed Training on Heterogeneous GPUs", USENIX ATC 2024, section 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import permutations, product
from math import inf
from sys import float_info
from typing import NamedTuple

from autopar.options.plan import PlanOptions
from autopar.ownership import Replicas
from autopar.planner.candidate import Family, Shape, divisors
from autopar.planner.costs.model import CostModel
from autopar.planner.search import moves
from autopar.planner.search.judge import START, Best
from autopar.planner.search.local import FEW_JUDGED, JUDGED, LocalSearch, in_turn, least_depths
from autopar.planner.simulator.simulate import Simulator

LOOKED_AT = 400
"""Splits whose layers are cut and whose links and memory are looked at, those first that compute quickest."""
MOST_ORDERED = 2
"""Kinds of which each has teams of its own; of more, all have the same, and one order is tried."""


class _Groups(NamedTuple):
    """Groups of one kind's devices, all alike."""

    kind: int
    groups: int
    replicas: Replicas
    """Of each."""


class _Split(NamedTuple):
    quick_s: float
    """About how long a step takes, were links free, memory without limit and layers as small as may be."""
    family: Family
    groups: tuple[_Groups, ...]


def judge_splits_by_kind(simulator: Simulator, families: Sequence[Family], options: PlanOptions, best: Best) -> None:
    """Judge the most promising splits of each number of groups."""
    costs, priced = simulator.costs, list[tuple[float, int, Family, Shape, tuple[int, ...]]]()
    climb = LocalSearch(simulator, options, best, START * options.effort)
    splits = sorted(_splits(costs, families, options))
    for split in in_turn(splits, lambda each: each.groups)[:LOOKED_AT]:
        every, family = [own for own in split.groups for _ in range(own.groups)], split.family
        if climb.work_left <= START * options.effort / 2:
            break
        if len(every) >= len(climb.edges):
            continue
        replicas, kinds = [each.replicas for each in every], [each.kind for each in every]
        shape = moves.balanced_shape(costs, family, replicas, 1, climb.edges, kinds)
        order = _order(costs, every)
        for how in (each for each in climb.ways() if each.division == "split"):
            own = shape.run(how)
            score = climb.score(family, own, order, least_depths(family, own))
            priced.append((score, len(priced), family, own, order))
    ranked = in_turn(sorted(priced), lambda each: (each[3].replicas, each[4]))
    for at, (score, _, family, shape, order) in enumerate(ranked[: JUDGED * options.effort]):
        if score < inf and (climb.work_left > 0 or at < FEW_JUDGED):
            climb.judge(family, _move_cuts(climb, family, shape, order, score), order, inf)


def _move_cuts(climb: LocalSearch, family: Family, shape: Shape, order: tuple[int, ...], score: float) -> Shape:
    """Return a shape with cuts moved on while its score falls: links, memory and updates are in it, too."""
    better = True
    while better and climb.work_left > 0:
        better = False
        for cuts in moves.cuts_moved(shape.cuts, climb.edges, range(len(shape.cuts) - 1)):
            other = shape._replace(cuts=cuts)
            other_score = climb.score(family, other, order, least_depths(family, other))
            if other_score < score:
                score, shape, better = other_score, other, True
                break
    return shape


def _splits(costs: CostModel, families: Sequence[Family], options: PlanOptions) -> Iterator[_Split]:
    """Yield all splits with their quick steps."""
    kinds = sorted(set(costs.kind_of))
    counts = {kind: costs.kind_of.count(kind) for kind in kinds}

    @cache
    def whole_s(family: Family, kind: int, replicas: Replicas) -> float:
        rows = max(costs.shares(family.micro_batch_size, replicas))
        return max(float_info.min, float(moves.running_s(costs, rows, replicas, kind)[-1]))

    def groups_of(kind: int) -> list[_Groups]:
        found = [] if options.use_all else [_Groups(kind, 0, costs.teams[0])]
        for team in costs.teams:
            replicas = counts[kind] // team.team
            whole = team.team * replicas == counts[kind] or not options.use_all
            found += [
                _Groups(kind, count, team.so_many(replicas // count))
                for count in divisors(replicas)
                if replicas and whole
            ]
        return found

    own = {kind: groups_of(kind) for kind in kinds}
    few = len(kinds) <= MOST_ORDERED
    for groups in product(*own.values()):
        present = tuple(each for each in groups if each.groups)
        alike = len({(each.replicas.team, each.replicas.sliced) for each in present}) == 1
        total = sum(each.groups for each in present)
        if not 1 <= total <= costs.layer_count or not (few or alike):
            continue
        for family in families:
            if max(each.replicas.width for each in present) > family.micro_batch_size and not costs.divisible:
                continue
            # Groups that compute as long as each other: of kind k, each has this part of all layers.
            each_s = 1 / sum(each.groups / whole_s(family, each.kind, each.replicas) for each in present)
            quick_s = (family.micro_batches - 1 + total) * each_s
            for order in permutations(present) if few else [present]:
                yield _Split(quick_s, family, order)


def _order(costs: CostModel, groups: Sequence[_Groups]) -> tuple[int, ...]:
    """Return the order in which groups take devices, those of a kind as the cluster lists them; idle ones are last."""
    left = {kind: costs.devices_of(kind) for kind in set(costs.kind_of)}
    found: list[int] = []
    for each in groups:
        own = left[each.kind]
        found += own[: each.replicas.devices]
        del own[: each.replicas.devices]
    return (*found, *sorted(device for rest in left.values() for device in rest))
