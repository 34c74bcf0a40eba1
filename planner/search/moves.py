"""Moves: the shapes beside a shape, by moved cuts, moved devices and other ways of running replicas.

From where stages end, how wide they are and how they run; and balanced shapes of groups of devices, for schedules of
which plans are found by trying. Every local search takes its moves from here.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise, product

import numpy as np
import numpy.typing as npt

from autopar.formats.stage import group_of, layout_of
from autopar.ownership import SINGLE, Replicas, Shard, shards_of
from autopar.planner.candidate import CandidateStage, Family, Shape, devices_of, place
from autopar.planner.costs.model import CostModel
from autopar.planner.placement import may_stand
from autopar.planner.shares import by_speed


def cuts_moved(
    cuts: Sequence[int], edges: Sequence[int], which: Iterable[int], reach: int = 1
) -> Iterator[tuple[int, ...]]:
    """Yield the cuts with one of ``which`` moved, by up to ``reach`` of the edges where stages may end.

    >>> list(cuts_moved((2, 4), (0, 1, 2, 3, 4), (0,)))
    [(1, 4), (3, 4)]
    """
    for index in which:
        low, high = (0, *cuts)[index], cuts[index + 1]
        # The cut may lie between two edges, as a dictated one does.
        below, above = bisect_left(edges, cuts[index]) - 1, bisect_right(edges, cuts[index])
        for at in (at for step in range(reach) for at in (below - step, above + step)):
            if 0 <= at < len(edges) and low < edges[at] < high:
                yield (*cuts[:index], edges[at], *cuts[index + 1 :])


def layers_passed(cuts: Sequence[int], edges: Sequence[int], givers: Iterable[int]) -> Iterator[tuple[int, ...]]:
    """Yield the cuts with a layer of one of the ``givers`` passed to another stage: those between move by an edge.

    >>> list(layers_passed((2, 4, 6), range(7), (0,)))
    [(1, 4, 6), (1, 3, 6)]
    """
    position = {edge: at for at, edge in enumerate(edges)}
    for giver, taker in product(givers if position.keys() >= {*cuts} else (), range(len(cuts))):
        low, high, by = (giver, taker, -1) if giver < taker else (taker, giver, 1)
        moved = (*cuts[:low], *(edges[position[cut] + by] for cut in cuts[low:high]), *cuts[high:])
        if giver != taker and all(before < after for before, after in pairwise((0, *moved))):
            yield moved


def devices_moved(
    widths: tuple[int, ...], idle: int, takers: Sequence[int], *, all_used: bool
) -> Iterator[tuple[int, ...]]:
    """Yield the widths with devices passed to one of the ``takers``, taken up, or dropped: one, two, four and so on.

    >>> list(devices_moved((2, 1), 0, (1,), all_used=True)), list(devices_moved((1, 1), 1, (0,), all_used=False))
    ([(1, 2)], [(2, 1)])
    >>> list(devices_moved((4, 1), 0, (1,), all_used=True))
    [(3, 2), (2, 3)]
    """
    for index, width in enumerate(widths):
        for count in _powers(width - 1):
            fewer = _with_more(widths, index, -count)
            yield from (_with_more(fewer, taker, count) for taker in takers if taker != index)
            if not all_used:
                yield fewer
    for count in _powers(idle):
        yield from (_with_more(widths, taker, count) for taker in takers)


def _powers(most: int) -> list[int]:
    """Return the powers of two up to a number."""
    return [1 << bit for bit in range(most.bit_length())]


def _with_more(widths: tuple[int, ...], at: int, more: int) -> tuple[int, ...]:
    return (*widths[:at], widths[at] + more, *widths[at + 1 :])


def stages_joined(shape: Shape, which: Iterable[int]) -> Iterator[Shape]:
    """Yield the shape with a stage of ``which`` joined with the next one, on the devices of both, by either's teams.

    >>> joined = next(stages_joined(Shape((2, 4), (Replicas(), Replicas())), (0,)))
    >>> joined.cuts, joined.replicas == (Replicas(2),)
    ((4,), True)
    """
    for index in which:
        both = shape.replicas[index : index + 2]
        how = max(both, key=lambda each: each[1:3] != SINGLE[1:3])
        devices = sum(each.devices for each in both)
        for team in dict.fromkeys(each._replace(width=1)[3:] for each in both):
            own = how._replace(team=team[0], sliced=team[1])
            if devices % own.team == 0:
                joined = own.so_many(devices // own.team)
                yield shape.with_stages(index, 2, Shape((shape.cuts[index + 1],), (joined,)))


def stages_divided(
    shape: Shape,
    which: Iterable[int],
    seconds: Callable[[Replicas], Sequence[float]],
    idle: int,
    shards: Sequence[Shard],
) -> Iterator[Shape]:
    """Yield the shape with a stage of ``which`` divided in two, about evenly, that shard as it does, or both otherwise.

    ``seconds`` returns running sums of layers' seconds on a replica. A team that runs a stage alone is divided, too.

    >>> divided = stages_divided(Shape((2,), (Replicas(4),)), (0,), lambda _: (0.0, 1.0, 2.0), 0, ("none", "optimizer"))
    >>> [[(each.width, each.shard) for each in shape.replicas] for shape in divided][2:4]
    [[(2, 'none'), (2, 'none')], [(2, 'optimizer'), (2, 'optimizer')]]
    """
    for index in which:
        first, stop, how = (0, *shape.cuts)[index], shape.cuts[index], shape.replicas[index]
        own = how.width + (how.width == 1 and idle >= how.team)
        if own == 1 and how.team > 1:
            how, own = how._replace(width=2, team=how.team // 2, sliced=how.sliced and how.team > 2), 2
        sums = seconds(how)
        for width in sorted({1, own // 2, own - 1} - {0, own}):
            aim = sums[first] + (sums[stop] - sums[first]) * width / own
            middle = bisect_left(sums, aim, first + 1, max(first + 1, stop - 1))
            ways = (how._replace(shard=each) for each in (how.shard, *shards_of(how.division, shards)))
            for replicas in dict.fromkeys(tuple(map(each.so_many, (width, own - width))) for each in ways):
                for cut in range(max(first + 1, middle - 1), min(stop, middle + 1)):
                    yield shape.with_stages(index, 1, Shape((cut, stop), replicas))


def replicas_changed(shape: Shape, ways: Sequence[Replicas], which: Iterable[int]) -> Iterator[Shape]:
    """Yield the shape with all replicated stages run in another way, and with each of ``which``."""
    wide = [index for index, width in enumerate(shape.widths) if width > 1]
    for how in ways:
        for some in (wide, *([index] for index in which if index in wide)):
            own = enumerate(shape.replicas)
            changed = tuple(how.run_by(each).so_many(each.width) if index in some else each for index, each in own)
            if changed != shape.replicas:
                yield shape._replace(replicas=changed)


def teams_changed(shape: Shape, teams: Sequence[Replicas], which: Iterable[int]) -> Iterator[Shape]:
    """Yield the shape with all stages run by other teams on their devices, and with each of ``which``.

    >>> shape = Shape((2, 4), (Replicas(2), Replicas(1)))
    >>> [each.replicas[0] for each in teams_changed(shape, (Replicas(), Replicas(team=2)), (0,))]
    [Replicas(width=1, division='split', shard='none', team=2, sliced=False)]
    """
    every = range(len(shape.replicas))
    for team in teams:
        for some in (every, *([index] for index in which)):
            if all(shape.replicas[index].devices % team.team == 0 for index in some):
                changed = tuple(
                    each.run_by(team).so_many(each.devices // team.team) if index in some else each
                    for index, each in enumerate(shape.replicas)
                )
                if changed != shape.replicas:
                    yield shape._replace(replicas=changed)


FEW = 4
"""Groups of which one may be wide to begin with."""
HALVINGS = 40
"""Of the seconds of the slowest stage; what is left of an error is rounding."""


def place_shape(
    costs: CostModel, family: Family, shape: Shape, order: Sequence[int], shard: Shard = "none"
) -> tuple[CandidateStage, ...]:
    """Return a shape's stages, all in flight; groups take devices in an order, split micro-batches, and may shard."""
    stages = place(family, shape.cuts, shape.sharded(shard), order, divisible=costs.divisible)
    return tuple(by_speed(costs, stage, family) for stage in stages)


