"""CostModel: the one place where seconds and bytes of a plan come from; and how long its actions take."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import accumulate, count
from typing import NamedTuple

from autopar.errors import FileError, UsageError
from autopar.formats.cluster import Cluster, Device, Level
from autopar.formats.profile import Layer, Profile
from autopar.formats.program import (
    BACKWARD,
    CORRECT,
    FORWARD,
    INPUT_BACKWARD,
    PREDICT,
    REDUCE,
    REDUCE_TIED,
    SENDS,
    UPDATE,
    WEIGHT_BACKWARD,
    ActionPrices,
    Program,
    RankBytes,
    RankPrices,
    price_key,
)
from autopar.hardware.kinds import kinds_of
from autopar.hardware.topology import Place, devices_of
from autopar.options.plan import PlanOptions
from autopar.ownership import Replicas, Samples, Shard, meetings
from autopar.planner.candidate import Candidate, CandidateStage, Lead, groups, has_chunks, plain, splits_backward
from autopar.planner.costs.activations import rows_bytes
from autopar.planner.costs.communication import Flows, LinkModel, Sharing
from autopar.planner.costs.layers import LayerCosts, Levels, StageSums, share_limits
from autopar.planner.costs.memory import MemoryModel, backwards, peak_terms_of, rank_peaks, state_of
from autopar.planner.costs.queues import NOTHING, PassSeconds, Site
from autopar.planner.costs.reductions import Reduction, Reductions

UNLIMITED_BYTES = 2**62
MOST_SHORTFALLS = 2**18
"""Stages whose shortfall of memory is remembered."""
MOST_BYTES = 2**60
"""Of all layers together; sums and differences of a few such numbers are exact in 64 bits."""


class Single(NamedTuple):
    """Why a layer may have one replica only, and what lifts that, if anything does."""

    reason: str
    remedy: str


def _kept(layers: tuple[Layer, ...], options: PlanOptions) -> tuple[Layer, ...]:
    """Return layers with what is kept of their trained parameters from step to step: an average is divided, too."""
    if options.ema_decay is None:
        return layers
    sizes = (layer.optimizer_bytes + layer.trainable_bytes for layer in layers)
    return tuple(layer.model_copy(update={"optimizer_bytes": size}) for layer, size in zip(layers, sizes, strict=True))


class CostModel:
    """Prices stages, messages and reductions; search, bounds, oracle and simulator all ask it."""

    def __init__(self, profile: Profile, cluster: Cluster, options: PlanOptions) -> None:
        self.profile, self.cluster, self.divisible = profile, cluster, options.divisible
        self.batch = options.batch or profile.batch
        if self.batch >= 2**31:
            raise UsageError(f"`batch` must be below {2**31}, found {self.batch}")
        self.notes: list[str] = []
        self.devices = self._devices(cluster, options.gpus or len(cluster.devices))
        kinds = kinds_of(profile, self.devices, options.times_of)
        self.notes += kinds.notes
        self.stands = kinds.stands
        """The kind of the profile whose times stand for those of others; none where none does."""
        self.kinds = tuple(each.device for each in kinds.costs)
        self.kind_of = [kinds.of_type[device.type] for device in self.devices]
        """By device, the index of its kind."""
        self.listed = tuple(range(len(self.devices)))
        """By device, where the cluster lists it."""
        self.limits_bytes = [self._limit_bytes(device, options) for device in range(len(self.devices))]
        self.layers = [LayerCosts(_kept(each.layers, options)) for each in kinds.costs]
        """By kind."""
        self.flows = Flows(profile)
        self.links = LinkModel(cluster, self.devices, options.bytes_per_s, latencies=not options.divisible)
        self.sharing = Sharing.of(cluster, self.devices, options.bytes_per_s)
        self.memory = [MemoryModel(layers, self.flows, profile.updates_at_once) for layers in self.layers]
        """By kind."""
        self._check_sums()
        self.layer_count = len(profile.layers)
        self.every_layer = frozenset(range(self.layer_count))
        self.single = _single(profile, options)
        """Layers that may have one replica only, and why."""
        self.share_limits = share_limits(profile)
        self._price()

    def _limit_bytes(self, device: int, options: PlanOptions) -> int:
        whole = self.devices[device].memory_bytes if options.memory_bytes is None else options.memory_bytes
        return max(0, whole - self.kinds[self.kind_of[device]].reserved_bytes)

    def _check_sums(self) -> None:
        """Refuse sizes whose sums could exceed the integers of arrays.

        Raises:
            FileError: names the layer that holds most.
        """
        most = max(max(memory.most(1, self.batch), memory.most(self.batch, 1)) for memory in self.memory)
        if most <= MOST_BYTES:
            return
        layers = self.profile.layers
        held = (
            layer.parameters_bytes + layer.optimizer_bytes + layer.costs[-1].saved_bytes + layer.costs[-1].peak_bytes
            for layer in layers
        )
        largest = max(enumerate(held), key=lambda each: each[1])[0]
        raise FileError(
            f"the layers may hold {most} bytes in a step of {self.batch} samples, more than the {MOST_BYTES} that are "
            f"planned with; $.layers[{largest}] ({layers[largest].name}) holds most"
        )

    def _price(self) -> None:
        """Begin the prices that follow from the times of layers, and from the links."""
        # Gloo's collectives make a CPU's ranks wait, whatever else overlaps.
        layers, waits = self.profile.layers, self.profile.device.type == "cpu"
        self.sums = StageSums(self.layers, layers, self.links, self.sharing, waits=waits)
        self.seconds = PassSeconds(self.sums)
        self.reductions = Reductions(self.seconds, self.flows, divisible=self.divisible)
        self.recompute_levels = cache(self._recompute_levels)
        self._stage_shortfall = lru_cache(MOST_SHORTFALLS)(self._computed_shortfall)

    def _devices(self, cluster: Cluster, count: int) -> list[Device]:
        listed = cluster.devices
        plural = "s" if len(listed) > 1 else ""
        if count > len(listed):
            more = count - len(listed)
            where = (
                ", in the same node (`cluster` describes others)" if {device.node for device in listed} == {0} else ""
            )
            self.notes.append(
                f"the cluster lists {len(listed)} device{plural}; planning for {count} assumes {more} more like them"
                + where
            )
        return devices_of(cluster, count)

    def among(self, devices: Sequence[int]) -> CostModel:
        """Return this model of some of its devices, which are then counted from 0."""
        other = copy(self)
        other.devices = [self.devices[device] for device in devices]
        other.kind_of = [self.kind_of[device] for device in devices]
        other.listed = tuple(self.listed[device] for device in devices)
        other.limits_bytes = [self.limits_bytes[device] for device in devices]
        other.links = self.links.among(devices)
        other.sharing = self.sharing.among(devices)
        other._stage_shortfall = lru_cache(MOST_SHORTFALLS)(other._computed_shortfall)
        return other

    def with_layer_costs(self, layers: LayerCosts) -> CostModel:
        """Return this model with other times of the layers, of a single kind; memory stays as it was."""
        other = copy(self)
        other.layers = [layers]
        other._price()
        return other

    def without(self, *, links: bool = False, memory: bool = False) -> CostModel:
        """Return this model with communication that takes no time, or with devices whose memory has no limit."""
        other = copy(self)
        if links:
            other.links = LinkModel(self.cluster, self.devices, float("inf"), latencies=False)
        if memory:
            other.limits_bytes = [UNLIMITED_BYTES] * len(self.devices)
        other._price()
        return other

    def shares(self, rows: int, replicas: Replicas) -> tuple[float, ...]:
        """Return the rows of a micro-batch that each replica takes."""
        return replicas.shares(rows, divisible=self.divisible)

    def types(self, devices: Iterable[int]) -> tuple[str, ...]:
        """Return the kinds of some devices, each once; none where the profile has costs for one kind only."""
        if len(self.kinds) == 1:
            return ()
        return tuple(dict.fromkeys(self.kinds[self.kind_of[device]].name for device in devices))

    def limit_bytes(self, devices: Iterable[int]) -> int:
        """Return the memory of the smallest of some devices."""
        return min(self.limits_bytes[device] for device in devices)

    def forward_s(self, stage: CandidateStage, replica: int) -> float:
        """Return the seconds of one forward of a stage's replica."""
        site = self._site(stage, replica)
        return float(self.seconds.forward(stage.first, stage.stop, stage.shares[replica], site))

    def backward_s(self, stage: CandidateStage, replica: int, micro_batches: int) -> float:
        """Return the seconds of one backward of a stage's replica, of ``micro_batches`` in a step."""
        rows, site = stage.shares[replica], self._site(stage, replica)
        adding = self.adding(micro_batches, stage.replicas.width)
        again = self.seconds.again(stage.recompute, rows, adding, site) if stage.recompute else NOTHING
        return float(self.seconds.backward(stage.first, stage.stop, rows, adding, site, again))

    @property
    def has_halves(self) -> bool:
        """Whether the halves of backwards are known on every kind of device that is planned for."""
        return all(self.layers[kind].has_halves for kind in set(self.kind_of))

    def halves_s(self, stage: CandidateStage, replica: int, micro_batches: int) -> tuple[float, float]:
        """Return the seconds of the input half and of the weight half of a backward of a stage's replica."""
        rows, site = stage.shares[replica], self._site(stage, replica)
        adding, recompute = self.adding(micro_batches, stage.replicas.width), frozenset(stage.recompute)
        input_s, weight_s = self.seconds.halves(stage.first, stage.stop, rows, adding, site, recompute)
        return float(input_s), float(weight_s)

    def _site(self, stage: CandidateStage, replica: int) -> Site:
        kind = self.kind_of[stage.devices[replica]]
        return Site.of(stage.shard, self.links.place(stage.devices), kind)

    def unlike_replicas(self, stage: CandidateStage) -> dict[tuple[float, int], int]:
        """Return a replica by rows and kind of device: the first of those that have as many on such a one."""
        every = [*zip(stage.shares, map(self.kind_of.__getitem__, stage.devices), strict=True)]
        return dict(zip(reversed(every), reversed(range(len(every))), strict=True))

    def _reducing(self, stage: CandidateStage) -> tuple[int, int, Place, Shard]:
        """Return what a stage's reduction and update depend on besides the kind of device; see :class:`Reduction`."""
        return stage.first, stage.stop, self.links.place(stage.devices), stage.shard

    def _kinds(self, stage: CandidateStage) -> set[int]:
        return {self.kind_of[device] for device in stage.devices}

    @staticmethod
    def adding(micro_batches: int, ranks: int) -> float:
        """Return the share of a stage's backwards that add to gradients.

        The step's first one makes them, except among replicas, which add to buffers from the first one on. The time of
        a backward is the average one's.
        """
        return 1.0 if ranks > 1 else (micro_batches - 1) / micro_batches

    def _recompute_levels(self, rows: float, kind: int = 0) -> Levels:
        """Return sets of layers to recompute, from none to all that free memory, each a part of the next.

        Layers join in the order of the seconds that they cost per byte freed; those that cannot run twice are in none.
        """
        ranked = []
        for layer, each in enumerate(self.profile.layers):
            if each.writes is None or not each.writes.once:
                freed = self.memory[kind].freed_bytes(layer, rows)
                if freed > 0:
                    ranked.append((self.layers[kind].recompute_s(layer, rows) / freed, layer))
        return Levels([layer for _, layer in sorted(ranked)])

    def replicated_single(self, stages: Iterable[CandidateStage]) -> str | None:
        """Return why some stages are not to have as many replicas as they have; None where they may."""
        if not self.single:
            return None
        wide = (stage for stage in stages if stage.replicas.width > 1)
        found = (layer for stage in wide for layer in range(stage.first, stage.stop) if layer in self.single)
        layer = next(found, None)
        return None if layer is None else self.single[layer].reason

    def update_s(self, stage: CandidateStage) -> float:
        """Return the seconds of a stage's optimizer step, and of gathering what its replicas updated for each other."""
        return max(self.updating_s(*self._reducing(stage), kind) for kind in self._kinds(stage))

    def updating_s(self, first: int, stop: int, place: Place, shard: Shard, kind: int = 0) -> float:
        """Return :meth:`update_s` of layers ``first:stop`` on one kind of device."""
        seconds = self._own_update_s(first, stop, kind)
        if shard == "none":
            return seconds
        if shard == "parameters":
            return seconds / place.ranks
        if self.sums.waits:
            sums = self.sums.in_turn_sums("all_gather", place, kind)
            return seconds / place.ranks + (sums[stop] - sums[first])
        updated = sum(layer.trainable_bytes for layer in self.profile.layers[first:stop])
        return seconds / place.ranks + self.links.collective_s("all_gather", updated, place)

    def _own_update_s(self, first: int, stop: int, kind: int) -> float:
        sums = self.layers[kind].update_sums
        seconds = sums[stop] - sums[first]
        for tied in self.flows.tied:
            # The first layer's time has a shared parameter's; a stage without that layer updates a copy of its own.
            owner = tied.layers[0]
            if owner < first and any(first <= layer < stop for layer in tied.layers):
                seconds += (sums[owner + 1] - sums[owner]) * tied.share_of(self.profile.layers[owner])
        return seconds

    def reduce_s(self, stage: CandidateStage) -> float:
        """Return the seconds that the last reduction of a stage's gradients occupies the link."""
        return max(self.reductions.occupied_s(Reduction(*self._reducing(stage), kind)) for kind in self._kinds(stage))

    def replica_exposed_s(self, stage: CandidateStage, replica: int, *, split: bool = False) -> float:
        """Return how long after a replica's last backward, or its weight half, the reduction of its gradients ends."""
        kind, rows = self.kind_of[stage.devices[replica]], stage.shares[replica]
        return self.reductions.exposed_s(Reduction(*self._reducing(stage), kind, rows, split))

    def tied_s(self, index: int, devices: Sequence[int]) -> float:
        """Return the seconds of reducing parameter ``Profile.tied[index]`` among the ranks that hold it."""
        return self.links.collective_s("all_reduce", self.flows.tied[index].bytes, self.links.place(devices))

    def tied_between(self, stages: Sequence[CandidateStage]) -> list[tuple[int, tuple[int, ...]]]:
        """Return (index into ``Profile.tied``, stages) of every trained parameter that several stages hold."""
        stops = [stage.stop for stage in stages]
        found = []
        for tied in self.flows.tied:
            held = (layer for layer in tied.layers if stages[0].first <= layer < stops[-1])
            holders = tuple(sorted({bisect_right(stops, layer) for layer in held}))
            if tied.trainable and len(holders) > 1:
                found.append((tied.number, holders))
        return found

    def message_bytes(self, samples: Samples, rows: int, bytes_per_sample: int) -> float:
        """Return the bytes of a message of a micro-batch of ``rows``.

        Where micro-batches divide freely, all of a boundary's tensors cross one link, as planners in papers have it.
        """
        return bytes_per_sample * (rows if self.divisible else samples.rows)

    def message_s(self, size_bytes: float, sender: int, receiver: int) -> float:
        """Return the seconds of a message between two devices."""
        return self.links.message_s(size_bytes, self.links.topology.pair(sender, receiver))

    def peak_bytes(self, candidate: Candidate) -> list[int]:
        """Return the peak memory of every stage's largest replica, with what else its rank holds."""
        limits = (self.limit_bytes(stage.devices) for stage in candidate.stages)
        return [short + limit for short, limit in zip(self.shortfalls(candidate), limits, strict=True)]

    def shortfalls(self, candidate: Candidate) -> list[int]:
        """Return by how many bytes every stage exceeds its smallest device; at most 0 where it fits."""
        if plain(candidate.schedule):
            return [self.shortfall(candidate, index) for index in range(len(candidate.stages))]
        peaks = rank_peaks(self.memory, self.kind_of, candidate)
        limits = (self.limit_bytes(stage.devices) for stage in candidate.stages)
        return [peak - limit for peak, limit in zip(peaks, limits, strict=True)]

    def state_bytes(self, candidate: Candidate, index: int) -> tuple[int, int]:
        """Return the most that a stage's replica holds of parameters and optimizer's state, and of gradients."""
        stage, found = candidate.stages[index], []
        for rows, kind in self.unlike_replicas(stage):
            terms = peak_terms_of(stage, candidate.micro_batches, 0, rows)
            parts = self.memory[kind].parts(stage.first, stage.stop, rows, terms.recompute)
            found.append(state_of(parts, terms)[:2])
        kept, gradients = map(max, zip(*found, strict=True))
        return int(kept), int(gradients)

    def shortfall(self, candidate: Candidate, index: int) -> int:
        """Return by how many bytes one stage exceeds its smallest device."""
        if not plain(candidate.schedule):
            return self.shortfalls(candidate)[index]
        stages, count = candidate.stages, candidate.micro_batches
        stage = stages[index]
        made = stage.first, stage.stop
        scattered = self.flows.forked_tensors(*made) or self.flows.constants(*made)
        cuts = tuple(later.stop for later in stages[index + 1 :]) if scattered else ()
        before = stages[:index] if self.flows.far_tensors(*made) else stages[max(0, index - 1) : index]
        return self._stage_shortfall(stage, count, cuts, stage.leads(before, count))

    def _computed_shortfall(
        self, stage: CandidateStage, count: int, cuts: tuple[int, ...], leads: tuple[Lead, ...]
    ) -> int:
        """Return :meth:`shortfall` of a stage among others, which are as of :meth:`.memory.MemoryModel.further`.

        Where those before the last do not matter, ``leads`` are without them.
        """
        lead = leads[-1].turns if leads else 0
        peak = max(
            self.memory[kind].peak(stage.first, stage.stop, peak_terms_of(stage, count, lead, rows), cuts, leads)
            for rows, kind in self.unlike_replicas(stage)
        )
        return peak - self.limit_bytes(stage.devices)


