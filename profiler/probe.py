"""Probe: what every rank does while the links between ranks are measured, and how that becomes a cluster.

Ranks tell each other which host they are on, measure operations in groups within a node and between nodes, and note
what ``nvidia-smi topo -m`` says connects the GPUs.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import statistics
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, cast

import torch.distributed as dist

from autopar.errors import UsageError, text_of
from autopar.formats.cluster import Cluster, Curve, CurveKind, Device, Level, Link, Overlap
from autopar.formats.profile import DeviceKind
from autopar.hardware.clusters import group_sizes, message_sizes
from autopar.profiler.device import choose, count, describe
from autopar.profiler.operations import Operation, Pace, measure_overlap, time_operation
from autopar.progress import Progress, no_progress
from autopar.ranks.board import STEPPING, Note
from autopar.ranks.channel import Channel, open_channels
from autopar.ranks.context import RankContext, join_from_environment
from autopar.ranks.environment import rank_from_environment
from autopar.ranks.failure import PeerLostError
from autopar.ranks.meeting import node_of_each
from autopar.ranks.monitor import Doing, Watch
from autopar.ranks.pool import RankPool

_TIMEOUT_S = 300.0
_MEANINGS = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the host's PCIe bridge",
    "NODE": "PCIe bridges of one NUMA node",
    "SYS": "the link between NUMA nodes",
}
_CELL = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS")


def connections() -> str | None:
    """Return what ``nvidia-smi topo -m`` prints; None where there is no such command, or no GPU."""
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def parse_topology(text: str) -> dict[tuple[str, str], str]:
    """Return the kind of connection of every pair in the matrix that ``nvidia-smi topo -m`` prints.

    >>> parse_topology("        GPU0    GPU1    NIC0\\nGPU0     X      NV12    PIX\\nGPU1    NV12     X      SYS\\n")
    {('GPU0', 'GPU1'): 'NV12', ('GPU0', 'NIC0'): 'PIX', ('GPU1', 'NIC0'): 'SYS'}
    """
    # On a terminal the head is underlined.
    lines = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]
    head = next((words for words in lines if words and words[0] == "GPU0" and words[1:2] != ["X"]), [])
    columns = list(itertools.takewhile(lambda word: re.fullmatch(r"(GPU|NIC|mlx)\w*", word), head))
    found: dict[tuple[str, str], str] = {}
    for words in lines:
        if words and words[0] in columns and words != head:
            cells = list(itertools.takewhile(_CELL.fullmatch, words[1:]))
            for column, cell in zip(columns, cells, strict=False):
                if cell != "X" and (column, words[0]) not in found:
                    found[words[0], column] = cell
    return found


def topology_notes(text: str) -> list[str]:
    """Return in words what connects GPUs with each other and with network cards.

    >>> topology_notes("        GPU0    GPU1\\nGPU0     X      NV12\\nGPU1    NV12     X\\n")
    ['GPUs are connected by 12 NVLinks (NV12): 1 pair']
    """
    pairs = parse_topology(text)
    between_gpus = Counter(
        kind for (one, other), kind in pairs.items() if one.startswith("GPU") and other.startswith("GPU")
    )
    to_cards = Counter(kind for (one, other), kind in pairs.items() if one.startswith("GPU") != other.startswith("GPU"))
    notes = []
    for counted, what in ((between_gpus, "GPUs are connected"), (to_cards, "GPUs and network cards are connected")):
        if counted:
            parts = [
                f"{_meaning(kind)} ({kind}): {count} pair{'s' if count > 1 else ''}" for kind, count in counted.items()
            ]
            notes.append(f"{what} by {', by '.join(parts)}")
    return notes


def _meaning(kind: str) -> str:
    if kind.startswith("NV"):
        return f"{kind.removeprefix('NV')} NVLinks" if kind != "NV1" else "1 NVLink"
    return _MEANINGS[kind]


# As in training, where the largest messages are buckets of gradients on the CPU, and gathered weights on GPUs.
_LARGEST_BYTES = {"cpu": 64 * 2**20, "cuda": 2**30}
_COLLECTIVES: tuple[CurveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True)
class Probe:
    """What to measure, and how often."""

    quick: bool = False
    """In fewer rounds, and not what computing and communicating do to each other."""
    largest_bytes: int | None = None
    """Of the messages; None: 64 MiB between CPUs, 1 GiB between GPUs."""

    def pace(self) -> Pace:
        """Return how many times to measure each operation."""
        return Pace(warm_up=2, budget_s=1.0) if self.quick else Pace()


LinkMeasurements = dict[str, Any]
"""What all ranks found together: a :class:`Cluster` with a device per rank, as JSON."""


class RankGroups(NamedTuple):
    """Disjoint groups of ranks that communicate at the same time."""

    kind: CurveKind
    level: Level
    members: tuple[tuple[int, ...], ...]
    nodes: int | None = None
    """That each group's ranks stand on, where it makes a difference."""

    def __str__(self) -> str:
        where = "in a node" if self.level == "node" else "over the network"
        where = where if self.nodes is None else f"on {self.nodes} nodes"
        return f"{self.kind.replace('_', '-')} among {len(self.members[0])} ranks {where}"


