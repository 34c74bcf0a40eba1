"""Activations: what stages keep of a micro-batch for its backward, and the most that its way through them holds.

From what layers save, by storage. What all stages hold is a sum of numbers that each count for some first layers and
some stops (:class:`Areas`), so one sweep over the layers prices all stages.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.ownership import SCATTERING, Shard
from autopar.planner.costs import memoize
from autopar.planner.costs.communication import Flows, FlowTensor
from autopar.planner.costs.layers import LayerCosts, first_alike

Counts = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]


class Area(NamedTuple):
    """A number that counts for stages ``first:stop`` with both in a range, ends included."""

    first_low: int
    first_high: int
    stop_low: int
    stop_high: int
    value: int


class Areas:
    """A sum of areas.

    >>> areas = Areas(3, [Area(0, 1, 2, 3, 5), Area(0, 0, 1, 3, 1)])
    >>> areas.at(0, 2), areas.at(1, 2), areas.at(0, 1)
    (6, 5, 1)
    >>> areas.window(3).tolist()
    [[1, 6, 6], [5, 5, 0], [0, 0, 0]]
    """

    def __init__(self, layers: int, areas: Iterable[Area]) -> None:
        """Take the areas, over the stages of so many layers."""
        self._layers = layers
        columns = np.array(list(areas), dtype=np.int64).reshape(-1, 5)
        self._columns = columns[(columns[:, 0] <= columns[:, 1]) & (columns[:, 2] <= columns[:, 3])]

    def at(self, first: int, stop: int) -> int:
        """Return the sum for one stage."""
        if not len(self._columns):
            return 0
        first_low, first_high, stop_low, stop_high, value = self._columns.T
        there = (first_low <= first) & (first <= first_high) & (stop_low <= stop) & (stop <= stop_high)
        return int(value[there].sum())

    def window(self, longest: int) -> Counts:
        """Return the sums of all stages of up to ``longest`` layers, ``[first, length - 1]``; 0 for those too long."""
        first_low, first_high, stop_low, stop_high, value = self._columns.T
        found = np.zeros((self._layers, longest), dtype=np.int64)
        for length in range(1, longest + 1):
            low = np.maximum(first_low, stop_low - length)
            high = np.minimum(np.minimum(first_high, stop_high - length), self._layers - length)
            there = low <= high
            steps = np.zeros(self._layers + 1, dtype=np.int64)
            np.add.at(steps, low[there], value[there])
            np.subtract.at(steps, high[there] + 1, value[there])
            found[:, length - 1] = np.cumsum(steps[:-1])
        return found


def between(sums: Numbers) -> Numbers:
    """Return the differences of sums over all layers before a position, ``[first, stop]``; infinite of no layers."""
    some = np.tri(len(sums), k=-1, dtype=bool).T
    return np.where(some, sums[None, :] - sums[:, None], np.inf)


def running(values: Sequence[int] | Counts, longest: int, join: np.ufunc) -> Counts:
    """Return ``join`` of the values of all stages of up to ``longest`` layers, ``[first, length - 1]``.

    Behind the last layer stand zeros.

    >>> running([4, 1, 2], 2, np.maximum).tolist()
    [[4, 4], [1, 2], [2, 2]]
    """
    padded = np.append(np.asarray(values, np.int64), np.zeros(longest - 1, np.int64))
    return np.asarray(join.accumulate(np.lib.stride_tricks.sliding_window_view(padded, longest), axis=1))


class ActivationBytes(NamedTuple):
    """Bytes of one stage, or of many."""

    activations: int | Counts
    """What one micro-batch in flight keeps."""
    peak: int | Counts
    """The most that one micro-batch's forward and backward hold."""
    first_peak: int | Counts
    """The same with the gradients that the micro-batch's backward makes, if it is a step's first."""


class Sharded(NamedTuple):
    """What replicas divide of gradients and parameters, so that it comes and goes as a stage computes."""

    level: Shard = "none"
    """Not ``optimizer``, which is divided throughout."""
    replicas: int = 1
    """Among how many; 1 where they divide neither."""


WHOLE = Sharded()


