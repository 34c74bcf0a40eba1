"""CostModel: the one place where seconds and bytes of a plan come from."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from copy import copy
from functools import cache, lru_cache
from typing import NamedTuple

from autopar.errors import FileError, UsageError
from autopar.formats.cluster import LEVELS, Cluster, Device
from autopar.formats.profile import Profile
from autopar.hardware.kinds import kinds_of
from autopar.hardware.topology import Place, devices_of
from autopar.options.plan import PlanOptions
from autopar.ownership import Replicas, Samples, Shard
from autopar.planner.candidate import Candidate, CandidateStage, Lead, plain
from autopar.planner.costs.communication import Flows, LinkModel, Sharing
from autopar.planner.costs.curves import Collective
from autopar.planner.costs.forms import Forms
from autopar.planner.costs.layers import Form, LayerCosts, Levels, Site, StageSums, share_limits
from autopar.planner.costs.memory import state_of
from autopar.planner.costs.queues import NOTHING, PassSeconds
from autopar.planner.costs.rank_memory import peak_terms_of, rank_peaks
from autopar.planner.costs.reductions import Reduction, Reductions
from autopar.planner.teams import spans, team_choices

UNLIMITED_BYTES = 2**62
MOST_PEAKS = 2**18
"""Stages whose peak is remembered."""
MOST_TEAMS = 2**14
"""Devices of stages for which it is remembered what teams of them are."""
MOST_BYTES = 2**60
"""Of all layers together; sums and differences of a few such numbers are exact in 64 bits."""


class Single(NamedTuple):
    """Why a layer may have one replica only, and what lifts that, if anything does."""

    reason: str
    remedy: str


class Peak(NamedTuple):
    """What a stage's replica holds at most, and may hold."""

    bytes: int
    limit: int

    @property
    def short(self) -> int:
        """By how many bytes it exceeds what it may hold."""
        return self.bytes - self.limit


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
        self.flows = Flows(profile)
        every = [each.layers for each in kinds.costs]
        self.forms = Forms(profile, every, self.flows, averaged=options.ema_decay is not None)
        self.layers, self.memory = self.forms.costs, self.forms.memory
        """By form: first those of single devices, by kind."""
        self.links = LinkModel(cluster, self.devices, options.bytes_per_s, latencies=not options.divisible)
        self.sharing = Sharing.of(cluster, self.devices, options.bytes_per_s)
        self._check_sums()
        self.layer_count = len(profile.layers)
        self.every_layer = frozenset(range(self.layer_count))
        self.once = frozenset(at for at, layer in enumerate(profile.layers) if layer.writes and layer.writes.once)
        """Layers that cannot run twice."""
        self.single = _single(profile, options)
        """Layers that may have one replica only, and why."""
        self.share_limits = share_limits(profile)
        self._price()
        self._across_nodes = options.across_nodes
        self.teams = team_choices(profile, self.most_in_team(range(len(self.devices))), options)
        """A replica of every sort that a search looks at: a single device, and teams."""
        self.spans = {team: tuple(spans(profile, team)) for team in self.teams if team.team > 1}
        """Layers that a stage of such teams has, to divide something."""
        self.across_nodes, self.recomputes = options.across_nodes, options.recompute != "none"
        self._may_mix = options.weight_policy == "sync" and not options.divisible

    def _limit_bytes(self, device: int, options: PlanOptions) -> int:
        whole = self.devices[device].memory_bytes if options.memory_bytes is None else options.memory_bytes
        return max(0, whole - self.kinds[self.kind_of[device]].reserved_bytes)

    def most_in_team(self, devices: Iterable[int]) -> int:
        """Return the most devices of a kind, of these, that may run a replica together."""
        nodes = self.links.topology.nodes
        places = ((self.kind_of[each], 0 if self._across_nodes else nodes[each]) for each in devices)
        return max(Counter(places).values(), default=0)

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
        forms, waits = self.forms, self.profile.device.type == "cpu"
        self.sums = StageSums(self.layers, forms.layers, forms.every, self.links, self.sharing, waits=waits)
        self.seconds = PassSeconds(self.sums)
        self.reductions = Reductions(self.seconds, forms.flows, divisible=self.divisible)
        self.recompute_levels = cache(self._recompute_levels)
        self.stage_peak = lru_cache(MOST_PEAKS)(self._computed_peak)
        self._stand()

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
        most = self.most_in_team(devices)
        other.teams = tuple(each for each in self.teams if each.team <= most)
        other.stage_peak = lru_cache(MOST_PEAKS)(other._computed_peak)
        other._stand()
        return other

    def _stand(self) -> None:
        """Begin with what depends on where devices stand."""
        self._team_forms = lru_cache(MOST_TEAMS)(self._new_team_forms)
        self._parts_place = lru_cache(MOST_TEAMS)(self._new_parts_place)

    def with_layer_costs(self, layers: LayerCosts) -> CostModel:
        """Return this model with other times of the layers, in whatever form they run; memory stays as it was."""
        other = copy(self)
        other.layers = [layers] * len(self.layers)
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

    def devices_of(self, kind: int) -> list[int]:
        """Return the devices of a kind, ascending."""
        return [device for device, own in enumerate(self.kind_of) if own == kind]

    @property
    def mixes(self) -> bool:
        """Whether a search gives a stage devices of several kinds: for a step, not for a period."""
        return self._may_mix and len(set(self.kind_of)) > 1

    def text(self, candidate: Candidate) -> str:
        """Return a candidate's stages in the form that ``autopar plan --stages`` takes, with kinds of several."""
        if len(set(self.kind_of)) == 1:
            return candidate.text()
        found = []
        for stage in candidate.stages:
            counts = Counter(self.devices[device].type for device in stage.firsts)
            each = (f"{stage.replicas._replace(width=count).text}@{name}" for name, count in sorted(counts.items()))
            found.append(f"{stage.layers_text()}:{'+'.join(each)}")
        return ",".join(found)

    def limit_bytes(self, devices: Iterable[int]) -> int:
        """Return the memory of the smallest of some devices."""
        return min(self.limits_bytes[device] for device in devices)

    def measured_rows(self, form: int, most: int) -> list[int]:
        """Return rows of a replica between which seconds are linear, so that those of a row rise or fall."""
        measured = {cost.micro_batch for layer in self.forms.layers[form] for cost in layer.costs}
        return sorted({1, most} | {each for each in measured if each < most})

    def is_mixed(self, stage: CandidateStage) -> bool:
        """Whether a stage has devices of several kinds."""
        return len({self.kind_of[device] for device in stage.devices}) > 1

    def limit_of(self, stage: CandidateStage, form: int) -> int:
        """Return the memory of the smallest of a stage's devices that are of the kind of a form."""
        kind = self.forms.every[form].kind
        return self.limit_bytes(device for device in stage.devices if self.kind_of[device] == kind)

    def with_teams(self, teams: tuple[Replicas, ...]) -> CostModel:
        """Return this model for a search that looks at some sorts of replicas only."""
        other = copy(self)
        other.teams = teams
        return other

    def with_kinds_apart(self) -> CostModel:
        """Return this model for a search that gives every stage devices of one kind."""
        other = copy(self)
        other._may_mix = False
        return other

    def form(self, kind: int, replicas: Replicas, place: Place | None = None) -> int:
        """Return the number of the form of replicas on a kind of device; of teams in one node, if no place is said.

        Raises:
            UsageError: the profile does not say what parts of layers cost.
        """
        if replicas.team == 1:
            return kind
        return self.forms.number(Form(kind, replicas.team, replicas.sliced, place or Place(replicas.team)))

    def form_of(self, stage: CandidateStage, replica: int = 0) -> int:
        """Return the number of the form that runs a stage's replica.

        Raises:
            UsageError: a team has devices of several kinds, or the profile does not say what parts of layers cost.
        """
        return self.kind_of[stage.devices[replica]] if stage.team == 1 else self.forms_of(stage)[replica]

    def forms_of(self, stage: CandidateStage) -> Sequence[int]:
        """Return :meth:`form_of` all replicas of a stage."""
        if stage.team == 1:
            return [self.kind_of[device] for device in stage.devices]
        found = self._team_forms(stage.devices, stage.team, stage.sliced)
        if found is None:
            mixed = next(team for team in stage.teams if len({self.kind_of[device] for device in team}) > 1)
            raise UsageError(
                f"`stages`: devices of several kinds ({' and '.join(self.types(mixed))}) would run a replica of layers "
                f"{stage.layers_text()} together; give it devices of one"
            )
        return found

    def leading_form(self, stage: CandidateStage) -> int:
        """Return the form by which the layers of a stage are ordered to run again: that of the first of its kinds."""
        return min(self.forms_of(stage), key=lambda form: self.forms.every[form].kind)

    def _new_team_forms(self, devices: tuple[int, ...], team: int, sliced: bool) -> Sequence[int] | None:
        """Return the forms of teams; None where one has devices of several kinds."""
        found = []
        for own in (devices[at : at + team] for at in range(0, len(devices), team)):
            if len({self.kind_of[device] for device in own}) > 1:
                return None
            found.append(self.forms.number(Form(self.kind_of[own[0]], team, sliced, self.links.place(own))))
        return found

    def copies_place(self, stage: CandidateStage) -> Place:
        """Return where the ranks stand that have the same part of a stage; of several parts, the farthest apart."""
        return self.links.place(stage.devices) if stage.team == 1 else self._parts_place(stage.devices, stage.team)

    def _new_parts_place(self, devices: tuple[int, ...], team: int) -> Place:
        places = (self.links.place(devices[part::team]) for part in range(team))
        return max(places, key=lambda each: (LEVELS.index(each.level), each.nodes, -each.fewest))

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
        return Site.of(stage.shard, self.copies_place(stage), self.form_of(stage, replica))

    def unlike_replicas(self, stage: CandidateStage) -> dict[tuple[float, int], int]:
        """Return a replica by rows and form: the first of those that have as many in such a one."""
        every = [*zip(stage.shares, self.forms_of(stage), strict=True)]
        return dict(zip(reversed(every), reversed(range(len(every))), strict=True))

    def slowest(self, stage: CandidateStage) -> int:
        """Return the slowest replica of a stage of several kinds of devices; of one kind, the first, as any."""
        if not self.is_mixed(stage):
            return 0
        every = self.unlike_replicas(stage).values()
        return max(every, key=lambda at: self.forward_s(stage, at) + self.backward_s(stage, at, 1))

    def _reducing(self, stage: CandidateStage) -> tuple[int, int, Place, Shard]:
        """Return what a stage's reduction and update depend on besides the form; see :class:`Reduction`."""
        return stage.first, stage.stop, self.copies_place(stage), stage.shard

    def _forms(self, stage: CandidateStage) -> set[int]:
        return set(self.forms_of(stage))

    @staticmethod
    def adding(micro_batches: int, ranks: int) -> float:
        """Return the share of a stage's backwards that add to gradients.

        The step's first one makes them, except among replicas, which add to buffers from the first one on. The time of
        a backward is the average one's.
        """
        return 1.0 if ranks > 1 else (micro_batches - 1) / micro_batches

    def _recompute_levels(self, rows: float, form: int = 0) -> Levels:
        """Return sets of layers to recompute, from none to all that free memory, each a part of the next.

        Layers join in the order of the seconds that they cost per byte freed; those that cannot run twice are in none.
        """
        ranked = []
        for layer in range(self.layer_count):
            if layer not in self.once:
                freed = self.memory[form].freed_bytes(layer, rows)
                if freed > 0:
                    ranked.append((self.sums.recompute_s(layer, rows, form) / freed, layer))
        return Levels([layer for _, layer in sorted(ranked)])

    def trained_bytes(self, layers: Collection[int], form: int = 0) -> int:
        """Return the bytes of the trained parameters of some layers, those that several of them share once."""
        forms = self.forms
        total = sum(forms.layers[form][layer].trainable_bytes for layer in layers)
        for tied in forms.flows[form].tied:
            if tied.trainable:
                total -= tied.bytes * max(0, sum(layer in layers for layer in tied.layers) - 1)
        return max(0, total)

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
        return max(self.updating_s(*self._reducing(stage), form) for form in self._forms(stage))

    def updating_s(self, first: int, stop: int, place: Place, shard: Shard, form: int = 0) -> float:
        """Return :meth:`update_s` of layers ``first:stop`` in one form."""
        added = sum(layer.summand_bytes for layer in self.forms.layers[form][first:stop])
        summed_s = self.links.collective_s("all_reduce", added, self.forms.every[form].place) if added else 0.0
        return summed_s + self._stepping_s(first, stop, place, shard, form)

    def _stepping_s(self, first: int, stop: int, place: Place, shard: Shard, form: int) -> float:
        seconds = self._own_update_s(first, stop, form)
        if shard == "none":
            return seconds
        if shard == "parameters":
            return seconds / place.ranks
        if self.sums.waits:
            sums = self.sums.in_turn_sums("all_gather", place, form)
            return seconds / place.ranks + (sums[stop] - sums[first])
        updated = sum(layer.trainable_bytes for layer in self.forms.layers[form][first:stop])
        return seconds / place.ranks + self.links.collective_s("all_gather", updated, place)

    def _own_update_s(self, first: int, stop: int, form: int) -> float:
        sums = self.layers[form].update_sums
        seconds = sums[stop] - sums[first]
        for tied in self.forms.flows[form].tied:
            # The first layer's time has a shared parameter's; a stage without that layer updates a copy of its own.
            owner = tied.layers[0]
            if owner < first and any(first <= layer < stop for layer in tied.layers):
                seconds += (sums[owner + 1] - sums[owner]) * tied.share_of(self.forms.layers[form][owner])
        return seconds

    def reduce_s(self, stage: CandidateStage) -> float:
        """Return the seconds that the last reduction of a stage's gradients occupies the link."""
        return max(self.reductions.occupied_s(Reduction(*self._reducing(stage), form)) for form in self._forms(stage))

    def replica_exposed_s(self, stage: CandidateStage, replica: int, *, split: bool = False) -> float:
        """Return how long after a replica's last backward, or its weight half, the reduction of its gradients ends."""
        form, rows = self.form_of(stage, replica), stage.shares[replica]
        return self.reductions.exposed_s(Reduction(*self._reducing(stage), form, rows, split))

    def tied_s(self, index: int, holders: Sequence[CandidateStage]) -> float:
        """Return the seconds of reducing parameter ``Profile.tied[index]`` among the ranks that hold it."""
        return max(
            self.links.collective_s("all_reduce", size, self.links.place(devices))
            for devices, size in self.sharing_devices(index, holders)
        )

    def team_sums(self, stage: CandidateStage) -> list[tuple[Collective, int]]:
        """Return (kind, bytes) of what the ranks of a stage's team exchange, of the largest micro-batch measured."""
        layers = self.forms.layers[self.form_of(stage)][stage.first : stage.stop]
        return [
            (each.kind, each.bytes) for layer in layers for each in layer.costs[-1].sums if each.ranks == stage.team
        ]

    def sharing_devices(self, index: int, holders: Sequence[CandidateStage]) -> list[tuple[tuple[int, ...], int]]:
        """Return the devices that reduce a shared parameter's gradient together, and its bytes.

        Those with the same part do so; where stages have other parts, all together, with the whole.
        """
        parts = {stage.team for stage in holders}
        each = parts.pop() if len(parts) == 1 else 1
        size = (
            self.forms.flows[self.form_of(holders[0])].tied[index].bytes if not parts else self.flows.tied[index].bytes
        )
        devices = (
            dict.fromkeys(device for stage in holders for device in stage.devices[at::each]) for at in range(each)
        )
        return [(tuple(own), size) for own in devices]

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
        """Return the peak memory of every stage's replica with the least room, with what else its rank holds."""
        return [peak.bytes for peak in self.peaks(candidate)]

    def peaks(self, candidate: Candidate) -> list[Peak]:
        """Return of every stage what the replica with the least room holds, and may hold."""
        if plain(candidate.schedule):
            return [self._peak(candidate, index) for index in range(len(candidate.stages))]
        limits = (self.limit_bytes(stage.devices) for stage in candidate.stages)
        return list(map(Peak, rank_peaks(self.memory, self.forms_of, candidate), limits))

    def shortfalls(self, candidate: Candidate) -> list[int]:
        """Return by how many bytes every stage exceeds what its devices hold; at most 0 where it fits."""
        return [peak.short for peak in self.peaks(candidate)]

    def state_bytes(self, candidate: Candidate, index: int) -> tuple[int, int]:
        """Return the most that a stage's replica holds of parameters and optimizer's state, and of gradients."""
        stage, found = candidate.stages[index], []
        for rows, form in self.unlike_replicas(stage):
            terms = peak_terms_of(stage, candidate.micro_batches, 0, rows)
            parts = self.memory[form].parts(stage.first, stage.stop, rows, terms.recompute)
            found.append(state_of(parts, terms)[:2])
        kept, gradients = map(max, zip(*found, strict=True))
        return int(kept), int(gradients)

    def shortfall(self, candidate: Candidate, index: int) -> int:
        """Return by how many bytes one stage exceeds what its devices hold."""
        return self._peak(candidate, index).short if plain(candidate.schedule) else self.shortfalls(candidate)[index]

    def _peak(self, candidate: Candidate, index: int) -> Peak:
        stages, count = candidate.stages, candidate.micro_batches
        stage = stages[index]
        made = stage.first, stage.stop
        scattered = self.flows.forked_tensors(*made) or self.flows.constants(*made)
        cuts = tuple(later.stop for later in stages[index + 1 :]) if scattered else ()
        before = stages[:index] if self.flows.far_tensors(*made) else stages[max(0, index - 1) : index]
        return self.stage_peak(stage, count, cuts, stage.leads(before, count))

    def _computed_peak(self, stage: CandidateStage, count: int, cuts: tuple[int, ...], leads: tuple[Lead, ...]) -> Peak:
        """Return :meth:`peaks` of a stage among others, which are as of :meth:`.memory.MemoryModel.further`.

        Where those before the last do not matter, ``leads`` are without them.
        """
        lead = leads[-1].turns if leads else 0
        peaks = (
            Peak(
                self.memory[form].peak(stage.first, stage.stop, peak_terms_of(stage, count, lead, rows), cuts, leads),
                self.limit_of(stage, form),
            )
            for rows, form in self.unlike_replicas(stage)
        )
        return max(peaks, key=lambda each: (each.short, each.bytes))


def _single(profile: Profile, options: PlanOptions) -> dict[int, Single]:
    found = {}
    for index, layer in enumerate(profile.layers):
        writes = layer.writes
        if writes is not None and writes.single is not None and (writes.once or not options.replicate_state):
            remedy = "" if writes.once else "; `replicate_state='first'` or average allows more"
            found[index] = Single(f"layer {layer.name} has one replica, since {writes.single}", remedy)
    return found
