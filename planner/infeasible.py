"""Infeasible: the error when nothing fits, from the plan that comes closest, and options with which one fits.

The closest plan's worst stage exceeds its memory least, by dynamic programming from the last stage on. Remedies are
tried: each is an option changed alone, the least change that helps first, then some of them together.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, islice, product
from math import ceil, prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.errors import InfeasibleError, UsageError
from autopar.options.plan import PLANNED, PlanOptions, admissible_options
from autopar.ownership import SHARDS, Replicas, Shard, shards_of
from autopar.planner.candidate import Candidate, CandidateStage, Family, Lead, divisors, families, replicas_of, within
from autopar.planner.constraints import Constraints, crossed_limit
from autopar.planner.costs import memoize
from autopar.planner.costs.activations import Numbers, Sharded
from autopar.planner.costs.memory import Parts, PeakTerms, peak_of
from autopar.planner.costs.model import UNLIMITED_BYTES, CostModel
from autopar.planner.order import canonical
from autopar.planner.placement import stage_place
from autopar.planner.pool import Taken, in_order
from autopar.planner.search.configs import mixtures_of
from autopar.planner.shares import by_speed
from autopar.policies import POLICIES

MOST_EDGES = 64
FEW_EDGES = 24
"""Up to so many layers all families and more levels of recomputation are looked at."""
MOST_WIDTHS = 32
MOST_MIXED = 4
"""Layers, and as many devices, up to which stages of several kinds are looked at."""
MOST_LEVELS = 4
"""Of recomputation, besides none: what one micro-batch holds may be least between none and all."""


class _Group(NamedTuple):
    """The devices that a stage takes, and its replicas on them, whatever they shard."""

    taken: Taken
    replicas: Replicas
    form: int
    """Of each; of several kinds, of the first."""

    @property
    def is_mixed(self) -> bool:
        """Whether it has devices of several kinds."""
        return len(self.taken) > 1

    @property
    def lead(self) -> int:
        """How many more micro-batches the stage has in flight than the one behind it."""
        return self.replicas.period - 1


class ShortfallTables:
    """The least shortfalls of one family's plans, with least in flight.

    Exact up to 24 layers, widths of 32 and 4 layers that are recomputed; of stages of several kinds, up to 4 layers and
    devices, and of more, none has several. Of more, recomputation is none or all, widths
    double, and of more than 64 layers these are taken in groups. Replicas take turns in the first stage only: behind
    it, all stages before would need as much in flight, which takes more, except where those in turns divide much state.
    The stage behind such a first one has gradients on their way to all of its replicas. What a stage sends to several
    later stages is counted once, so that a plan may lack more than the tables say: :func:`closest` asks the cost model.
    """

    def __init__(self, costs: CostModel, family: Family, options: PlanOptions) -> None:
        self.costs, self.family, self.options = costs, family, options
        self.pool = in_order(costs.kind_of)
        self.constraints = Constraints.of(costs, options)
        self.edges = self.constraints.edges(MOST_EDGES)
        self.exact = self.constraints.most_stages < min(costs.layer_count, len(costs.devices))
        """Whether stages are limited in number: then suffixes have exactly so many, else at least."""

    def candidate(self) -> Candidate | None:
        """Return the candidate that lacks least; none where there is none."""
        fewest = self.constraints.least_stages
        counts = self.constraints.most_stages if self.exact else fewest
        least = np.full((counts, self.pool.states, len(self.edges)), np.inf)
        for state in reversed(range(self.pool.empty)):
            for group in self._groups(state):
                short, after = self._short(state, group), self.pool.take(state, group.taken)
                for count in range(counts):
                    worst = np.maximum(short, self._ends(least, count, after, group.lead)).min(axis=1)
                    np.minimum(least[count, state, :-1], worst, out=least[count, state, :-1])
        if counts < fewest or not least[fewest - 1 :, 0, 0].min() < np.inf:
            return None
        placed = []
        state = first = lead = 0
        count = fewest - 1 + int(least[fewest - 1 :, 0, 0].argmin())
        while first < len(self.edges) - 1:
            group, stop = self._best(least, count, state, first, lead)
            placed.append(self._candidate_stage(state, first, stop, group, lead))
            state, first, count, lead = self.pool.take(state, group.taken), stop, max(0, count - 1), group.lead
        return Candidate(*self.family, tuple(placed))

    def layer_shortfalls(self) -> Numbers:
        """Return by how much every layer exceeds the device that suits it best, as a stage of its own."""
        return np.asarray(np.minimum.reduce([self._short(0, each).diagonal(1) for each in self._groups(0)]))

    def _groups(self, state: int) -> Iterator[_Group]:
        """Yield what a stage may run on in a state, and how; in turns only where it is the first."""
        left = {kind: self.pool.kind_devices_left(state, kind) for kind in self.pool.kinds}
        for kind, team in product(left, self.costs.teams):
            width = 1
            while width * team.team <= left[kind]:
                for replicas in replicas_of(self.family, width, divisible=self.costs.divisible):
                    if replicas.period == 1 or not state:
                        yield from self._group(state, ((kind, width * team.team),), replicas.run_by(team))
                width += 1 if width < MOST_WIDTHS else width
        mixes = self.costs.mixes and max(self.costs.layer_count, len(self.costs.devices)) <= MOST_MIXED
        for team in self.costs.teams if mixes else ():
            counts = {kind: count // team.team for kind, count in left.items() if count >= team.team}
            for mixture in mixtures_of(counts, self.family.micro_batch_size, None):
                replicas = Replicas(sum(mixture.fewest)).run_by(team)
                yield from self._group(state, mixture.taken(team.team), replicas)

    def _group(self, state: int, taken: Taken, replicas: Replicas) -> Iterator[_Group]:
        """Yield the group of some replicas, unless a team would stand where it may not."""
        team, devices = replicas.team, self.pool.devices(state, taken)
        if team == 1 or stage_place(self.costs, devices, team) is not None:
            yield _Group(taken, replicas, self.costs.form(taken[0][0], replicas))

    def _ends(self, least: Numbers, count: int, after: int, lead: int) -> Numbers:
        """Return what the stages behind lack, by where they begin, if ``count`` follow; minus infinity for none."""
        if self.exact and count == 0:
            ends = np.full(len(self.edges), np.inf)
        elif lead and self.family.schedule != "gpipe":
            ends = self._ends_with_lead(least, max(0, count - 1), after, lead)
        else:
            ends = least[max(0, count - 1), after].copy()
        done = count == 0 and (not self.options.use_all or after == self.pool.empty)
        ends[-1] = -np.inf if done else np.inf
        return ends

    def _ends_with_lead(self, least: Numbers, count: int, state: int, lead: int) -> Numbers:
        """Return what stages lack, by where they begin, of which the first has so many gradients more on their way."""
        found = np.full(len(self.edges), np.inf)
        for group in self._groups(state):
            ends = self._ends(least, count, self.pool.take(state, group.taken), 0)
            worst = np.maximum(self._short(state, group, lead), ends).min(axis=1)
            np.minimum(found[:-1], worst, out=found[:-1])
        return found

    def _best(self, least: Numbers, count: int, state: int, first: int, lead: int) -> tuple[_Group, int]:
        """Return the first stage of the best suffix, and where it ends; the narrowest and shortest of equals."""

        def worst(group: _Group) -> Numbers:
            ends = self._ends(least, count, self.pool.take(state, group.taken), group.lead)
            return np.asarray(np.maximum(self._short(state, group, lead)[first], ends))

        best = min(self._groups(state), key=lambda each: worst(each).min())
        return best, int(worst(best).argmin())

    def _short(self, state: int, group: _Group, lead: int = 0) -> Numbers:
        devices = self.pool.devices(state, group.taken)
        if group.is_mixed:
            return self._mixed_shorts(group, lead, devices)[0]
        return self._least_peaks(group, lead)[0] - self.costs.limit_bytes(devices)

    @memoize
    def _mixed_shorts(
        self, group: _Group, lead: int, devices: tuple[int, ...]
    ) -> tuple[Numbers, dict[tuple[int, int], CandidateStage]]:
        """Return the least shortfalls of all stages over all ways to run them, and the stages that lack these."""
        found, best = np.full((len(self.edges) - 1, len(self.edges)), np.inf), dict[tuple[int, int], CandidateStage]()
        allowed = self._mask(group)
        for (first, begin), (stop, end) in combinations(enumerate(self.edges), 2):
            for shard, recompute in self._ways(group) if allowed[first, stop] else ():
                how, again = group.replicas._replace(shard=shard), within(recompute, begin, end)
                stage = CandidateStage.of(begin, end, devices, self._shares(group), self._depth(group), how, again)
                stage = by_speed(self.costs, stage, self.family)
                # Led by the stage before, wherever that begins.
                leads = (Lead(begin, lead),) if lead else ()
                short = self.costs.stage_peak(stage, self.family.micro_batches, (), leads).short
                if crossed_limit(self.costs, [stage]) is None and short < found[first, stop]:
                    found[first, stop], best[first, stop] = short, stage
        return found, best

    @memoize
    def _least_peaks(self, group: _Group, lead: int) -> tuple[Numbers, list[tuple[Shard, frozenset[int]]]]:
        """Return the least peaks of all stages over all ways to run them, ``[first, stop]``, and these ways."""
        ways = list(self._ways(group))
        peaks = [self._peak(group, *way, lead) for way in ways]
        return np.where(self._mask(group), np.minimum.reduce(peaks, initial=np.inf), np.inf), ways

    @memoize
    def _mask(self, group: _Group) -> npt.NDArray[np.bool_]:
        """Return which stages between edges the constraints allow, ``[first, stop]``."""
        shares = () if group.is_mixed else self._shares(group)
        allowed = self.constraints.mask([kind for kind, _ in group.taken], shares, group.replicas)
        return allowed[np.ix_(self.edges[:-1], self.edges)]

    def _shares(self, group: _Group) -> tuple[float, ...]:
        return self.costs.shares(self.family.micro_batch_size, group.replicas)

    def _peak(self, group: _Group, shard: Shard, recompute: frozenset[int], lead: int) -> Numbers:
        count, rows = group.replicas.most(self.family.micro_batches), max(self._shares(group))
        own, lanes = group.replicas, group.replicas.lanes
        terms = PeakTerms(rows, self._depth(group), count, own.width, lead, frozenset(), shard, lanes=lanes)
        return np.asarray(peak_of(self._parts_of(group.form, rows, recompute, terms.sharded), terms), dtype=np.float64)

    def _depth(self, group: _Group) -> int:
        return group.replicas.most(self.family.micro_batches) if self.family.schedule == "gpipe" else 1

    def _ways(self, group: _Group) -> Iterator[tuple[Shard, frozenset[int]]]:
        """Yield what replicas may divide of their state, and which layers they may recompute."""
        levels = self.costs.recompute_levels(self.family.micro_batch_size, group.form)
        last = len(levels) - 1
        steps = min(last, MOST_LEVELS if self.costs.layer_count <= FEW_EDGES else 1)
        some = [round(index * last / steps) for index in range(steps + 1)] if last else [0]
        asked = {"auto": some, "none": [0], "full": [last]}[self.options.recompute]
        shards = shards_of(group.replicas.division, self.options.shards) if group.replicas.width > 1 else ("none",)
        return ((shard, levels[level]) for shard, level in product(shards, asked))

    @memoize
    def _parts_of(self, form: int, rows: float, recompute: frozenset[int], sharded: Sharded) -> Parts:
        """Return what all stages between edges hold, ``[first, stop]``."""
        every = self.costs.memory[form].by_stop(rows, recompute, sharded)
        stages = np.ix_(self.edges[:-1], self.edges)
        return Parts(*(np.asarray(each)[stages] for each in every))

    def _candidate_stage(self, state: int, first: int, stop: int, group: _Group, lead: int) -> CandidateStage:
        devices = self.pool.devices(state, group.taken)
        if group.is_mixed:
            return self._mixed_shorts(group, lead, devices)[1][first, stop]
        ways = self._least_peaks(group, lead)[1]
        shard, recompute = min(ways, key=lambda way: self._peak(group, way[0], way[1], lead)[first, stop])
        begin, end = self.edges[first], self.edges[stop]
        again, replicas = within(recompute, begin, end), group.replicas._replace(shard=shard)
        return CandidateStage.of(begin, end, devices, self._shares(group), self._depth(group), replicas, again)


def closest(
    costs: CostModel, families: Sequence[Family], options: PlanOptions, *, any_fits: bool = False
) -> tuple[int, Candidate] | None:
    """Return the least shortfall of all plans of some families, and a plan that lacks it; none if there is no plan.

    With ``any_fits``, the first plan that fits will do; small micro-batches, which hold least, are tried first.
    """
    found: tuple[int, Candidate] | None = None
    for family in _few(costs, families):
        candidate = ShortfallTables(costs, family, options).candidate()
        if candidate is not None:
            short = max(costs.shortfalls(candidate))
            if found is None or short < found[0]:
                found = (short, candidate)
            if any_fits and short <= 0:
                break
    return found


def _few(costs: CostModel, families: Sequence[Family]) -> list[Family]:
    """Return families by falling micro-batch count; of many layers, the two that hold least, and a single one's."""
    ordered = sorted(families, key=lambda each: -each.micro_batches)
    return ordered if costs.layer_count <= FEW_EDGES or len(ordered) <= 3 else [*ordered[:2], ordered[-1]]