def standing_shape(
    costs: CostModel, family: Family, shape: Shape, order: Sequence[int], shard: Shard = "none"
) -> tuple[CandidateStage, ...] | None:
    """Return the same; None where some of the devices may not be a stage's."""
    return place_shape(costs, family, shape, order, shard) if stands(costs, shape, order) else None


def stands(costs: CostModel, shape: Shape, order: Sequence[int]) -> bool:
    """Whether the devices of every group, which take them in an order, may be a stage's."""
    groups = zip(shape.replicas, devices_of(shape.devices, order), strict=True)
    return all(may_stand(costs, group, replicas.team) for replicas, group in groups)


def widths_of(devices: int, groups: int, most: int, *, all_used: bool) -> list[tuple[int, ...]]:
    """Return widths of groups to begin with, none above ``most``: equal ones, of one device, of few groups one wide.

    With ``all_used`` no device is idle, as far as ``most`` lets them be used.

    >>> widths_of(7, 3, 7, all_used=False)
    [(2, 2, 2), (1, 1, 1), (5, 1, 1), (1, 5, 1), (1, 1, 5)]
    >>> widths_of(7, 2, 3, all_used=True)
    [(3, 3), (1, 1), (3, 1), (1, 3)]
    """
    each, more = divmod(devices, groups)
    found = [tuple(min(most, each + (all_used and at < more)) for at in range(groups)), (1,) * groups]
    wide = min(most, devices - groups + 1)
    found.extend((*(1,) * at, wide, *(1,) * (groups - 1 - at)) for at in range(groups if groups <= FEW else 0))
    used = [widths for widths in found if not all_used or sum(widths) == devices]
    return list(dict.fromkeys(used or found))