def _single(profile: Profile, options: PlanOptions) -> dict[int, Single]:
    found = {}
    for index, layer in enumerate(profile.layers):
        writes = layer.writes
        if writes is not None and writes.single is not None and (writes.once or not options.replicate_state):
            remedy = "" if writes.once else "; `replicate_state='first'` or average allows more"
            found[index] = Single(f"layer {layer.name} has one replica, since {writes.single}", remedy)
    return found


@dataclass(frozen=True)
class Durations:
    """Seconds of every action, by replica: those of all stages in order, as ranks are, where each runs one stage."""

    overhead_s: float
    stage: list[int] = field(default_factory=list)
    """Of every replica."""
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    exposed_s: list[float] = field(default_factory=list)
    """From the end of a replica's last backward to the end of its gradients' reduction."""
    reduce_s: list[float] = field(default_factory=list)
    update_s: list[float] = field(default_factory=list)
    """Of a rank that runs several stages, all at the first of them."""
    prepare_s: list[float] = field(default_factory=list)
    """Of weights that are predicted or corrected, which reads and writes about what an update does; empty: as it."""
    message_s: dict[tuple[int, int], float] = field(default_factory=dict)
    """By (sending replica, receiving replica), of different ranks."""
    tied_s: list[float] = field(default_factory=list)
    """By index into the plan's shared parameters."""
    turns: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """(first, period) of the micro-batches that a pair's messages carry; only where not all do."""
    input_s: list[float] = field(default_factory=list)
    """Halves of a backward; empty where the schedule has none."""
    weight_s: list[float] = field(default_factory=list)
    last_s: list[float] = field(default_factory=list)
    """Of the last that makes gradients: a whole backward, or a weight half; empty like the halves."""
    rank: list[int] = field(default_factory=list)
    """Of every replica; empty where ranks run one stage each."""

    @property
    def ranks(self) -> Sequence[int]:
        """The rank of every replica."""
        return self.rank or range(len(self.stage))

    @property
    def compute_s(self) -> dict[str, list[float]]:
        """Seconds of every replica's computations, by the kind of action."""
        return {
            FORWARD: self.forward_s,
            BACKWARD: self.backward_s,
            INPUT_BACKWARD: self.input_s,
            WEIGHT_BACKWARD: self.weight_s,
            UPDATE: self.update_s,
            **dict.fromkeys((PREDICT, CORRECT), self.prepare_s or self.update_s),
        }