def groups_of(nodes: Sequence[int]) -> list[RankGroups]:
    """Return what to measure among ranks on these nodes, no two for the same operation on as many ranks and nodes.

    In the fullest node: messages between its neighbours, all pairs at once, as pipelines have them; collectives of 2,
    4, 8 .. and all of its ranks. Over the network: one rank of each of 2, 4, 8 .. and all nodes, the other ranks of
    these nodes doing the same beside them; and all ranks of these nodes together.

    >>> for groups in groups_of([0, 0, 1, 1]):
    ...     if groups.kind in ("p2p", "all_reduce"):
    ...         print(groups, groups.members)
    p2p among 2 ranks in a node ((0, 1),)
    all-reduce among 2 ranks in a node ((0, 1),)
    p2p among 2 ranks over the network ((0, 2), (1, 3))
    all-reduce among 2 ranks on 2 nodes ((0, 2), (1, 3))
    all-reduce among 4 ranks on 2 nodes ((0, 1, 2, 3),)
    >>> [groups.members for groups in groups_of([0] * 5) if groups.kind == "p2p"]
    [((0, 1), (2, 3))]
    """
    places = [[rank for rank, node in enumerate(nodes) if node == each] for each in dict.fromkeys(nodes)]
    found: dict[tuple[CurveKind, Level, int, int | None], RankGroups] = {}
    for groups in (*_node_groups(max(places, key=len)), *_network_groups(places)):
        found.setdefault((groups.kind, groups.level, len(groups.members[0]), groups.nodes), groups)
    return list(found.values())


def _node_groups(ranks: Sequence[int]) -> Iterator[RankGroups]:
    """Yield what to measure among the ranks of one node."""
    if len(ranks) > 1:
        yield RankGroups("p2p", "node", tuple(zip(ranks[::2], ranks[1::2], strict=False)))
        for count in group_sizes(len(ranks)):
            for kind in _COLLECTIVES:
                yield RankGroups(kind, "node", (tuple(ranks[:count]),))


def _network_groups(places: Sequence[Sequence[int]]) -> Iterator[RankGroups]:
    """Yield what to measure among nodes, given the ranks of each."""
    if len(places) > 1:
        yield RankGroups("p2p", "network", tuple(zip(*places[:2], strict=False)))
        for count in group_sizes(len(places)):
            whole = (tuple(itertools.chain.from_iterable(places[:count])),)
            for members in (tuple(zip(*places[:count], strict=False)), whole):
                yield from (RankGroups(kind, "network", members, count) for kind in _COLLECTIVES)


def measure(context: RankContext, arguments: Mapping[str, Any]) -> LinkMeasurements:
    """Measure, in every rank, what ``arguments`` (a :class:`Probe`) asks; every rank returns what all found.

    Raises:
        PeerLostError: an operation did not come about; names the rank, and the operation.
    """
    try:
        return _measure(context, Probe(**arguments))
    except RuntimeError as error:
        raise PeerLostError(
            f"rank {context.rank}: lost the other ranks while measuring links: {text_of(error)[:300]}"
        ) from error


def _measure(context: RankContext, probe: Probe) -> LinkMeasurements:
    device = describe(context.device, 1)
    place = {"host": socket.gethostname(), "index": context.local_rank}
    own = {**place, "memory": device.memory_bytes, "name": device.name}
    ranks = [json.loads(text) for text in context.gather(json.dumps(own))]
    nodes = node_of_each([(each["host"], each["index"]) for each in ranks])
    wanted = groups_of(nodes)
    works = list(zip(wanted, _operations(context, wanted), strict=True))
    sizes = message_sizes(probe.largest_bytes or _LARGEST_BYTES[device.type])
    times: list[list[float] | None] = []
    for number, (groups, operation) in enumerate(works):
        _say(context, str(groups), number, number / (len(wanted) + 1))
        times.append(None if operation is None else _time(operation, groups, sizes, probe))
        context.barrier()
    overlaps = [] if probe.quick else _overlaps(context, works)
    every = [json.loads(text) for text in context.gather(json.dumps({"times": times, "overlaps": overlaps}))]
    of_groups = zip(wanted, zip(*(each["times"] for each in every), strict=True), strict=True)
    measured = measured_cluster(
        _devices(ranks, nodes, device.type),
        [_curve(groups, sizes, list(filter(None, found))) for groups, found in of_groups],
        _merge_overlaps([Overlap(**overlap) for each in every for overlap in each["overlaps"]]),
        _notes(context),
    )
    return measured.model_dump(mode="json")


