"""Layers: seconds and bytes of layers and ranges of layers, from what was measured of each at a few numbers of rows.

A layer's costs are interpolated between the measured numbers of rows (:func:`at_rows`); running sums over the layers
make a range's the difference of two. Recomputation adds forwards of some layers, of sets that each are a part of the
next; sharding adds gathering and scattering, as far as computing does not hide it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple, Self

import numpy as np

from autopar.formats.cluster import Level
from autopar.formats.document import Provenance, least_certain
from autopar.formats.profile import Cost, Layer, Profile
from autopar.hardware.topology import ALONE, Place
from autopar.ownership import SCATTERING, Shard
from autopar.planner.costs import memoize
from autopar.planner.costs.communication import LinkModel, Sharing
from autopar.planner.costs.curves import Collective


def at_rows(sizes: Sequence[int], values: Sequence[float], rows: float) -> float:
    """Return a cost at ``rows`` samples from its values at measured, ascending sizes.

    Exact at a measured size and linear between two; outside them the least-squares line with a slope of at least
    0, and never less than 0. One measured size scales in proportion.

    >>> at_rows((2, 4), (1.0, 2.0), 3), at_rows((2, 4), (1.0, 2.0), 8), at_rows((2, 4), (3.0, 2.0), 8)
    (1.5, 4.0, 2.5)
    """
    if len(sizes) == 1:
        return values[0] * rows / sizes[0]
    if rows < sizes[0] or rows > sizes[-1]:
        mean_size, mean_value = sum(sizes) / len(sizes), sum(values) / len(values)
        spread = sum((size - mean_size) ** 2 for size in sizes)
        covariance = sum((size - mean_size) * (value - mean_value) for size, value in zip(sizes, values, strict=True))
        return max(0.0, mean_value + max(0.0, covariance / spread) * (rows - mean_size))
    after = bisect_left(sizes, rows)
    if sizes[after] == rows:
        return values[after]
    before = after - 1
    part = (rows - sizes[before]) / (sizes[after] - sizes[before])
    return values[before] + part * (values[after] - values[before])


_known_at_rows = lru_cache(maxsize=65_536)(at_rows)
"""Layers that are alike keep as much."""

Seconds = Literal["forward_s", "backward_s", "backward_input_s", "backward_weight_s"]
"""Fields of :class:`Cost`."""
Launches = Literal["forward_launch_s", "backward_launch_s", "backward_input_launch_s", "backward_weight_launch_s"]
"""Seconds of the host. Of a half, the backward's, divided as the seconds of its kernels are."""
_LAUNCHED: dict[Launches, tuple[Literal["forward_launch_s", "backward_launch_s"], Seconds | None]] = {
    "forward_launch_s": ("forward_launch_s", None),
    "backward_launch_s": ("backward_launch_s", None),
    "backward_input_launch_s": ("backward_launch_s", "backward_input_s"),
    "backward_weight_launch_s": ("backward_launch_s", "backward_weight_s"),
}
"""The field of :class:`Cost`, and of which half."""


class Form(NamedTuple):
    """What runs a replica, as far as prices depend on it."""

    kind: int = 0
    """Of every device."""
    team: int = 1
    """Devices that run it together."""
    sliced: bool = False
    """Whether they keep slices of tensors between layers."""
    place: Place = ALONE
    """Where they stand."""


class Site(NamedTuple):
    """What a stage's seconds depend on besides its layers and rows; see :class:`StageSums`."""

    shard: Shard = "none"
    place: Place = ALONE
    form: int = 0

    @classmethod
    def of(cls, shard: Shard, place: Place, form: int) -> Self:
        """Return what forwards and backwards depend on: where replicas stand, only if these communicate in them."""
        return cls(shard, place, form) if shard in SCATTERING else cls(form=form)

    def adding(self, share: float) -> float:
        """Return by how much a rank adds to gradients if this share of backwards does: scattered, to its part."""
        return share / self.place.ranks if self.shard in SCATTERING else share


ALONE_SITE = Site()
"""Of one device of the first kind, which shards nothing."""