def durations(costs: CostModel, candidate: Candidate) -> Durations:
    """Return the durations of a candidate's actions."""
    found = Durations(costs.profile.step_overhead_s)
    columns = found.forward_s, found.backward_s, found.exposed_s, found.input_s, found.weight_s, found.last_s
    ends = backwards(candidate) if splits_backward(candidate.schedule) else None
    for index, stage in enumerate(candidate.stages):
        reduce_s, update_s = costs.reduce_s(stage), costs.update_s(stage)
        alike: dict[tuple[float, int], tuple[float, ...]] = {}
        for replica, key in enumerate(zip(stage.shares, map(costs.kind_of.__getitem__, stage.devices), strict=True)):
            if key not in alike:
                backward_s = costs.backward_s(stage, replica, candidate.micro_batches)
                whole = ends is None or ends[index].ends_whole
                exposed_s = costs.replica_exposed_s(stage, replica, split=not whole)
                alike[key] = costs.forward_s(stage, replica), backward_s, exposed_s
                if ends is not None:
                    input_s, weight_s = costs.halves_s(stage, replica, candidate.micro_batches)
                    alike[key] += input_s, weight_s, backward_s if whole else weight_s
            for column, seconds in zip(columns, alike[key], strict=False):
                column.append(seconds)
        width = stage.replicas.width
        found.stage.extend([index] * width)
        found.reduce_s.extend([reduce_s] * width)
        found.update_s.extend([update_s] * width)
    if has_chunks(candidate.schedule):
        _share_ranks(candidate, found)
    _price_messages(costs, candidate, found)
    for tied, holders in costs.tied_between(candidate.stages):
        devices = list(dict.fromkeys(each for index in holders for each in candidate.stages[index].devices))
        found.tied_s.append(costs.tied_s(tied, devices))
    return found