def oversized_layer(costs: CostModel, families: Sequence[Family], options: PlanOptions) -> int | None:
    """Return the first layer that fits no device even as a stage of its own; none where there is none, or too many."""
    options = replace(options, min_stages=1, max_stages=None, forbid_cut=(), pin=())
    if costs.layer_count > MOST_EDGES or not families:
        return None
    least = np.min(
        [ShortfallTables(costs, family, options).layer_shortfalls() for family in _few(costs, families)], axis=0
    )
    return int(least.argmax()) if least.max() > 0 else None


Fits = Callable[[PlanOptions], bool]
"""Whether a plan fits the memory of the same cluster with other options."""

MOST_DEVICES, MOST_TIMES = 512, 16
"""Devices that are tried, and as many times those that were asked for."""
MOST_STATES = 2048
"""Of the devices that are left, by kind."""
MOST_DOUBLINGS = 8
"""Of a batch."""
_LEFT_OUT = ("use_all", "max_stages", "min_stages", "forbid_cut", "pin", "chunks", "equal_widths")
"""Options without which there may be a plan."""


def any_plan_fits(costs: CostModel, options: PlanOptions) -> bool:
    """Whether any plan fits the memory of the same cluster with other options."""
    options = admissible_options(options, costs.profile)
    other = canonical(CostModel(costs.profile, costs.cluster, options))
    found = closest(other, families(other.batch, options), options, any_fits=True)
    return found is not None and found[0] <= 0


