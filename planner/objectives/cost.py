"""Cost: the cheapest training, by the prices of the devices that are used.

A step costs its seconds times the prices of its devices. Every set of devices is a search of its own, in the order of
the least that it can cost; a set is searched only for steps that are cheaper than what is known already.

What a set may cost at least follows from the least seconds per step on so many devices of each kind, without what
communication takes. With f and t the forward, and forward and backward, of a micro-batch on the first stage, M t its
work of a step, a its update, and U and V the least that the stages behind it take until their last backward, and until
their update,

    U = min over first stages of  max(M t, t + U)
    V = min over first stages of  max(max(M t, t + U) + a, f + V)

over all first stages that fit a device with one micro-batch in flight. Of a stage of several kinds, f and t are those
of whichever replica takes least, and M t is that of the slowest, by the rates of all. Every plan's bound has these
terms, and more (:mod:`autopar.planner.bounds`, also for boundaries that no gradient, or nothing, crosses); one table
holds all numbers of devices, so that it takes little beside a search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import inf, nextafter, prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.errors import FileError, InfeasibleError, UsageError
from autopar.formats.plan import Plan
from autopar.formats.prediction import Alternative, Price
from autopar.options.plan import PlanOptions, admissible_options
from autopar.ownership import Replicas
from autopar.planner.assemble import assemble
from autopar.planner.bounds import ROUNDING, layers_work_s
from autopar.planner.candidate import Candidate, Family, has_chunks, replicas_of
from autopar.planner.constraints import Constraints, Question, crossed_limit, runnable
from autopar.planner.costs.activations import Numbers, between
from autopar.planner.costs.memory import PeakTerms, peak_of
from autopar.planner.costs.model import CostModel
from autopar.planner.infeasible import any_plan_fits, infeasible, nothing_fits
from autopar.planner.order import canonical
from autopar.planner.pool import Pool, Taken, groups_of, in_order
from autopar.planner.search.best_first import MOST_MIXED, search
from autopar.planner.search.configs import mixtures_of
from autopar.planner.search.judge import Best, Reference, SimulatedPlan
from autopar.planner.search.other_schedules import tried_beside
from autopar.planner.simulator.simulate import Simulator


class _WidthTimes(NamedTuple):
    """All stages on some devices of a kind, ``[first, stop]``; infinite where they are none or do not fit."""

    forward_s: Numbers
    both_s: Numbers
    work_s: Numbers
    update_s: Numbers


def least_steps_s(costs: CostModel, family: Family, options: PlanOptions, pool: Pool) -> Numbers:
    """Return a bound of the steps on all devices that each state of the pool leaves, less rounding."""
    layers = costs.layer_count
    forth, back = _crossing_masks(costs)
    backward, done, step = (np.full((pool.states, layers + 1), np.inf) for _ in range(3))
    backward[:, layers] = done[:, layers] = step[:, layers] = 0.0
    ways = list(_ways(costs, family, options))
    for state in reversed(range(pool.empty)):
        for taken, way in ways:
            if all(count <= pool.kind_devices_left(state, kind) for kind, count in taken):
                after = pool.take(state, taken)
                ended = np.maximum(way.work_s, np.where(back, way.both_s + backward[after], 0.0))
                whole = np.maximum(ended + way.update_s, np.where(forth, way.forward_s + done[after], 0.0))
                for table, found in ((backward, ended), (done, whole), (step, np.maximum(whole, step[after]))):
                    np.minimum(table[state, :layers], found.min(axis=1), out=table[state, :layers])
    return np.asarray(costs.profile.step_overhead_s + step[:, 0] * (1 - ROUNDING))


def _crossing_masks(costs: CostModel) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return whether layer ``stop`` reads of layers ``first:stop``, and whether a gradient returns."""
    forth, back = (np.zeros((costs.layer_count, costs.layer_count + 1), dtype=np.bool_) for _ in range(2))
    for tensor in costs.flows.crossing:
        for consumer in tensor.consumers:
            forth[: tensor.producer + 1, consumer] = True
            back[: tensor.producer + 1, consumer] |= tensor.gradient
    return forth, back