def prices_of(program: Program, times: Durations) -> ActionPrices:
    """Return what every action of a program is priced at, by rank."""
    owner = {place: at for at, place in enumerate(zip(times.ranks, times.stage, strict=True))}
    compute_s = times.compute_s
    found = []
    for rank, actions in enumerate(program.ranks):
        seconds: dict[str, float] = {}
        exposed_s: dict[str, float] = {}
        for key, action in {price_key(action): action for action in actions}.items():
            own = owner[rank, action.stage]
            if action.kind in SENDS:
                seconds[key] = times.message_s[own, owner[action.peer, action.peer_stage]]
            elif action.kind == REDUCE_TIED:
                seconds[key] = times.tied_s[action.micro_batch]
            elif action.kind == REDUCE:
                seconds[key], exposed_s[key] = times.reduce_s[own], times.exposed_s[own]
            elif action.kind in compute_s:
                seconds[key] = compute_s[action.kind][own]
        found.append(RankPrices(seconds, exposed_s))
    return ActionPrices(times.overhead_s, tuple(found))


def rank_bytes(costs: CostModel, candidate: Candidate) -> tuple[RankBytes, ...]:
    """Return what every rank holds throughout a step, and what its layers hold of a micro-batch."""
    found = []
    for chunks in groups(candidate.stages):
        own = [candidate.stages[at] for at in chunks]
        for replica in range(own[0].replicas.width):
            parts = [_replica_bytes(costs, candidate, stage, replica) for stage in own]
            layers = {name: each for part in parts for name, each in part.layers.items()}
            limit = costs.limit_bytes((own[0].devices[replica],))
            state, update = sum(part.state for part in parts), sum(part.update for part in parts)
            found.append(RankBytes(state, update, layers, limit))
    return tuple(found)