def nothing_fits(text: str, suggestions: Sequence[str]) -> InfeasibleError:
    """Return the error of a text and what would help, each of it tried, or that nothing was found."""
    if not suggestions:
        none = "no options were found with which a plan would fit: divide the largest layers, or use a smaller model"
        return InfeasibleError(f"{text}; {none}")
    return InfeasibleError(f"{text}; a plan fits {', or '.join(suggestions)}")


def remedies(costs: CostModel, options: PlanOptions, fits: Fits, needed: int | None) -> list[str]:
    """Return changes of the options that let a plan fit, as they can be typed, those first that ask for least.

    ``needed`` is the memory of a device with which one does, about (:func:`needed_bytes`); None: no plan obeys the
    options, of which some may then be left out. Of sharding the first level that helps is named, of micro-batch counts
    the nearest, of batches the largest of its halves, of memory the least. Of devices it is the least number, at most
    512; where trying takes long, twice or four times as many. Where nothing else helps alone, recomputation and
    sharding are tried together, with more devices.
    """
    remedy, batch = _Remedies(costs, options, fits), costs.batch
    found = [text for name, values in remedy.values().items() for text in remedy.first(name, values)]
    if needed is None and options.use_all:
        fewer = range(len(costs.devices) - 1, max(1, options.min_stages) - 1, -1)
        found += remedy.first("gpus", fewer[:MOST_TIMES])
        found += remedy.first("batch", [batch << step for step in range(1, MOST_DOUBLINGS)])
    else:
        found += remedy.other_devices(alone=not found)
        halves = (batch >> step for step in range(1, batch.bit_length()))
        found += remedy.first("batch", [each for each in halves if each % (options.micro_batches or 1) == 0])
    if needed is None:
        return [*found, *(text for text, _ in remedy.left_out())] or remedy.beside_more_memory()
    # More than the devices have is of use only where nothing else is.
    most = min(device.memory_bytes for device in costs.devices)
    return found + remedy.memory(each for each in (needed, 2 * needed) if each <= most or not found)