def _devices(ranks: Sequence[Mapping[str, Any]], nodes: Sequence[int], kind: str) -> list[Device]:
    """Return the ranks' devices; GPUs that differ are told apart by their names."""
    several = kind == "cuda" and len({each["name"] for each in ranks}) > 1
    types = [each["name"] if several else kind for each in ranks]
    places = zip(types, ranks, nodes, strict=True)
    return [Device(type=own, memory_bytes=each["memory"], node=node) for own, each, node in places]


def _curve(groups: RankGroups, sizes: tuple[int, ...], seconds: Sequence[Sequence[float]]) -> Curve:
    """Return what groups took, the mean over their ranks."""
    means = _rising([statistics.mean(column) for column in zip(*seconds, strict=True)])
    ranks, nodes = len(groups.members[0]), groups.nodes
    return Curve(kind=groups.kind, ranks=ranks, level=groups.level, nodes=nodes, sizes=sizes, seconds=means)


def _operations(context: RankContext, all_groups: Sequence[RankGroups]) -> list[Operation | None]:
    """Return what this rank does in each of some groups; none where it takes no part.

    Every process group is made once, in the same order on all ranks; channels are opened between CPUs of a host.
    """
    distinct = dict.fromkeys(group for groups in all_groups for group in groups.members)
    process_groups = {group: dist.new_group(list(group)) for group in distinct}
    pairs = [(first, second) for groups in all_groups if groups.kind == "p2p" for first, second in groups.members]
    channels: Mapping[int, Channel] = open_channels(context, pairs) if context.device.type == "cpu" else {}
    found: list[Operation | None] = []
    for groups in all_groups:
        own = next((group for group in groups.members if context.rank in group), ())
        ends = [channels[rank] for rank in own if rank in channels and groups.kind == "p2p"]
        operation = Operation(context, groups.kind, own, process_groups[own], next(iter(ends), None)) if own else None
        found.append(operation)
    return found


def _time(operation: Operation, groups: RankGroups, sizes: Sequence[int], probe: Probe) -> list[float] | None:
    """Return this rank's times."""
    try:
        return time_operation(operation, sizes, probe.pace())
    except RuntimeError as error:
        rank = operation.context.rank
        raise PeerLostError(f"rank {rank}: {groups} failed: {text_of(error)[:300]}") from error


def _overlaps(context: RankContext, works: Sequence[tuple[RankGroups, Operation | None]]) -> list[dict[str, Any]]:
    """Measure the largest all-reduce of every level against computing; this rank's part."""
    reductions = sorted(
        (each for each in works if each[0].kind == "all_reduce"), key=lambda each: len(each[0].members[0])
    )
    found = []
    for level, operation in {groups.level: operation for groups, operation in reductions}.items():
        _say(context, "computing while communicating", len(works), len(works) / (len(works) + 1))
        if operation is not None:
            compute, communication = measure_overlap(context, operation.group)
            found.append({"level": level, "compute": compute, "communication": communication})
        context.barrier()
    return found


def _merge_overlaps(every: Sequence[Overlap]) -> tuple[Overlap, ...]:
    """Return the means of each level."""
    by_level: dict[Level, list[tuple[float, float]]] = defaultdict(list)
    for each in every:
        by_level[each.level].append((each.compute, each.communication))
    means = [(level, *map(statistics.mean, zip(*found, strict=True))) for level, found in by_level.items()]
    return tuple(Overlap(level=level, compute=one, communication=other) for level, one, other in means)


def _notes(context: RankContext) -> list[str]:
    text = connections() if context.device.type == "cuda" and context.rank == 0 else None
    return [] if text is None else topology_notes(text)


def _say(context: RankContext, what: str, number: int, share: float) -> None:
    if context.board is not None:
        context.board.write(context.rank, STEPPING, 0, number)
    if context.rank == 0:
        context.report({"doing": what, "share": share})


def measure_links(
    ranks: int,
    device: str,
    threads: int,
    probe: Probe | None = None,
    progress: Progress = no_progress,
) -> LinkMeasurements:
    """Start local ranks, and return what they measure on the backend that training uses; by default what is quick.

    Raises:
        TrainingError: a rank failed, was lost, or stood still; names it.
    """
    with RankPool(ranks, threads=threads, device_type=device, imports=[__name__]) as pool:
        watch = Watch(
            _TIMEOUT_S,
            _describe,
            lambda rank, message: progress(str(message["doing"]), float(str(message["share"]))),
        )
        results = pool.run(f"{__name__}:measure", asdict(probe or Probe(quick=True)), watch=watch)
    return cast("LinkMeasurements", results[0])