def _replica_bytes(costs: CostModel, candidate: Candidate, stage: CandidateStage, replica: int) -> RankBytes:
    """Return what a replica of a stage holds."""
    memory, rows = costs.memory[costs.kind_of[stage.devices[replica]]], stage.shares[replica]
    terms, parts = peak_terms_of(stage, candidate.micro_batches, 0, rows), memory.parts(stage.first, stage.stop, rows)
    kept, gradients, update = map(int, state_of(parts, terms))
    kept += len(stage.samples[replica].of(candidate.micro_batches)) * int(rows_bytes(rows, parts.inputs))
    alone = terms.replicas == 1
    layers = {}
    for layer in range(stage.first, stage.stop):
        layers[costs.profile.layers[layer].name] = memory.layer_bytes(layer, rows, with_gradients=alone)
    return RankBytes(kept + (int(parts.lasting) if alone else gradients), update, layers)


def _share_ranks(candidate: Candidate, times: Durations) -> None:
    """Note the ranks of replicas that share them."""
    stages = candidate.stages
    starts = [0, *accumulate(candidate.widths)]
    times.rank.extend([0] * starts[-1])
    ranks = count()
    for chunks in groups(stages):
        for replica in range(stages[chunks[0]].replicas.width):
            rank, mine = next(ranks), [starts[stage] + replica for stage in chunks]
            update_s = sum(times.update_s[at] for at in mine)
            for at in mine:
                times.rank[at], times.update_s[at] = rank, 0.0
            times.update_s[mine[0]] = update_s


def _price_messages(costs: CostModel, candidate: Candidate, times: Durations) -> None:
    stages = candidate.stages
    starts = [0, *accumulate(candidate.widths)]
    level = costs.links.topology.pair
    for producer, consumer, flow in costs.flows.exchanges(candidate.cuts):
        sending, receiving = stages[producer], stages[consumer]
        alike: dict[tuple[float, Level], tuple[float, ...]] = {}
        for sender, receiver, samples in meetings(sending, receiving):
            pair = starts[producer] + sender, starts[consumer] + receiver
            devices = sending.devices[sender], receiving.devices[receiver]
            if devices[0] == devices[1]:
                continue
            key = samples.rows, level(*devices)
            if key not in alike:
                rows = costs.message_bytes(samples, candidate.micro_batch_size, 1)
                sizes = rows * flow.bytes_per_sample, rows * flow.gradient_bytes_per_sample
                alike[key] = tuple(costs.links.message_s(size, key[1]) for size in sizes)
            times.message_s[pair] = alike[key][0]
            if flow.gradients:
                times.message_s[pair[::-1]] = alike[key][1]
            if samples.period > 1:
                times.turns[pair] = times.turns[pair[::-1]] = samples.first, samples.period