class _Remedies:
    """Other values of options, which are tried."""

    def __init__(self, costs: CostModel, options: PlanOptions, fits: Fits) -> None:
        self.costs, self.options, self._fits_under = costs, options, fits
        self._quick = POLICIES[options.weight_policy].minimises == "step" and options.schedule in ("auto", *PLANNED)
        """Whether tables tell what fits, and no plan has to be found."""

    def fits(self, **changes: Any) -> bool:  # noqa: ANN401
        """Whether a plan fits with options so changed; none does where they contradict each other."""
        try:
            return self._fits_under(replace(self.options, **changes))
        except UsageError:
            return False

    def first(self, name: str, values: Iterable[Any]) -> list[str]:
        """Return the first value of an option with which a plan fits, if there is one, as it can be typed."""
        return [_options_text(**{name: each}) for each in islice((x for x in values if self.fits(**{name: x})), 1)]

    def values(self) -> dict[str, Sequence[object]]:
        """Return the values that may help by themselves, by option, but for devices, batch and memory."""
        costs, options, asked = self.costs, self.options, self.options.micro_batches
        counts = [] if asked is None else [count for count in divisors(costs.batch) if count != asked]
        level = len(SHARDS) if options.shard == "auto" else SHARDS.index(options.shard) + 1
        most, policy = min(costs.layer_count, len(costs.devices)), POLICIES[options.weight_policy]
        return {
            "recompute": ["auto"] if options.recompute == "none" else [],
            "shard": SHARDS[level:] if policy.refusal_of("shard") is None else [],
            "tensor": ["auto"] if options.tensor != "auto" and options.stages is None else [],
            "micro_batches": sorted(counts, key=lambda count: (count < (asked or 0), abs(count - (asked or 0)))),
            "schedule": self._schedules(),
            "chunks": range(2, options.chunks or 0),
            "max_stages": range((options.max_stages or most) + 1, most + 1),
            "policy": [type(options).policy] if options.non_defaults(("policy",)) else [],
            "objective": ["step"] if options.policy != policy.name else [],
        }

    def _schedules(self) -> list[str]:
        """Return the schedule that may hold less; where stages or chunks are asked for, those of others are not."""
        options = self.options
        if options.schedule == "gpipe":
            return ["1f1b"]
        planned = options.schedule in ("auto", *PLANNED)
        return [] if planned or options.chunks is not None or options.stages is not None else ["auto"]

    def other_devices(self, *, alone: bool) -> list[str]:
        """Return with how many devices a plan fits; if ``alone``, also with recomputation and sharding at once."""
        count, options = len(self.costs.devices), self.options
        if not self._quick:
            counts = [] if options.stages is not None else [2 * count, 4 * count]
            return self.first("gpus", [each for each in counts if each <= MOST_DEVICES])
        names = [name for name in ("recompute", "shard") if alone and getattr(options, name) != "auto"]
        changes: dict[str, Any] = dict.fromkeys(names, "auto")
        if changes and self.fits(**changes):
            return [_options_text(**changes)]
        if options.stages is not None:
            return []
        most = self._fewest()
        fewer = self._fewest(**changes) if changes else None
        found = [] if fewer is None or (most is not None and most <= fewer) else [_options_text(**changes, gpus=fewer)]
        return found if most is None else [*found, _options_text(gpus=most)]

    def _fewest(self, **changes: Any) -> int | None:  # noqa: ANN401
        """Return the least number of devices with which a plan fits, none if that would be too many to try."""
        costs, least = self.costs, len(self.costs.devices)
        most = min(MOST_DEVICES, MOST_TIMES * least, costs.layer_count * costs.batch)
        kinds = set(costs.kind_of)
        while most > least and prod(-(-most // least) * costs.kind_of.count(kind) + 1 for kind in kinds) > MOST_STATES:
            most //= 2
        # Few devices are tried quickly, and are mostly enough.
        enough = min(most, 2 * least)
        while enough < most and not self.fits(**changes, gpus=enough):
            least, enough = enough, min(most, 2 * enough)
        if enough <= least or (enough == most and not self.fits(**changes, gpus=most)):
            return None
        fewer = range(enough - 1, least, -1)
        return enough - bisect_left(fewer, True, key=lambda count: not self.fits(**changes, gpus=count))

    def left_out(self) -> list[tuple[str, dict[str, object]]]:
        """Return what may be left out, in words, and its defaults: each that helps alone, else as few as needed."""
        asked = self.options.non_defaults(_LEFT_OUT)
        for count in range(1, len(asked) + 1):
            found = []
            for names in combinations(asked, count):
                usual = {name: getattr(PlanOptions, name) for name in names}
                if self.fits(**usual):
                    found.append((f"without {' and '.join(f'`{name}`' for name in names)}", usual))
            if found:
                return found
        return []

    def memory(self, sizes: Iterable[int], **changes: object) -> list[str]:
        """Return the first of some sizes of memory with which a plan fits, beside ``changes`` that are made already."""
        helping = (text for text, count in map(_size_option, sizes) if self.fits(**changes, memory_bytes=count))
        return [_options_text(**changes, memory_bytes=text) for text in islice(helping, 1)]

    def beside_more_memory(self) -> list[str]:
        """Return what helps together with more memory, where nothing does without."""
        ample = _Remedies(self.costs, replace(self.options, memory_bytes=UNLIMITED_BYTES), self._fits_under)
        for schedule in self._schedules():
            if ample.fits(schedule=schedule):
                needed = needed_bytes(self.costs, replace(self.options, schedule=schedule))
                return self.memory([needed, 2 * needed] if needed else [], schedule=schedule)
        for text, usual in ample.left_out()[:1]:
            other = _Remedies(self.costs, replace(self.options, **usual), self._fits_under)  # type: ignore[arg-type]
            needed = needed_bytes(self.costs, other.options)
            return [f"{text} and {each}" for each in other.memory([needed, 2 * needed] if needed else [])]
        return []


def _options_text(**options: object) -> str:
    """Return options as errors advise them, with their values.

    >>> _options_text(shard="auto", gpus=8)
    "with `shard='auto', gpus=8`"
    """
    return f"with `{', '.join(f'{name}={value!r}' for name, value in options.items())}`"


def needed_bytes(costs: CostModel, options: PlanOptions, short: int | None = None) -> int | None:
    """Return the least memory per device with which a plan may fit, near which ``short`` comes; None: there is none."""
    reserved = {costs.kinds[kind].reserved_bytes for kind in costs.kind_of}
    limits = set(costs.limits_bytes)
    if (short is not None and len(limits) == len(reserved) == 1) or options.stages is not None:
        # About: what the largest device of those that differ has, and all that the stage lacks that lacks most.
        return max(limits) + max(reserved) + (short or 0)
    # What chunks need in memory is not told beforehand, but near what `1f1b` does.
    schedule = options.schedule if options.schedule in PLANNED else "auto"
    ample = replace(options, memory_bytes=UNLIMITED_BYTES, schedule=schedule, chunks=None)
    model = canonical(CostModel(costs.profile, costs.cluster, ample))
    found = closest(model, families(model.batch, ample), ample)
    return None if found is None else UNLIMITED_BYTES + found[0]


def _size_option(count: int) -> tuple[str, int]:
    """Return bytes as they can be typed, rounded up by little, and how many bytes that is.

    >>> _size_option(300), _size_option(3 * 2**20 + 1), _size_option(20 * 2**30 + 1)
    (('300', 300), ('4MiB', 4194304), ('20481MiB', 21475885056))
    """
    if count < 2**20:
        return str(count), count
    mebibytes = ceil(count / 2**20)
    return f"{mebibytes}MiB", mebibytes * 2**20


MOST_STAGES = 8
"""That are written out in an error."""


def size(count: int) -> str:
    """Return bytes for people.

    >>> size(3 * 2**29), size(300)
    ('1.50 GiB', '300 B')
    """
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 2**power:
            return f"{count / 2**power:.2f} {unit}"
    return f"{count} B"


def explain(costs: CostModel, candidate: Candidate) -> str:
    """Return which stage of a candidate exceeds its memory, and by how much."""
    peaks = costs.peaks(candidate)
    index, (_, limit) = max(enumerate(peaks), key=lambda each: each[1].short)
    stage = candidate.stages[index]
    names = costs.profile.layers[stage.first].name, costs.profile.layers[stage.stop - 1].name
    layers = f"layer {names[0]}" if names[0] == names[1] else f"layers {names[0]}..{names[1]}"
    smallest = next(device for device in stage.devices if costs.limits_bytes[device] == limit)
    reserved = costs.kinds[costs.kind_of[smallest]].reserved_bytes
    more = f" more than {size(limit)}" if limit or not reserved else ""
    own = f" beside the {size(reserved)} of the process itself" if reserved else ""
    return f"stage {index} ({layers}) needs {size(peaks[index].short)}{more}{own} ({peaks[index].short} bytes)"


def infeasible(
    costs: CostModel,
    families: Sequence[Family],
    options: PlanOptions,
    closest_plan: tuple[int, Candidate] | None,
    fits: Fits,
) -> InfeasibleError:
    """Return the error that names the stage, the least shortfall, and options with which a plan fits.

    All plans of the families count, none where stages are dictated, and the closest plan that was met already.
    """
    found = closest(costs, families, options)
    if found is None or (closest_plan is not None and closest_plan[0] <= found[0]):
        found = closest_plan
    if found is None:
        return nothing_fits(_unmet(costs, options), remedies(costs, options, fits, None))
    candidate = found[1]
    layer = oversized_layer(costs, families, options)
    large = "" if layer is None else f"; layer {costs.profile.layers[layer].name} alone fits no device"
    count = len(candidate.stages)
    stages = costs.text(candidate) if count <= MOST_STAGES else f"{count} stages"
    how = f"{stages} with {candidate.schedule} and {candidate.micro_batches_text()}"
    kept, gradients = costs.state_bytes(candidate, max(enumerate(costs.shortfalls(candidate)), key=lambda at: at[1])[0])
    state = f"{size(kept)} are parameters and the optimizer's state, {size(gradients)} gradients, the rest activations"
    return nothing_fits(
        f"nothing fits the memory: {explain(costs, candidate)} even in the plan that comes closest ({how}): "
        f"{state}{large}",
        remedies(costs, options, fits, needed_bytes(costs, options, found[0])),
    )


def _unmet(costs: CostModel, options: PlanOptions) -> str:
    """Return why no plan obeys the options, whatever the memory."""
    devices = f"{len(costs.devices)} device{'s' if len(costs.devices) > 1 else ''}"
    if options.max_stages is not None or options.forbid_cut or options.pin:
        asked = "`max_stages`, `forbid_cut`, `pin` and `use_all` that were asked for"
        return f"no plan for {devices} obeys all of {asked}"
    if costs.single:
        return f"no plan uses all {devices}: {next(iter(costs.single.values())).reason}"
    if costs.share_limits:
        return f"no plan obeys what layers take at once: {costs.share_limits[0].text}"
    most = min(costs.layer_count, len(costs.devices))
    return (
        f"no plan uses all {devices}: {costs.layer_count} layers and a batch of {costs.batch} make at most {most} "
        "stages with a sample for every replica"
    )