class LayerCosts:
    """Times of consecutive layers by rows, as sums from the first layer on."""

    def __init__(self, layers: tuple[Layer, ...]) -> None:
        self.layers = layers
        self._sizes = [tuple(cost.micro_batch for cost in layer.costs) for layer in self.layers]
        self.update_sums = [0.0, *accumulate(layer.update_s for layer in self.layers)]
        costs = [cost for layer in layers for cost in layer.costs]
        self.has_launches = any(cost.forward_launch_s or cost.backward_launch_s for cost in costs)
        """Whether a host launches what the device computes, and its seconds are known."""
        self._timed_as = first_alike(map(_times, layers))

    @memoize
    def sums(self, field: Seconds | Launches, rows: float, adding: float = 0.0) -> list[float]:
        """Return, for every position, the seconds of all layers before it.

        ``adding`` is the share of backwards, or weight halves, that add to gradients, instead of making them.
        """
        known = {index: self._seconds(index, field, rows) for index in set(self._timed_as)}
        layers = zip(self._timed_as, self.layers, strict=True)
        return [0.0, *accumulate(known[index] + adding * layer.accumulate_s for index, layer in layers)]

    @cached_property
    def has_halves(self) -> bool:
        """Whether the halves of every layer's backward were measured."""
        costs = (cost for layer in self.layers for cost in layer.costs)
        return all(cost.backward_input_s is not None and cost.backward_weight_s is not None for cost in costs)

    @memoize
    def recompute_s(self, layer: int, rows: float) -> float:
        """Return what a backward takes longer that runs the layer forward again; a forward, where not measured."""
        known = self._at(layer, "recompute_s", rows)
        return self._seconds(layer, "forward_s", rows) if known is None else known

    def bytes_at(self, layer: int, field: Literal["peak_bytes", "output_bytes"], rows: float) -> int:
        """Return a layer's bytes at ``rows``, rounded up."""
        return _up(self._at(layer, field, rows) or 0.0)

    def pending_at(self, layer: int, rows: float) -> int | None:
        """Return the bytes that a layer holds from the first half of its backward to the second; None: not measured."""
        known = self._at(layer, "weight_saved_bytes", rows)
        return None if known is None else _up(known)

    def _at(self, layer: int, field: str, rows: float) -> float | None:
        """Return a field of :class:`Cost` at ``rows``; None where it was not measured at all sizes."""
        values = [getattr(cost, field) for cost in self.layers[layer].costs]
        return None if None in values else at_rows(self._sizes[layer], list(map(float, values)), rows)

    def saved_at(self, layer: int, rows: float) -> dict[str, int]:
        """Return the bytes of every storage that a layer keeps at ``rows``, by the storage's name."""
        return {storage: _up(_known_at_rows(*sizes, rows)) for storage, sizes in self._saved_bytes(layer).items()}

    @memoize
    def _saved_bytes(self, layer: int) -> dict[str, tuple[tuple[int, ...], tuple[float, ...]]]:
        """Return the measured numbers of rows, and the bytes of a storage there, by its name."""
        by_storage: dict[str, dict[int, float]] = {}
        for cost in self.layers[layer].costs:
            for saved in cost.saved:
                sizes = by_storage.setdefault(saved.storage, {})
                sizes[cost.micro_batch] = max(sizes.get(cost.micro_batch, 0.0), float(saved.bytes))
        return {storage: (tuple(sizes), tuple(sizes.values())) for storage, sizes in by_storage.items()}

    def provenance(self, first: int, stop: int, rows: float) -> Provenance:
        """Return where the times of layers ``first:stop`` at ``rows`` samples come from."""
        known = least_certain(self._layer_provenance(layer, rows) for layer in range(first, stop))
        assert known is not None
        return known

    def _layer_provenance(self, layer: int, rows: float) -> Provenance:
        sizes, costs = self._sizes[layer], self.layers[layer].costs
        if rows in sizes:
            return costs[sizes.index(rows)].provenance
        if not sizes[0] < rows < sizes[-1]:
            return "estimated"
        after = bisect_left(sizes, rows)
        return least_certain(("interpolated", costs[after - 1].provenance, costs[after].provenance)) or "interpolated"

    def _seconds(self, layer: int, field: Seconds | Launches, rows: float) -> float:
        record = self.layers[layer]
        if field in _LAUNCHED:
            return self._launch_s(layer, field, rows)
        fit = {"forward_s": record.forward_fit, "backward_s": record.backward_fit}.get(field)
        if fit is not None and not self._sizes[layer][0] <= rows <= self._sizes[layer][-1]:
            return fit.at(rows)
        return at_rows(self._sizes[layer], [getattr(cost, field) or 0.0 for cost in record.costs], rows)

    def _launch_s(self, layer: int, field: Launches, rows: float) -> float:
        """Return the host's seconds; one that was measured at one size takes as long at any."""
        name, half = _LAUNCHED[field]
        costs = self.layers[layer].costs
        values = [(getattr(cost, name) or 0.0) * (1.0 if half is None else _part(cost, half)) for cost in costs]
        return values[0] if len(values) == 1 else at_rows(self._sizes[layer], values, rows)