def _ways(costs: CostModel, family: Family, options: PlanOptions) -> Iterator[tuple[Taken, _WidthTimes]]:
    """Yield the devices that stages may have, by kind, and the least times of those that split or take turns."""
    for kind, team in product(sorted(set(costs.kind_of)), costs.teams):
        for width in range(1, costs.kind_of.count(kind) // team.team + 1):
            every = (each.run_by(team) for each in replicas_of(family, width, divisible=costs.divisible))
            own = [_width_times(costs, family, options, kind, replicas) for replicas in every]
            if own:
                yield ((kind, width * team.team),), _least_of(own)
    if costs.mixes:
        yield from _mixed_ways(costs, family, options)


def _least_of(every: Sequence[_WidthTimes]) -> _WidthTimes:
    return _WidthTimes(*map(np.minimum.reduce, zip(*every, strict=True)))


def _mixed_ways(costs: CostModel, family: Family, options: PlanOptions) -> Iterator[tuple[Taken, _WidthTimes]]:
    """Yield the same of stages of several kinds: the least way over any replica, and what the slowest one computes.

    Where a step's rows take w seconds on one device of a kind, the slowest of n devices of every kind takes
    1 / sum(n / w) at least.
    """
    kinds = sorted(set(costs.kind_of))
    sums = {kind: np.pad(layers_work_s(costs, family, kind).cumsum(axis=1), ((0, 0), (1, 0))) for kind in kinds}
    work_s = {kind: np.stack([between(queue)[:-1] for queue in queues]) for kind, queues in sums.items()}
    for team in costs.teams:
        alone = {kind: _row_times(costs, family, options, kind, team) for kind in kinds}
        counts = {kind: costs.kind_of.count(kind) // team.team for kind in kinds}
        for mixture in mixtures_of(counts, family.micro_batch_size, MOST_MIXED):
            with np.errstate(divide="ignore"):
                each = (team.team * n / work_s[kind] for kind, n in zip(mixture.kinds, mixture.most, strict=True))
                slowest_s = (1 / np.add.reduce([*each])).max(axis=0)
            own = [alone[kind] for kind in mixture.kinds]
            fits = np.logical_and.reduce([np.isfinite(each.work_s) for each in own])
            least = _least_of(own)._replace(work_s=slowest_s)
            yield mixture.taken(team.team), _WidthTimes(*(np.where(fits, each, np.inf) for each in least))


def _row_times(costs: CostModel, family: Family, options: PlanOptions, kind: int, team: Replicas) -> _WidthTimes:
    """Return the least times of one of several replicas, of however many rows; infinite where not even one row fits."""
    form = costs.form(kind, team)
    rows = costs.measured_rows(form, family.micro_batch_size)
    every = [map(np.array, costs.seconds.by_queue(each, 1.0, form, split=False)[0]) for each in rows]
    passes = [(between(there), between(there) + between(back)) for there, back in every]
    # As many replicas as there are rows hold least.
    least = _width_times(costs, family, options, kind, Replicas(family.micro_batch_size).run_by(team))
    forward_s, both_s = (np.minimum.reduce(each)[:-1] for each in zip(*passes, strict=True))
    return least._replace(forward_s=forward_s, both_s=both_s)


def _width_times(costs: CostModel, family: Family, options: PlanOptions, kind: int, replicas: Replicas) -> _WidthTimes:
    """Return the stages of some replicas, infinite where none fits the largest device of the kind in some way."""
    turns, width, form = replicas.most(family.micro_batches), replicas.width, costs.form(kind, replicas)
    shares = costs.shares(family.micro_batch_size, replicas)
    adding = costs.adding(turns, width)
    forward, both = [], []
    for rows in sorted(set(shares)):
        every = costs.seconds.every(rows, adding, form)
        forward.append(every[0])
        both.append(every[0] + every[1])
    levels = costs.recompute_levels(family.micro_batch_size, form)
    ends = (levels[0],) if options.recompute == "none" else (levels[0], levels[-1])
    warmup = turns if family.schedule == "gpipe" else 1
    shards = dict.fromkeys(("none", *options.shards))
    held = [PeakTerms(min(shares), warmup, turns, width, shard=shard, lanes=replicas.lanes) for shard in shards]
    limit = max(each for each, own in zip(costs.limits_bytes, costs.kind_of, strict=True) if own == kind)
    ways = ((one, costs.memory[form].by_stop(one.rows, level, one.sharded)) for one in held for level in set(ends))
    least = np.minimum.reduce([np.asarray(peak_of(parts, one)) for one, parts in ways])
    fits = np.where(least <= limit, 0.0, np.inf)
    update = between(np.array(costs.layers[form].update_sums))[:-1] / (width if options.shard != "none" else 1)
    forward_s, both_s, work_s = np.minimum.reduce(forward), np.minimum.reduce(both), turns * np.maximum.reduce(both)
    return _WidthTimes(*(each + fits for each in (forward_s, both_s, work_s, update)))


MOST_SETS = 100_000
MOST_BY_NODES = 2_000
"""Sets up to which it matters in which nodes the devices are."""
SEARCHED = 4
"""Times as many devices as there are: those of all sets that are searched, where a gap is allowed. The bounds of the
others hold for what they might cost."""
_HOUR_S = 3600.0


class _Set(NamedTuple):
    """Devices that are all used."""

    least: float
    """No step on them costs less."""
    devices: tuple[int, ...]
    price: float
    """Per second."""


class CheapestPlan(NamedTuple):
    """The cheapest candidate that was found, and what is proved."""

    simulated_plan: SimulatedPlan
    cost: float
    """Of a step."""
    lower_bound: float
    """No step of any plan within the deadline, on any of the devices, costs less."""
    by_count: dict[int, SimulatedPlan]
    """Cheapest of those sets of so many devices that were cheaper than what was known before."""


class CheapestSimulated(Simulator):
    """Simulates, and keeps the cheapest candidate that it simulated of those that the question admits."""

    def __init__(self, question: Question) -> None:
        """Prepare to judge by the question's prices of layers and devices.

        Raises:
            FileError: as :func:`prices_of`.
        """
        super().__init__(question.costs, progress=question.simulator.progress)
        self._question, self._prices = question, prices_of(question.costs)
        self._cap_s = _cap_s(question.options)
        self._met: list[SimulatedPlan] = []
        """Ever cheaper ones; the same list where other searches of the same layers, devices and links are priced."""

    @property
    def found(self) -> SimulatedPlan | None:
        """The cheapest, if any was admitted."""
        return self._met[-1] if self._met else None

    def _cost(self, met: SimulatedPlan) -> float:
        return met.step_s * _price(self._prices, met.candidate)

    def step_s(self, candidate: Candidate, below_s: float = inf) -> float:
        """Return a candidate's seconds per step, as any simulator does."""
        step_s = super().step_s(candidate, below_s)
        known = inf if self.found is None else self._cost(self.found)
        met = SimulatedPlan(step_s, candidate)
        # What is not below a limit may have been simulated as if it were alone.
        if self._cost(met) < known and self._admits(candidate):
            met = met if below_s == inf else SimulatedPlan(super().step_s(candidate), candidate)
            if met.step_s < self._cap_s and self._cost(met) < known:
                self._met.append(met)
        return step_s

    def _admits(self, candidate: Candidate) -> bool:
        question, own = self._question, self._question.costs
        alike = self.costs.layers is own.layers and self.costs.links is own.links
        if not alike or max(own.shortfalls(candidate)) > 0:
            return False
        kept = crossed_limit(own, candidate.stages) is None
        return kept and question.excluding_option(candidate) is None


def cheapest_plan(
    question: Question,
    met: CheapestSimulated,
    compared: Sequence[Reference],
    fastest: SimulatedPlan | None,
    least_s: float,
) -> Plan:
    """Return the plan that trains most samples per unit of price, with a lower bound of what a step costs.

    With a deadline, of those plans whose steps take no longer. The search starts from the cheapest plan that ``met``
    while the ``fastest`` one was looked for, no step being shorter than ``least_s``, and lists those
    ``compared`` with it.

    Raises:
        FileError: the cluster does not price a device; names it.
        UsageError: there are too many sets of devices.
        InfeasibleError: nothing fits the memory, or no step is within the deadline.
    """
    costs, families, options = question.costs, question.families, question.options
    prices = prices_of(costs)
    best = cheapest(costs, families, options, met.found, least_s)
    if best is None:
        raise _unmet(costs, families, options, fastest)
    candidate = best.simulated_plan.candidate
    price = _price(prices, candidate)
    sets = (
        Reference(f"cheapest found on {count} device{'s' if count > 1 else ''}", found.candidate, found.step_s)
        for count, found in sorted(best.by_count.items())
    )
    rows = [_row(question, prices, each) for each in (*compared, *sets)]
    best = best._replace(lower_bound=min(best.lower_bound, _bound_beside(costs, options, candidate, prices)))
    made = assemble(costs, candidate, options, best.lower_bound / price, rows, _notes(costs, best, options))
    return _with_price(costs, made, price, best.lower_bound, options.deadline_s)


def _with_price(costs: CostModel, made: Plan, price: float, lower_bound: float, deadline_s: float | None) -> Plan:
    """Return a plan that says what its step costs, at the price per second of its devices."""
    cost = made.predicted.step_s * price
    priced = Price(
        per_hour=price * _HOUR_S,
        per_step=cost,
        per_million_samples=cost / costs.batch * 1e6,
        lower_bound_per_step=min(lower_bound, cost),
        deadline_s=deadline_s,
    )
    predicted = made.predicted.model_copy(update={"price": priced})
    return made.model_copy(update={"objective": "cost", "predicted": predicted})


def prices_of(costs: CostModel) -> list[float]:
    """Return every device's price per hour.

    Raises:
        FileError: a device has none, or it is 0.
    """
    found = []
    for index, device in enumerate(costs.devices):
        if not device.price_per_hour:
            said = "0" if device.price_per_hour == 0 else "no price"
            raise FileError(
                f"$.devices[{costs.listed[index]}].price_per_hour: `objective='cost'` needs a price above 0 of every "
                f"device, and the cluster has {said} of this one ({device.type}); add it, or plan for the least step "
                "time"
            )
        found.append(device.price_per_hour)
    return found


def _price(prices: Sequence[float], candidate: Candidate) -> float:
    """Return the price per second of the devices that a candidate uses."""
    return sum(prices[device] for device in candidate.used_devices) / _HOUR_S


def _row(question: Question, prices: Sequence[float], reference: Reference) -> Alternative:
    """Return a plan as the plan file lists it, with what its step costs, and the option that excludes it."""
    row, found = reference.record(question.costs), reference.simulated_plan
    if found is None:
        return row
    excluded = question.excluding_option(found.candidate)
    return row.model_copy(
        update={"price_per_step": found.step_s * _price(prices, found.candidate), "excluded": excluded}
    )


def cheapest(
    costs: CostModel,
    families: Sequence[Family],
    options: PlanOptions,
    known: SimulatedPlan | None = None,
    least_s: float = 0.0,
) -> CheapestPlan | None:
    """Return the cheapest candidate, within the deadline if there is one; none if nothing fits or is so quick.

    Only what is cheaper than a ``known`` one is looked for; no step on any of the devices takes less than ``least_s``.
    """
    prices = prices_of(costs)
    cost = lower = inf
    cap_s, best = _cap_s(options), known
    by_count: dict[int, SimulatedPlan] = {}
    if best is not None:
        cost = best.step_s * _price(prices, best.candidate)
        by_count[len(set(best.candidate.devices))] = best
    searched = 0
    for each in _sets(costs, families, options, least_s):
        if each.least > each.price * cap_s:
            continue
        enough = options.gap > 0 and searched >= SEARCHED * len(costs.devices) and best is not None
        if cost <= (1 + options.gap) * each.least or enough:
            lower = min(lower, each.least)
            break
        # What is no cheaper than the gap asks for would not be worth its search.
        below_s = min(cap_s, cost / each.price / (1 + options.gap))
        bound_s, found = _search_set(costs, families, options, each.devices, below_s)
        searched += len(each.devices)
        # Where none on these devices is within the deadline, they do not count.
        lower = lower if bound_s >= cap_s else min(lower, each.price * bound_s)
        if found is not None:
            best, cost, by_count[len(each.devices)] = found, each.price * found.step_s, found
    return None if best is None else CheapestPlan(best, cost, min(lower, cost), by_count)


def _search_set(
    costs: CostModel, families: Sequence[Family], options: PlanOptions, devices: Sequence[int], below_s: float
) -> tuple[float, SimulatedPlan | None]:
    """Return what no step on all of some devices is below, and the fastest plan on them, if one is below a limit."""
    own, asked = Best(below_s), replace(options, gpus=len(devices), use_all=True)
    bound_s = search(Simulator(costs.among(devices)), families, asked, own).lower_bound_s
    if own.fastest is None:
        return bound_s, None
    step_s, candidate = own.fastest
    stages = (stage._replace(devices=tuple(devices[at] for at in stage.devices)) for stage in candidate.stages)
    return bound_s, SimulatedPlan(step_s, candidate._replace(stages=tuple(stages)))


def _cap_s(options: PlanOptions) -> float:
    """Return what a step must be below: plans that take as long as the deadline are within it."""
    return inf if options.deadline_s is None else nextafter(options.deadline_s, inf)


def _quickest(costs: CostModel, families: Sequence[Family], options: PlanOptions) -> SimulatedPlan | None:
    """Return the fastest candidate that the search finds, whatever it costs; none if nothing fits."""
    best = Best()
    search(Simulator(costs), families, options, best)
    return best.fastest


def _unmet(
    costs: CostModel, families: Sequence[Family], options: PlanOptions, found: SimulatedPlan | None
) -> InfeasibleError:
    """Return the error that names the fastest step, which was found, where it misses the deadline; else what lacks."""
    if found is None or options.deadline_s is None:
        return infeasible(costs, families, options, None, partial(_fits, costs))
    return nothing_fits(
        f"no plan of at most {len(costs.devices)} device{'s' if len(costs.devices) > 1 else ''} has a step within "
        f"`deadline_s={options.deadline_s:g}`: the fastest step that was found takes {found.step_s:.6g} s "
        f"({costs.text(found.candidate)} with {found.candidate.schedule} and {found.candidate.micro_batches} "
        "micro-batches)",
        [f"with `deadline_s={_rounded_up(found.step_s)}`"],
    )


def _rounded_up(seconds: float) -> str:
    """Return seconds as they can be typed, in six digits and not less.

    >>> _rounded_up(0.1234561), _rounded_up(2.0)
    ('0.123457', '2')
    """
    text = f"{seconds:.6g}"
    return text if float(text) >= seconds else f"{seconds * (1 + 1e-5):.6g}"


def _fits(costs: CostModel, options: PlanOptions) -> bool:
    """Whether a plan fits with other options, and meets their deadline."""
    if not any_plan_fits(costs, options):
        return False
    options = admissible_options(options, costs.profile)
    other = canonical(CostModel(costs.profile, costs.cluster, options))
    # Refused where there are too many sets.
    next(_device_sets(other, prices_of(other), use_all=options.use_all), None)
    if options.deadline_s is None:
        return True
    found = _quickest(other, runnable(other, options), options)
    return found is not None and found.step_s <= options.deadline_s


def _sets(costs: CostModel, families: Sequence[Family], options: PlanOptions, least_s: float) -> list[_Set]:
    """Return sets of devices, first those that may be cheapest."""
    prices, constraints = prices_of(costs), Constraints.of(costs, options)
    kinds, pool = sorted(set(costs.kind_of)), in_order(costs.kind_of)
    least_team = min(each.team for each in costs.teams)
    bounds = [
        ({kind: layers_work_s(costs, family, kind) for kind in kinds}, least_steps_s(costs, family, options, pool))
        for family in families
    ]
    found = []
    for used in _device_sets(costs, prices, use_all=options.use_all):
        kind_of = [costs.kind_of[device] for device in used]
        if costs.most_in_team(used) < least_team:
            continue
        if len(used) >= options.min_stages and constraints.possible_on(kind_of):
            own = sorted({(costs.kind_of[device], prices[device]) for device in used})
            price = sum(prices[device] for device in used) / _HOUR_S
            taken = ((kind, pool.kind_devices_left(0, kind) - kind_of.count(kind)) for kind in pool.kinds)
            state, idle_s = pool.take(0, tuple(taken)), costs.profile.step_overhead_s
            least = min(
                max(steps_s[state] * price, idle_s * price + _least_busy(work_s, own, len(used), price))
                for work_s, steps_s in bounds
            )
            least = max(least, least_s * price)
            if least < inf:
                found.append(_Set(least, used, price))
    return sorted(found, key=lambda each: (each.least, len(each.devices), each.devices))


def _device_sets(costs: CostModel, prices: Sequence[float], *, use_all: bool) -> Iterator[tuple[int, ...]]:
    """Yield sets of devices: of every node so many of a kind and price; of many nodes, of the cluster the first ones.

    Raises:
        UsageError: there are too many.
    """
    nodes: dict[tuple[int, float, int], list[int]] = {}
    whole: dict[tuple[int, float], list[int]] = {}
    for kind, groups in sorted(groups_of(costs).items()):
        for number, group in enumerate(groups):
            for device in group.devices:
                nodes.setdefault((kind, prices[device], number), []).append(device)
                whole.setdefault((kind, prices[device]), []).append(device)
    chosen = list(nodes.values())
    if prod(len(devices) + 1 for devices in chosen) > MOST_BY_NODES:
        chosen = [sorted(devices) for devices in whole.values()]
    counts = [[len(own)] if use_all else range(len(own) + 1) for own in chosen]
    if prod(map(len, counts)) > MOST_SETS:
        raise UsageError(
            f"`objective='cost'`: more than {MOST_SETS} sets of {len(chosen)} kinds and prices of devices; "
            "narrow it with fewer `gpus`"
        )
    for taken in product(*counts):
        yield tuple(sorted(device for own, count in zip(chosen, taken, strict=True) for device in own[:count]))


def _least_busy(work: dict[int, Numbers], own: Sequence[tuple[int, float]], count: int, price: float) -> float:
    """Return what a family's step costs at least: all devices last as long, and each layer is paid for somewhere."""
    quickest = np.minimum.reduce([work[kind] for kind, _ in own])
    busy = [float(queue.sum()) / count * price for queue in quickest]
    return max(*busy, _least_paid(work, own))


def _least_paid(work: dict[int, Numbers], own: Sequence[tuple[int, float]]) -> float:
    """Return what all layers cost at least where each is on the kind of device, with its price, that suits it best."""
    paid = np.minimum.reduce([work[kind] * per_hour / _HOUR_S for kind, per_hour in own])
    return max(float(queue.sum()) for queue in paid)


def _bound_beside(costs: CostModel, options: PlanOptions, chosen: Candidate, prices: Sequence[float]) -> float:
    """Return what no plan costs less of schedules that no table bounds and that were tried; infinite where none were.

    Those with several stages a device count where such a plan is chosen.
    """
    if options.schedule != "auto" or costs.divisible:
        return inf
    own = sorted(set(zip(costs.kind_of, prices, strict=True)))
    schedules = [each for each in tried_beside(costs) if has_chunks(chosen.schedule) or not has_chunks(each)]
    every = (family for each in schedules for family in runnable(costs, replace(options, schedule=each, chunks=None)))
    works = ({kind: layers_work_s(costs, family, kind) for kind in set(costs.kind_of)} for family in every)
    return min((_least_paid(work, own) for work in works), default=inf)


def _notes(costs: CostModel, best: CheapestPlan, options: PlanOptions) -> list[str]:
    notes = []
    if options.deadline_s is not None:
        notes.append(
            f"no step was to take longer than {options.deadline_s:g} s (`deadline_s`); those that do are listed too"
        )
    idle = len(costs.devices) - len(set(best.simulated_plan.candidate.devices))
    if idle:
        notes.append(f"{idle} of {len(costs.devices)} devices stay idle, and are not paid for (`use_all` forbids this)")
    if best.cost > (1 + options.gap) * best.lower_bound * (1 + 1e-9):
        notes.append(
            f"the search ended {best.cost / best.lower_bound - 1:.1%} above the least that a step may cost; "
            "`gap=0` searches on"
        )
    return notes