def cluster_here(
    ranks: int | None, device: str, threads: int, probe: Probe | None, name: str, progress: Progress
) -> Cluster:
    """Return this machine's devices and links, measured between some ranks; None: as many as GPUs, or 2.

    Raises:
        UsageError: it has no such devices, or too few.
    """
    chosen = choose(device)
    started = ranks or (count(chosen) if chosen.type == "cuda" else 2)
    if chosen.type == "cuda" and not 2 <= started <= count(chosen):
        raise UsageError(f"{started} ranks: this machine has {count(chosen)} GPUs, and links connect at least 2 ranks")
    progress("starting ranks", 0.0)
    measured = measure_links(started, chosen.type, threads, probe, progress)
    return local_cluster(measured, describe(chosen, threads), max(started, count(chosen)), name)


def measure_from_environment(
    device: str, threads: int, probe: Probe, progress: Progress = no_progress
) -> Cluster | None:
    """Measure as one of the ranks that torchrun has started; rank 0 returns their devices, in rank order, and links.

    Raises:
        UsageError: the environment is incomplete.
        TrainingError: a rank failed, or was lost.
    """
    import torch

    torch.set_num_threads(threads)
    launch = rank_from_environment(os.environ)
    with join_from_environment(launch, device, _TIMEOUT_S, launch.size) as context:
        reporting = replace(
            context, report=lambda message: progress(str(message["doing"]), float(str(message["share"])))
        )
        measured = measure(reporting, asdict(probe))
        return cluster_of(measured) if context.rank == 0 else None


def _describe(rank: int, note: Note) -> Doing:
    return Doing("measuring links" if note.phase == STEPPING else "setting up", waiting=False)


def cluster_of(measurements: LinkMeasurements) -> Cluster:
    """Return what was measured as a cluster with a device per rank, in rank order."""
    return Cluster.model_validate_json(json.dumps(measurements))


def local_cluster(measurements: LinkMeasurements, kind: DeviceKind, count: int, name: str = "local") -> Cluster:
    """Return this machine as a cluster of ``count`` devices with the measured times."""
    cluster = cluster_of(measurements)
    largest = max(curve.ranks for curve in cluster.curves)
    notes = [f"collectives were measured among up to {largest} ranks; times of larger groups are estimated from that"]
    return cluster.model_copy(
        update={
            "name": name,
            "devices": (Device(type=kind.type, memory_bytes=kind.memory_bytes),) * count,
            "notes": (*(notes if largest < count else ()), *cluster.notes),
        }
    )


def measured_cluster(
    devices: Sequence[Device], curves: Sequence[Curve], overlaps: Sequence[Overlap] = (), notes: Sequence[str] = ()
) -> Cluster:
    """Return devices with links as the curves of their messages say."""
    return Cluster(
        backend="gloo" if devices[0].type == "cpu" else "nccl",
        devices=tuple(devices),
        links=_links(curves),
        curves=tuple(curves),
        overlaps=tuple(overlaps),
        notes=tuple(notes),
    )


def _links(curves: Sequence[Curve]) -> tuple[Link, ...]:
    """Return a link per level that was measured; where every node has one rank, nodes have no links of their own."""
    found = {curve.level: _link(curve) for curve in curves if curve.kind == "p2p"}
    if "node" not in found:
        # A cluster states one, although no two of its devices are in a node.
        found["node"] = found["network"].model_copy(update={"level": "node", "provenance": "estimated"})
    return tuple(found[level] for level in sorted(found, key=("node", "network").index))


def _link(curve: Curve) -> Link:
    sizes, seconds = curve.sizes, curve.seconds
    # Times that do not rise at all tell of the largest message alone how fast it went.
    whole_s = seconds[-1] - seconds[0] if seconds[-1] > seconds[0] else seconds[-1]
    rate = (sizes[-1] - sizes[0]) / max(whole_s, 1e-12)
    return Link(level=curve.level, latency_s=seconds[0], bytes_per_s=rate, provenance="measured")


def _rising(seconds: Sequence[float]) -> tuple[float, ...]:
    """Return the nearest times that never fall as messages grow: neighbours that fall are replaced by their mean.

    >>> _rising([1.0, 4.0, 2.0, 5.0])
    (1.0, 3.0, 3.0, 5.0)
    """
    pools: list[tuple[float, int]] = []
    for value in seconds:
        pools.append((float(value), 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (one, many), (other, more) = pools.pop(-2), pools.pop(-1)
            pools.append(((one * many + other * more) / (many + more), many + more))
    return tuple(mean for mean, count in pools for _ in range(count))