_BYTES = {"saved", "peak_bytes", "output_bytes", "weight_saved_bytes"}
"""Fields of :class:`Cost` that are no times, and bear names."""


def _times(layer: Layer) -> tuple[object, ...]:
    """Return what all times of a layer follow from."""
    costs = (tuple(value for name, value in cost if name not in _BYTES) for cost in layer.costs)
    return layer.forward_fit, layer.backward_fit, *costs


def first_alike(keys: Iterable[object]) -> list[int]:
    """Return by key the index of the first one that is equal.

    >>> first_alike("abab")
    [0, 1, 0, 1]
    """
    first: dict[object, int] = {}
    return [first.setdefault(key, index) for index, key in enumerate(keys)]


def _part(cost: Cost, half: Seconds) -> float:
    """Return the seconds of half a backward over those of a whole one."""
    seconds = getattr(cost, half)
    return 0.0 if seconds is None or not cost.backward_s else float(seconds / cost.backward_s)


def _up(value: float) -> int:
    # A hair of float error must not add a byte to a size that was measured exactly.
    return -int(-(value - 1e-6) // 1)


class Levels:
    """Sets of the first so many layers of an order, from none to all.

    >>> levels = Levels([4, 2, 3])
    >>> len(levels), sorted(levels[2]), levels.within(1, 4)
    (4, [2, 4], [2, 3])
    """

    def __init__(self, order: Sequence[int]) -> None:
        """Take the layers in the order in which they join."""
        self.order = tuple(order)
        self._rank = {layer: rank for rank, layer in enumerate(self.order)}
        self._sets: dict[int, frozenset[int]] = {}

    def __len__(self) -> int:
        return len(self.order) + 1

    def __getitem__(self, level: int) -> frozenset[int]:
        level = range(len(self))[level]
        if level not in self._sets:
            self._sets[level] = frozenset(self.order[:level])
        return self._sets[level]

    def within(self, first: int, stop: int) -> list[int]:
        """Return a stage's layers, in the order."""
        return sorted(filter(self._rank.__contains__, range(first, stop)), key=self._rank.__getitem__)


class Span(NamedTuple):
    """How many of its own layers a stage may recompute, the first ones of the order: from ``low`` to ``high``."""

    levels: Levels
    low: int = 0
    high: int | None = None
    """None: all."""

    def within(self, first: int, stop: int) -> Sets:
        """Return the sets of layers, the fewest first.

        >>> list(Span(Levels([4, 2, 3])).within(3, 5)), list(Span(Levels([4, 2, 3]), 1, 1).within(3, 5))
        ([(), (4,), (3, 4)], [(4,)])
        """
        layers = self.levels.within(first, stop)
        high = len(layers) if self.high is None else min(self.high, len(layers))
        return Sets(layers, range(min(self.low, high), high + 1))


class Sets:
    """Sets of a stage's layers, made when they are asked for: of a long stage there are many."""

    def __init__(self, layers: Sequence[int], counts: range) -> None:
        """Each has so many of the layers, the first ones."""
        self._layers, self._counts = layers, counts

    def __len__(self) -> int:
        return len(self._counts)

    def __getitem__(self, index: int) -> tuple[int, ...]:
        return tuple(sorted(self._layers[: self._counts[index]]))


_GATHERS: dict[Shard, tuple[Collective, ...]] = {"parameters": ("all_gather",)}
"""By what is sharded, what comes before a layer's forward, and before its backward."""
_SCATTERS: dict[Shard, tuple[Collective, ...]] = dict.fromkeys(SCATTERING, ("reduce_scatter",))
"""Likewise, what comes behind a layer's backward."""


_EXCHANGED: dict[Seconds, tuple[str, ...]] = {
    "forward_s": ("forward",),
    "backward_s": ("backward_input", "backward_weight"),
    "backward_input_s": ("backward_input",),
    "backward_weight_s": ("backward_weight",),
}
"""By field of :class:`Cost`, which of a part's sums belong to it."""


class StageSums:
    """Sums of forwards and backwards of stages, by form.

    What ranks of a team sum and gather meanwhile they wait for: it is part of these.
    """

    def __init__(
        self,
        costs: Sequence[LayerCosts],
        layers: Sequence[Sequence[Layer]],
        forms: Sequence[Form],
        links: LinkModel,
        sharing: Sharing,
        *,
        waits: bool,
    ) -> None:
        """Take times, layers and forms by number; all three may grow.

        With ``waits``, a device gathers and scatters between its computations.
        """
        self.costs, self.layers, self.forms, self.links = costs, layers, forms, links
        self._sharing, self.waits = sharing, waits

    @property
    def layer_count(self) -> int:
        """How many layers the model has."""
        return len(self.layers[0])

    @memoize
    def computing(self, field: Seconds, rows: float, form: int, adding: float = 0.0) -> list[float]:
        """Return :meth:`LayerCosts.sums`, with what the ranks of a team exchange meanwhile."""
        sums = self.costs[form].sums(field, rows, adding)
        if self.forms[form].team == 1:
            return sums
        return [own + more for own, more in zip(sums, self.exchanges(field, rows, form), strict=True)]

    @memoize
    def exchanges(self, field: Seconds, rows: float, form: int) -> list[float]:
        """Return, for every position, the seconds in which a team's ranks exchange in all layers before it."""
        alike, layers, points = self._exchanging_as(form), self.layers[form], _EXCHANGED[field]
        known = {at: self._exchanged_s(layers[at], points, rows, self.forms[form]) for at in set(alike)}
        return [0.0, *accumulate(known[at] for at in alike)]

    @memoize
    def _exchanging_as(self, form: int) -> list[int]:
        return first_alike(tuple((cost.micro_batch, cost.sums) for cost in layer.costs) for layer in self.layers[form])

    def _exchanged_s(self, layer: Layer, points: Sequence[str], rows: float, form: Form) -> float:
        sizes = [cost.micro_batch for cost in layer.costs]
        found = 0.0
        for at, each in enumerate(layer.costs[0].sums):
            if each.at in points:
                size = _up(at_rows(sizes, [float(cost.sums[at].bytes) for cost in layer.costs], rows))
                whole = each.ranks == form.team
                place = form.place if whole else self.links.best_place(each.ranks, form.place.level)
                found += self.links.collective_s(each.kind, size, place)
        return found

    @memoize
    def forward(self, rows: float, site: Site = ALONE_SITE) -> list[float]:
        """Return, for every position, the seconds of the forwards of all layers before it.

        Where parameters are sharded, a layer's are gathered while the layer before computes.
        """
        return self._moving(self.computing("forward_s", rows, site.form), _GATHERS.get(site.shard, ()), site)

    @memoize
    def backward(
        self, rows: float, adding: float, site: Site = ALONE_SITE, recompute: frozenset[int] = frozenset()
    ) -> list[float]:
        """Return, for every position, the seconds of the backwards of all layers before it.

        ``adding`` is the share of backwards that add to gradients, of sharded ones each rank to its part. Layers of
        ``recompute`` run forward again. Sharded gradients are reduced, and sharded parameters gathered, while another
        layer computes, unless the device waits for that.
        """
        sums = self.computing("backward_s", rows, site.form, site.adding(adding))
        sums = self._with_recomputation(sums, rows, recompute, site.form)
        return self._moving(sums, _SCATTERS.get(site.shard, ()) + _GATHERS.get(site.shard, ()), site)

    @memoize
    def halves(
        self, rows: float, adding: float, site: Site = ALONE_SITE, recompute: frozenset[int] = frozenset()
    ) -> tuple[list[float], list[float]]:
        """Return :meth:`backward` of backwards in two halves: of the inputs', and of the weights'.

        The first half runs layers forward again and reads sharded parameters; the second adds to gradients, which
        sharded ones are reduced of.
        """
        inputs = self.computing("backward_input_s", rows, site.form)
        inputs = self._with_recomputation(inputs, rows, recompute, site.form)
        weights = self.computing("backward_weight_s", rows, site.form, site.adding(adding))
        return (
            self._moving(inputs, _GATHERS.get(site.shard, ()), site),
            self._moving(weights, _SCATTERS.get(site.shard, ()), site),
        )

    def _with_recomputation(self, sums: list[float], rows: float, recompute: frozenset[int], form: int) -> list[float]:
        """Sums over layers, some of which run forward again."""
        if not recompute:
            return sums
        again = (self.recompute_s(at, rows, form) if at in recompute else 0.0 for at in range(len(sums) - 1))
        return [before + more for before, more in zip(sums, accumulate(again, initial=0.0), strict=True)]

    def recompute_s(self, layer: int, rows: float, form: int) -> float:
        """Return what running a layer forward again takes longer in a backward."""
        own = self.costs[form].recompute_s(layer, rows)
        if self.forms[form].team == 1:
            return own
        exchanged = self.exchanges("forward_s", rows, form)
        return own + exchanged[layer + 1] - exchanged[layer]

    def _moving(self, sums: list[float], operations: Sequence[Collective], site: Site) -> list[float]:
        """Sums over layers that communicate while they compute."""
        if not operations:
            return sums
        moved = map(sum, zip(*(self.collectives_s(each, site.place, site.form) for each in operations), strict=True))
        both = (self._both_s(sums[at + 1] - sums[at], seconds, site.place.level) for at, seconds in enumerate(moved))
        return list(accumulate(both, initial=0.0))

    def _both_s(self, computing_s: float, moving_s: float, level: Level) -> float:
        """Return what computing and communicating take that begin together.

        Each is slowed by the other while it lasts.
        """
        if self.waits:
            return computing_s + moving_s
        overlap = self._sharing.slowdowns.get(level)
        if overlap is None:
            return max(computing_s, moving_s)
        computing, moving = overlap.compute * computing_s, overlap.communication * moving_s
        if computing >= moving:
            both = computing_s + moving * (1 - 1 / overlap.compute)
        else:
            both = moving_s + computing * (1 - 1 / overlap.communication)
        return min(both, computing_s + moving_s)

    @memoize
    def in_turn_sums(self, operation: Collective, place: Place, form: int) -> list[float]:
        """Return, for every position, the seconds of gathering or scattering all layers before it one by one."""
        return list(accumulate(self.collectives_s(operation, place, form), initial=0.0))

    @memoize
    def collectives_s(self, operation: Collective, place: Place, form: int = 0) -> list[float]:
        """Return the seconds of gathering every layer's parameters, or of reducing its gradients, each rank a part."""
        gathers = operation == "all_gather"
        sizes = [layer.parameters_bytes if gathers else layer.trainable_bytes for layer in self.layers[form]]
        seconds = self.links.collectives_s(operation, np.array(sizes, dtype=np.float64), place).tolist()
        own = zip(self.layers[form], sizes, seconds, strict=True)
        return [sent_s + self._copies_s(operation, layer, size, place) for layer, size, sent_s in own]

    def _copies_s(self, operation: Collective, layer: Layer, size_bytes: int, place: Place) -> float:
        """Return what copying a layer into and out of buffers takes a device that waits for it.

        Curves that were measured have it. Else, adding to gradients tells: it reads two numbers and writes one, where a
        copy reads and writes one. What is gathered is copied whole, and each rank's part before.
        """
        if place.ranks < 2 or not (self.waits and layer.trainable_bytes):
            return 0.0
        if self.links.includes_copies(operation, place.level):
            return 0.0
        copies = 1 + 1 / place.ranks if operation == "all_gather" else 1.0
        return copies * 2 / 3 * layer.accumulate_s * size_bytes / layer.trainable_bytes


class ShareLimit(NamedTuple):
    """What some layers take."""

    least: int
    most: float
    layers: tuple[int, ...]
    """Ascending."""
    text: str
    """The limit, of the first of them."""

    def admits(self, shares: Sequence[float]) -> bool:
        """Whether replicas of these shares may hold the layers."""
        return self.least <= min(shares) and max(shares) <= self.most

    def overlaps(self, first: int, stop: int) -> bool:
        """Whether any of the layers is among ``first:stop``."""
        return any(first <= layer < stop for layer in self.layers)


def share_limits(profile: Profile) -> tuple[ShareLimit, ...]:
    """Return the limits of a profile's layers, each once."""
    found: dict[tuple[int, float], list[int]] = {}
    for index, layer in enumerate(profile.layers):
        most = float("inf") if layer.most_samples is None else layer.most_samples
        if (layer.least_samples, most) != (1, float("inf")):
            found.setdefault((layer.least_samples, most), []).append(index)
    limits = []
    for (least, most), own in found.items():
        how_many = f"at least {least}" if most == float("inf") else f"{least} to {most}"
        text = f"layer {profile.layers[own[0]].name} takes {how_many} samples of a micro-batch at once"
        limits.append(ShareLimit(least, most, tuple(own), text))
    return tuple(limits)