def balanced_shape(
    costs: CostModel,
    family: Family,
    replicas: Sequence[Replicas],
    chunks: int,
    edges: Sequence[int],
    kinds: Sequence[int] = (),
) -> Shape:
    """Return the shape of groups of some replicas whose slowest stage is about as quick as can be.

    ``edges`` are where stages may end, 0 and the last included; there is one for every stage. ``kinds`` are the kinds
    of the groups' devices; by default all are of the first.
    """
    count, layout = len(replicas) * chunks, layout_of(family.schedule)
    every = [*zip(replicas, kinds or (0,) * len(replicas), strict=True)]
    sums = {
        (each, kind): running_s(costs, max(costs.shares(family.micro_batch_size, each)), each, kind)[edges].tolist()
        for each, kind in set(every)
    }
    own = [sums[every[group_of(layout, index, len(replicas))]] for index in range(count)]
    low, high = 0.0, max(each[-1] for each in own)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(own, middle) is None else (low, middle)
    found = _within(own, high)
    assert found is not None
    return Shape(tuple(edges[at] for at in found), tuple(replicas))


def running_s(costs: CostModel, rows: float, replicas: Replicas = SINGLE, kind: int = 0) -> npt.NDArray[np.float64]:
    """Return the seconds of a forward and a backward of the layers before every one, on a replica such as these."""
    forward, backward = costs.seconds.running(rows, 1.0, costs.form(kind, replicas))
    found: npt.NDArray[np.float64] = np.array(forward) + np.array(backward)
    return found


def _within(own: Sequence[Sequence[float]], most_s: float) -> list[int] | None:
    """Return the ends of stages that take no longer than some seconds, as long ones as can be; None: there are none."""
    last, at, found = len(own[0]) - 1, 0, []
    for behind, sums in zip(reversed(range(len(own))), own, strict=True):
        stop = min(bisect_right(sums, sums[at] + most_s) - 1, last - behind)
        if stop <= at:
            return None
        found.append(stop)
        at = stop
    return found if at == last else None
