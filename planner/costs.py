"""CostModel: the one place where seconds and bytes of a plan come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy

from autopar.errors import UsageError
from autopar.formats.cluster import Cluster, Device
from autopar.formats.document import Provenance, least_certain
from autopar.formats.profile import Profile
from autopar.planner.candidate import Candidate, Placed
from autopar.planner.flows import Flows
from autopar.planner.layers import LayerCosts
from autopar.planner.links import Level, LinkModel
from autopar.planner.memory import Held, MemoryModel
from autopar.planner.options import PlanOptions
from autopar.schedules.buckets import buckets
from autopar.schedules.route import routes

__all__ = ["CostModel"]


class CostModel:
    """Prices stages, messages and reductions; search, bounds, oracle and simulator all ask it."""

    def __init__(self, profile: Profile, cluster: Cluster, options: PlanOptions) -> None:
        self.profile = profile
        self.batch = options.batch or profile.batch
        if self.batch >= 2**31:
            raise UsageError(f"--batch must be below {2**31}, found {self.batch}")
        self.notes: list[str] = []
        self.devices = self._devices(cluster, options.gpus or len(cluster.devices))
        self.notes += self._other_types()
        limit = options.memory_bytes
        limits = [device.memory_bytes if limit is None else limit for device in self.devices]
        self.limits_bytes = [max(0, each - profile.device.reserved_bytes) for each in limits]
        self.layers = LayerCosts(profile)
        self.flows = Flows(profile)
        self.links = LinkModel(cluster, self.devices, options.bytes_per_s)
        self.memory = MemoryModel(self.layers, self.flows, profile.updates_at_once)
        self.layer_count = len(profile.layers)
        self._reductions: dict[tuple[int, int, int, Level], list[tuple[int, float]]] = {}
        self._exposed: dict[tuple[int, int, int, int, Level], float] = {}

    def _devices(self, cluster: Cluster, count: int) -> list[Device]:
        listed = list(cluster.devices)
        plural = "s" if len(listed) > 1 else ""
        if count > len(listed):
            more = count - len(listed)
            where = (
                ", in the same node (--cluster describes others)" if {device.node for device in listed} == {0} else ""
            )
            self.notes.append(
                f"the cluster lists {len(listed)} device{plural}; planning for {count} assumes {more} more like them"
                + where
            )
        return [listed[index % len(listed)] for index in range(count)]

    def _other_types(self) -> list[str]:
        kind = self.profile.device
        others = sorted({device.type for device in self.devices} - {kind.type, kind.name})
        if not others:
            return []
        return [f"the profile is of {kind.name}, but the cluster has {', '.join(others)}: times are {kind.name}'s"]

    def retimed(self, layers: LayerCosts) -> CostModel:
        """Return this model with other times of the layers; memory stays as it was."""
        other = copy(self)
        other.layers = layers
        other._exposed = {}
        return other

    def forward_s(self, first: int, stop: int, rows: int) -> float:
        """Return the seconds of one forward of layers ``first:stop`` on ``rows`` samples."""
        sums = self.layers.forward_sums(rows)
        return sums[stop] - sums[first]

    def backward_s(self, first: int, stop: int, rows: int, adding: float) -> float:
        """Return the seconds of one backward; see :meth:`adding`."""
        sums = self.layers.backward_sums(rows, adding)
        return sums[stop] - sums[first]

    @staticmethod
    def adding(micro_batches: int, ranks: int) -> float:
        """Return the share of a stage's backwards that add to gradients.

        The step's first one makes them, except among replicas, which add to buffers from the first one on. The time of
        a backward is the average one's.
        """
        return 1.0 if ranks > 1 else (micro_batches - 1) / micro_batches

    def update_s(self, first: int, stop: int) -> float:
        """Return the seconds of the optimizer's step over these layers."""
        seconds = self.layers.update_sums[stop] - self.layers.update_sums[first]
        for tied in self.flows.tied:
            # The first layer's time has a shared parameter's; a stage without that layer updates a copy of its own.
            owner, trainable_bytes = tied.layers[0], self.profile.layers[tied.layers[0]].trainable_bytes
            apart = owner < first and any(first <= layer < stop for layer in tied.layers)
            if tied.trainable and apart and trainable_bytes:
                owner_s = self.layers.update_sums[owner + 1] - self.layers.update_sums[owner]
                seconds += owner_s * min(1.0, tied.bytes / trainable_bytes)
        return seconds

    def reduce_s(self, first: int, stop: int, ranks: int, level: Level) -> float:
        """Return the seconds that reducing a stage's gradients occupies the link."""
        return sum(seconds for _, seconds in self._reduction(first, stop, ranks, level))

    def exposed_s(self, first: int, stop: int, rows: int, ranks: int, level: Level) -> float:
        """Return how long after a replica's last backward the reduction of its gradients ends.

        Buckets are reduced one after the other, each from the moment when the backward has left its layers.
        """
        key = (first, stop, rows, ranks, level)
        if key not in self._exposed:
            sums = self.layers.backward_sums(rows, 1.0)
            free = 0.0
            for layer, seconds in self._reduction(first, stop, ranks, level):
                free = max(free, sums[stop] - sums[layer]) + seconds
            self._exposed[key] = max(0.0, free - (sums[stop] - sums[first]))
        return self._exposed[key]

    def tied_s(self, index: int, devices: Sequence[int]) -> float:
        """Return the seconds of reducing parameter ``Profile.tied[index]`` among the ranks that hold it."""
        level = self.links.level(devices)
        return self.links.all_reduce_s(self.flows.tied[index].bytes, len(devices), level)

    def message_s(self, size_bytes: int, sender: int, receiver: int) -> float:
        """Return the seconds of a message between two devices."""
        return self.links.message_s(size_bytes, self.links.level((sender, receiver)))

    def compute_provenance(self, stage: Placed) -> Provenance:
        """Return where the times of a stage's forwards and backwards come from."""
        known = (self.layers.provenance(stage.first, stage.stop, rows) for rows in set(stage.shares))
        return least_certain(known) or "estimated"

    def communication_provenance(self, candidate: Candidate) -> Provenance | None:
        """Return where the times of a candidate's messages and reductions come from; none if it has none."""
        return least_certain((*self._messages_known(candidate), *self._reductions_known(candidate)))

    def _messages_known(self, candidate: Candidate) -> Iterator[Provenance]:
        for producer, sending in enumerate(candidate.stages):
            for receiving in candidate.stages[producer + 1 :]:
                flow = self.flows.between(sending.first, sending.stop, receiving.first, receiving.stop)
                for route in routes(sending.shares, receiving.shares) if flow.tensors else ():
                    ends = sending.devices[route.sender], receiving.devices[route.receiver]
                    size = (route.stop - route.start) * flow.bytes_per_sample
                    yield self.links.message_provenance(size, self.links.level(ends))

    def _reductions_known(self, candidate: Candidate) -> Iterator[Provenance]:
        for stage in candidate.stages:
            if len(stage.devices) > 1:
                level = self.links.level(stage.devices)
                for _, size in self._buckets(stage.first, stage.stop):
                    yield self.links.all_reduce_provenance(size, len(stage.devices), level)
        for index, holders in self.tied_between(candidate.stages):
            devices = [device for holder in holders for device in candidate.stages[holder].devices]
            size = self.flows.tied[index].bytes
            yield self.links.all_reduce_provenance(size, len(devices), self.links.level(devices))

    def peak_bytes(self, candidate: Candidate) -> list[int]:
        """Return the peak memory of every stage's largest replica."""
        return [self._stage_peak(candidate, index) for index in range(len(candidate.stages))]

    def shortfalls(self, candidate: Candidate) -> list[int]:
        """Return by how many bytes every stage exceeds its smallest device; at most 0 where it fits."""
        limits = (min(self.limits_bytes[device] for device in stage.devices) for stage in candidate.stages)
        return [peak - limit for peak, limit in zip(self.peak_bytes(candidate), limits, strict=True)]

    def tied_between(self, stages: Sequence[Placed]) -> list[tuple[int, tuple[int, ...]]]:
        """Return (index into ``Profile.tied``, stages) of every trained parameter that several stages hold."""
        found = []
        for tied in self.flows.tied:
            holders = tuple(
                index
                for index, stage in enumerate(stages)
                if any(stage.first <= layer < stage.stop for layer in tied.layers)
            )
            if tied.trainable and len(holders) > 1:
                found.append((tied.number, holders))
        return found

    def _stage_peak(self, candidate: Candidate, index: int) -> int:
        stage = candidate.stages[index]
        cuts = [later.stop for later in candidate.stages[index + 1 :]]
        lead = max(0, candidate.stages[index - 1].warmup - stage.warmup) if index else 0
        replicated = len(stage.devices) > 1
        return max(
            self.memory.peak(
                stage.first, stage.stop, Held(rows, stage.warmup, candidate.micro_batches, replicated, lead), cuts
            )
            for rows in set(stage.shares)
        )

    def _reduction(self, first: int, stop: int, ranks: int, level: Level) -> list[tuple[int, float]]:
        """(layer whose backward completes the bucket, seconds), in the order of the reductions."""
        key = (first, stop, ranks, level)
        if key not in self._reductions:
            self._reductions[key] = [
                (layer, self.links.all_reduce_s(size, ranks, level)) for layer, size in self._buckets(first, stop)
            ]
        return self._reductions[key]

    def _buckets(self, first: int, stop: int) -> list[tuple[int, int]]:
        """(layer whose backward completes the bucket, bytes), in the order of the reductions."""
        sizes = [self._reduced_bytes(layer, first, stop) for layer in range(first, stop)]
        return [(first + bucket[-1], sum(sizes[index] for index in bucket)) for bucket in buckets(sizes)]

    def _reduced_bytes(self, layer: int, first: int, stop: int) -> int:
        total = self.profile.layers[layer].trainable_bytes
        for tied in self.flows.tied:
            if tied.trainable and layer in tied.layers:
                shared = any(not first <= other < stop for other in tied.layers)
                # Within one stage the sum is complete when the backward leaves the first layer that uses it.
                if shared or any(first <= other < layer for other in tied.layers):
                    total -= tied.bytes
        return max(0, total)