class Passing(NamedTuple):
    """Bytes of a layer, or of all, that come and go while replicas that divide them compute; zeros of others."""

    parameters: int | Counts
    """Gathered for the layer, and a second time while it is copied out."""
    gradients: int | Counts
    """Whole, until they are reduced; and once more as what is reduced."""
    sent: int | Counts
    """Gradients of what the layer makes."""
    returned: int | Counts
    """Gradients of what it reads."""

    def at(self, layers: Counts) -> Passing:
        """Return those of some layers."""
        return Passing(*(np.asarray(each)[layers] for each in self))

    def computing(self, transient: int | Counts, gathered: int | Counts, *, sends: bool = True) -> int | Counts:
        """Return the most while a layer computes that holds ``transient`` for a while.

        The parameters of the layer before, ``gathered``, are on their way; without ``sends``, the gradients of what
        the layer makes are another's.
        """
        begins = 2 * self.parameters + (self.sent if sends else 0)
        most = transient + self.parameters + gathered
        return max(most, begins) if isinstance(most, int) and isinstance(begins, int) else np.maximum(most, begins)

    def reducing(self, gathered: int | Counts) -> int | Counts:
        """Return the most while a layer's gradients are reduced, when it has let go of all it saved."""
        return self.returned + 2 * self.gradients + gathered


def rows_bytes(rows: float, per_sample: int | Counts) -> int | Counts:
    """Return the bytes of some rows, rounded up where rows are fractions."""
    return rows * per_sample if isinstance(rows, int) else np.ceil(rows * np.asarray(per_sample)).astype(np.int64)


class Activations:
    """Activations of all stages at any number of rows; layers that are recomputed save their inputs only."""

    def __init__(self, costs: LayerCosts, flows: Flows, gradient_bytes: Callable[[int, int], int]) -> None:
        """Take what is known of the layers; ``gradient_bytes`` returns the bytes of the gradients of a stage."""
        self._costs, self._flows, self._gradient_bytes = costs, flows, gradient_bytes
        self._count = len(costs.layers)
        self._common = self._common_storages()
        self._sweeps: dict[tuple[int, float, frozenset[int], Sharded], _Sweep] = {}
        self._latest: tuple[tuple[float, frozenset[int], int], Counts, Counts] | None = None
        """What stages keep at the rows, and with the layers recomputed, that were asked for last."""

    def _common_storages(self) -> frozenset[str]:
        """Return the storages that more than one layer may keep, or another may be sent."""
        found, known = {tensor.name for tensor in (*self._flows.crossing, *self._flows.inputs)}, set[str]()
        for layer in self._costs.layers:
            own = {saved.storage for cost in layer.costs for saved in cost.saved}
            found |= own & known
            known |= own
        return frozenset(found)

    def of(
        self, first: int, stop: int, rows: float, recompute: frozenset[int], sharded: Sharded = WHOLE
    ) -> ActivationBytes:
        """Return what one stage holds."""
        key = (first, rows, frozenset(layer for layer in recompute if first <= layer < stop), sharded)
        sweep = self._sweeps.setdefault(key, _Sweep(first))
        # A sweep serves later stops, too, as long as their further layers are not recomputed.
        while len(sweep.by_length) < stop - first:
            self._advance(sweep, rows, recompute, sharded)
        return sweep.by_length[stop - first - 1]

    def window(
        self, rows: float, recompute: frozenset[int], longest: int, gradients: Counts, sharded: Sharded = WHOLE
    ) -> ActivationBytes:
        """Return what stages of up to ``longest`` layers, and bytes of gradients, hold, ``[first, length - 1]``."""
        kept = self._kept_counts(rows, recompute, longest)
        if kept is None:
            return self._each(rows, recompute, longest, sharded)
        totals, ahead = kept
        layers = range(self._count)
        transients = np.array([self.transient(layer, rows, layer in recompute) for layer in layers])
        sent = np.array([self.sent_bytes(layer, rows, layer in recompute) for layer in layers])
        finals = np.maximum(0, transients - sent)
        passing, passing_at = self._passing(rows, sharded), self.passing(rows, sharded)
        before = np.zeros(self._count, dtype=np.int64)
        gathered_ahead = np.array([self._waiting(layer, passing_at[layer], recompute) for layer in layers])
        highest, begun, waiting = before, np.full(self._count, -(2**60)), before
        peaks, first_peaks = np.zeros_like(totals), np.zeros_like(totals)
        for at in range(longest):
            last = np.minimum(np.arange(self._count) + at, self._count - 1)
            own, gathered = passing.at(last), np.asarray(passing.parameters)[last - 1] if at else 0
            waiting = np.maximum(waiting, gathered_ahead[last]) if at else waiting
            total, made = totals[:, at], -(-gradients[:, at] // sharded.replicas)
            reducing = before + own.reducing(gathered)
            final = total + own.computing(finals[last], gathered, sends=False)
            beside = ahead[:, at] + waiting
            peaks[:, at] = np.maximum.reduce([highest, final + passing.gradients, reducing]) + beside
            first_peaks[:, at] = np.maximum.reduce([begun + made, final, reducing]) + beside
            behind = np.asarray(passing.gradients)[np.minimum(last + 1, self._count - 1)]
            most = np.maximum(total + own.computing(transients[last], gathered) + behind, reducing)
            highest, begun, before = np.maximum(highest, most), np.maximum(begun, most - made), total
        return ActivationBytes(totals + ahead, peaks, first_peaks)

    def _kept_counts(self, rows: float, recompute: frozenset[int], longest: int) -> tuple[Counts, Counts] | None:
        """Return what stages keep, and what they keep ahead of who reads it, ``[first, length - 1]``.

        None where a layer keeps a storage that bears the name of what a later one makes.
        """
        key = rows, recompute, longest
        if self._latest is None or self._latest[0] != key:
            saves = self._saves(rows, recompute)
            if any(min(saves.get(made.name, (made.producer,))) < made.producer for made in self._flows.crossing):
                return None
            areas = self._storage_areas(rows, saves), self._ahead(rows, saves)
            totals, ahead = (Areas(self._count, each).window(longest) for each in areas)
            own = [self._own_bytes(layer, rows, layer in recompute) for layer in range(self._count)]
            self._latest = key, totals + running(own, longest, np.add), ahead
        return self._latest[1:]

    @staticmethod
    def _waiting(layer: int, passing: Passing, recompute: frozenset[int]) -> int:
        """Return what is gathered of a layer for its next forward while the one before is run again."""
        return int(passing.parameters) if layer - 1 in recompute else 0

    @memoize
    def passing(self, rows: float, sharded: Sharded) -> list[Passing]:
        """Return what comes and goes of every layer."""
        columns = (np.asarray(each).tolist() for each in self._passing(rows, sharded))
        return list(map(Passing, *columns))

    @memoize
    def _passing(self, rows: float, sharded: Sharded) -> Passing:
        """Return the same, as arrays over layers."""
        nothing = np.zeros(self._count, dtype=np.int64)
        if sharded.level == "none":
            return Passing(nothing, nothing, nothing, nothing)

        def sizes(flows: Iterable[Iterable[FlowTensor]]) -> Counts:
            every = (sum(each.bytes_per_sample for each in tensors if each.gradient) for tensors in flows)
            return np.array([int(rows_bytes(rows, each)) for each in every], dtype=np.int64)

        tied = [sum(each.bytes for each in self._flows.tied if at in each.layers) for at in range(self._count)]
        parameters, gradients = (
            np.maximum(0, np.array([getattr(layer, name) for layer in self._costs.layers]) - tied)
            for name in ("parameters_bytes", "gradient_bytes")
        )
        gathered = parameters if sharded.level == "parameters" else nothing
        return Passing(gathered, gradients, sizes(self._flows.made_by), sizes(self._flows.received_by))

    @memoize
    def saved_bytes(self, layer: int, rows: float, is_recomputed: bool) -> dict[str, int]:
        """Return the bytes of what a layer keeps for its backward, model inputs excepted, by storage."""
        copied = self._copied_bytes(layer, rows, is_recomputed)
        kept = self._storages_without_copies(layer, rows, is_recomputed)
        return {**kept, f"{self._costs.layers[layer].name} before": copied} if copied else kept

    @memoize
    def _own_bytes(self, layer: int, rows: float, is_recomputed: bool) -> int:
        """Return the bytes of what a layer keeps for its backward that no other layer keeps, or is sent."""
        saved = self.saved_bytes(layer, rows, is_recomputed)
        return sum(size for name, size in saved.items() if name not in self._common)

    @memoize
    def _common_bytes(self, layer: int, rows: float, is_recomputed: bool) -> dict[str, int]:
        """Return those of the rest, by storage."""
        saved = self.saved_bytes(layer, rows, is_recomputed)
        return {name: size for name, size in saved.items() if name in self._common}

    @memoize
    def least_kept(self, rows: float, recompute: frozenset[int]) -> Numbers:
        """Return bytes by layer: no stage keeps less of a micro-batch than its layers' together.

        What several layers may keep counts for the first of them.
        """
        known: dict[tuple[int, bool], int] = {}
        for layer, again in {(layer, at in recompute) for at, layer in enumerate(self._alike)}:
            saved = self.saved_bytes(layer, rows, again)
            known[layer, again] = sum(size for name, size in saved.items() if self._first_keeper[name] == layer)
        return np.array([float(known[layer, at in recompute]) for at, layer in enumerate(self._alike)])

    @cached_property
    def _first_keeper(self) -> dict[str, int]:
        """By storage, the first layer that keeps it, recomputed or not."""
        found: dict[str, int] = {}
        for layer, is_recomputed in product(range(self._count), (False, True)):
            for name in self.saved_bytes(layer, 1, is_recomputed):
                found.setdefault(name, layer)
        return found

    @cached_property
    def _alike(self) -> list[int]:
        """By layer, the first one of the same bytes, whatever its storages and tensors are called."""

        def key(layer: int) -> object:
            record, read, made = self._costs.layers[layer], self._flows.received_by[layer], self._flows.made_by[layer]
            called = {each.name: (end, at) for end, some in ((0, read), (1, made)) for at, each in enumerate(some)}
            called |= {each.name: (2, at) for at, each in enumerate(self._flows.inputs)}

            def is_first(name: str) -> bool:
                return self._first_keeper.get(name) == layer

            kept = sorted(
                (called.get(each.storage, (3, 0)), is_first(each.storage), cost.micro_batch, each.bytes)
                for cost in record.costs
                for each in cost.saved
            )
            sizes = [(cost.micro_batch, cost.peak_bytes, cost.output_bytes) for cost in record.costs]
            tensors = [(each.bytes_per_sample, each.gradient, is_first(each.name)) for each in (*read, *made)]
            ties = [each.bytes for each in self._flows.tied if layer in each.layers]
            writes = None if record.writes is None else layer
            return repr((kept, sizes, len(read), tensors, ties, writes, record.parameters_bytes, record.gradient_bytes))

        return first_alike(map(key, range(self._count)))

    @memoize
    def least_at_work(self, rows: float, shard: Shard) -> Numbers:
        """Return bytes by layer: no stage that has it holds less at some time beside all that it keeps.

        While its last layer computes, or the one before, which keeps all but what the last one does.
        """
        passing = self.passing(rows, Sharded(shard if shard in SCATTERING else "none"))
        known = {layer: self._at_work(layer, rows, passing[layer]) for layer in set(self._alike)}
        last, before, kept = (np.array(each) for each in zip(*(known[layer] for layer in self._alike), strict=True))
        longer = np.maximum(last[1:], before[:-1] - kept[1:])
        # A stage that begins with its last layer has none before.
        behind = np.minimum.accumulate(longer[::-1])[::-1]
        return np.asarray(np.minimum(last, np.append(behind, np.inf)))

    def _at_work(self, layer: int, rows: float, passing: Passing) -> tuple[float, float, float]:
        """Return what a layer holds at work as a stage's last one, and as another one, at least; and keeps at most."""
        both = False, True
        own = [self.transient(layer, rows, again) for again in both]
        sent = [self.sent_bytes(layer, rows, again) for again in both]
        left = min(max(0, transient - size) for transient, size in zip(own, sent, strict=True))
        kept = max(sum(self.saved_bytes(layer, rows, again).values()) for again in both)
        received = sum(int(rows_bytes(rows, each.bytes_per_sample)) for each in self._flows.received_by[layer])
        at_work = (passing.computing(left, 0, sends=False), passing.computing(min(own), 0), kept + received)
        return float(at_work[0]), float(at_work[1]), float(at_work[2])

    def _copied_bytes(self, layer: int, rows: float, is_recomputed: bool) -> int:
        """Return the bytes of copies, of what a layer's forward writes, that are kept as they were."""
        record = self._costs.layers[layer]
        if record.writes is None:
            return 0
        written = [tensor for tensor in self._flows.inputs if is_recomputed and tensor.name in record.writes.inputs]
        return record.written_bytes + sum(int(rows_bytes(rows, tensor.bytes_per_sample)) for tensor in written)

    @memoize
    def _storages_without_copies(self, layer: int, rows: float, is_recomputed: bool) -> dict[str, int]:
        if is_recomputed:
            received = self._flows.received_by[layer]
            return {tensor.name: int(rows_bytes(rows, tensor.bytes_per_sample)) for tensor in received}
        inputs = {tensor.name for tensor in self._flows.inputs}
        return {name: size for name, size in self._costs.saved_at(layer, rows).items() if name not in inputs}

    @memoize
    def transient(self, layer: int, rows: float, is_recomputed: bool) -> int:
        """Return the bytes a layer holds for a while beyond what it saves; its peak does not count its inputs."""
        read = {tensor.name for tensor in self._flows.received_by[layer]}
        kept = self._storages_without_copies(layer, rows, is_recomputed)
        own = sum(size for name, size in kept.items() if name not in read)
        return max(0, self._costs.bytes_at(layer, "peak_bytes", rows) - own)

    def sent_bytes(self, layer: int, rows: float, is_recomputed: bool, held: Container[str] | None = None) -> int:
        """Return the bytes of a layer's outputs that are not ``held``, by default saved, and of outputs' gradients.

        A recomputed layer makes its outputs once more while those that were sent are there.
        """
        storages = self.saved_bytes(layer, rows, is_recomputed) if held is None else held
        made = self._flows.made_by[layer]
        kept = 0 if is_recomputed else sum(tensor.bytes_per_sample for tensor in made if tensor.name not in storages)
        return int(rows_bytes(rows, kept + sum(tensor.bytes_per_sample for tensor in made if tensor.gradient)))

    def _advance(self, sweep: _Sweep, rows: float, recompute: frozenset[int], sharded: Sharded) -> None:
        """Add the next layer to a stage."""
        first, last, held = sweep.first, sweep.first + len(sweep.by_length), sweep.storages
        saved = self._common_bytes(last, rows, last in recompute)
        transient, before = self.transient(last, rows, last in recompute), sweep.total
        sweep.total += self._own_bytes(last, rows, last in recompute)
        for name, size in saved.items():
            sweep.total += max(0, size - held.get(name, 0))
            held[name] = max(size, held.get(name, 0))
        for tensor in self._flows.received_by[last]:
            if tensor.producer < first and tensor.name not in held:
                held[tensor.name] = int(rows_bytes(rows, tensor.bytes_per_sample))
                sweep.total += held[tensor.name]
        # Behind this layer, the first backward has left the gradients of the stage's later layers.
        made = -(-self._gradient_bytes(first, last + 1) // sharded.replicas)
        for tensor in self._flows.made_by[last]:
            sweep.ahead[tensor.name] = tensor.consumers[-1], int(rows_bytes(rows, tensor.bytes_per_sample))
        sweep.ahead = {name: until for name, until in sweep.ahead.items() if until[0] > last and name not in held}
        passing = self.passing(rows, sharded)
        sweep.waiting = max(sweep.waiting, self._waiting(last, passing[last], recompute) if last > first else 0)
        kept, total = sum(size for _, size in sweep.ahead.values()), sweep.total
        # What the stage's last layer makes is kept, and its gradients are messages: neither is its own.
        final = max(0, transient - self.sent_bytes(last, rows, last in recompute, held))
        own, gathered = passing[last], passing[last - 1].parameters if last > first else 0
        reducing = before + int(own.reducing(gathered))
        final = total + int(own.computing(final, gathered, sends=False))
        beside = kept + sweep.waiting
        first_peak = max(sweep.highest_begun + made, final, reducing) + beside
        peak = max(sweep.highest, final + int(passing[first].gradients), reducing) + beside
        sweep.by_length.append(ActivationBytes(total + kept, peak, first_peak))
        behind = passing[min(last + 1, self._count - 1)].gradients
        most = max(total + int(own.computing(transient, gathered)) + int(behind), reducing)
        sweep.highest, sweep.highest_begun = max(sweep.highest, most), max(sweep.highest_begun, most - made)

    def _saves(self, rows: float, recompute: frozenset[int]) -> dict[str, dict[int, int]]:
        """Return the bytes of storages that several layers may keep, by storage and layer, ascending."""
        found: dict[str, dict[int, int]] = {}
        for layer in range(self._count):
            for name, size in self._common_bytes(layer, rows, layer in recompute).items():
                found.setdefault(name, {})[layer] = size
        return found

    def _each(self, rows: float, recompute: frozenset[int], longest: int, sharded: Sharded) -> ActivationBytes:
        """Return :meth:`window` of stages that are looked at one after the other."""
        found = np.zeros((3, self._count, longest), dtype=np.int64)
        for first in range(self._count):
            for at in range(min(longest, self._count - first)):
                found[:, first, at] = self.of(first, first + at + 1, rows, recompute, sharded)
        return ActivationBytes(*found)

    def _storage_areas(self, rows: float, saves: Mapping[str, Mapping[int, int]]) -> Iterator[Area]:
        """What joins the union of kept storages at a layer, by the first layers for which it does."""
        tensors = {tensor.name: tensor for tensor in self._flows.crossing}
        for name in dict.fromkeys((*saves, *tensors)):
            yield from _union(saves.get(name, {}), tensors.get(name), rows, self._count)

    def _ahead(self, rows: float, saves: Mapping[str, Mapping[int, int]]) -> Iterator[Area]:
        """What is made in a stage, kept by none of its layers yet, and read behind it."""
        for tensor in self._flows.crossing:
            until = min((tensor.consumers[-1], *saves.get(tensor.name, ())))
            size = int(rows_bytes(rows, tensor.bytes_per_sample))
            yield Area(0, tensor.producer, tensor.producer + 1, until, size)


@dataclass(slots=True, eq=False)
class _Sweep:
    """A stage that grows layer by layer."""

    first: int
    by_length: list[ActivationBytes] = field(default_factory=list)
    storages: dict[str, int] = field(default_factory=dict)
    ahead: dict[str, tuple[int, int]] = field(default_factory=dict)
    total: int = 0
    waiting: int = 0
    highest: int = 0
    highest_begun: int = -(2**60)


def _union(sizes: Mapping[int, int], tensor: FlowTensor | None, rows: float, count: int) -> Iterator[Area]:
    """Areas of one storage: the largest of what the stage's layers keep of it, or of what it receives."""
    reads = () if tensor is None else tensor.consumers
    made = -1 if tensor is None else tensor.producer
    received = 0 if tensor is None else int(rows_bytes(rows, tensor.bytes_per_sample))
    places = sorted({*sizes, *reads})
    starts = sorted({-1, made, *places})
    most = max((received, *sizes.values()))
    for before, start in zip(starts, (*starts[1:], count - 1), strict=True):
        # Stages that begin behind `before`, and at `start` at the latest.
        held, known = 0, False
        for at in range(bisect_left(places, start), len(places)):
            if known and held >= most:
                break
            place = places[at]
            size = sizes.get(place)
            more = held if size is None else max(held, size)
            known = known or size is not None
            if not known and place in reads and before >= made:
                more, known = received, True
            if more > held:
                yield Area(before + 1, start, place + 1, count, more - held)
            held = more
