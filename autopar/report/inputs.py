"""Tables of what plans are made of: profiles and clusters; and of known GPUs, with the sources of their numbers.

Of a profile: layers, what crosses their boundaries, where time and memory are, how times were found. Of a cluster:
devices, links, curves. Bandwidths are those of nccl-tests: ``algbw`` is bytes over seconds, ``busbw`` what of it
crosses a rank's link.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING

from autopar.formats.document import least_certain
from autopar.hardware.collectives import bus_bandwidth_factor
from autopar.report.table import Part, Table, bandwidth, duration, percentage, size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from autopar.cache import Entry
    from autopar.formats.cluster import Cluster, Curve, Link
    from autopar.formats.profile import Cost, Layer, Profile
    from autopar.hardware.fabrics import Fabric, Measured
    from autopar.hardware.gpus import Gpu


_SHOWN_KINDS = 8


def render_profile(profile: Profile) -> Iterator[Part]:
    """Yield a profile's layers at the largest size that is known, totals, how sure its times are, and notes."""
    yield title_of(profile)
    yield _layers(profile)
    if profile.others:
        yield _kinds(profile)
    if any(each is not None for layer in profile.layers for each in _part_times(layer.costs[-1])):
        yield _parts(profile)
    yield _shares(profile)
    yield from _certainty(profile)
    yield from _totals_in_words(profile)
    if profile.model.sequence is not None:
        yield f"synthetic sequences of {profile.model.sequence} tokens (--sequence)"
    for tied in profile.tied:
        yield f"tied: {tied.parameter} in {', '.join(tied.layers)}"
    if profile.ignored_state:
        yield f"ignored state: {', '.join(profile.ignored_state)}"
    if profile.loss_difference is not None:
        difference = f"{profile.loss_difference:.2g}, as accepted: results depend on micro-batches and shares"
        yield f"loss of a mini-batch against its parts': {difference}"
    for note in profile.notes:
        yield f"note: {note}"


def title_of(profile: Profile) -> str:
    """Return what was profiled, in which precision and on what."""
    device = profile.device
    threads = f", {device.threads} thread{'s' if device.threads > 1 else ''} per rank" if device.type == "cpu" else ""
    compiled = ", compiled" if profile.compiled else ""
    names = " and ".join(kind.device.name for kind in profile.kinds)
    return f"profile of {profile.model.source}: {profile.precision}{compiled} on {names}{threads}"


def _layers(profile: Profile) -> Table:
    rows = profile.layers[0].costs[-1].micro_batch
    mixed = len({cost.provenance for layer in profile.layers for cost in layer.costs}) > 1
    columns = ("index", "layer", ">parameters", ">forward", ">backward", ">saved", ">peak", ">crosses", "known")
    where = f" on {profile.device.name}" if profile.others else ""
    table = Table(f"Layers (micro-batch of {rows}, each){where}", columns, footer=_totals(profile))
    crossing = profile.crossing_bytes()
    for first, last in _alike(profile):
        layer, cost = profile.layers[first], profile.layers[first].costs[-1]
        table.add_row(
            *_names(layer, first, last),
            size(layer.parameters_bytes),
            duration(cost.forward_s),
            duration(cost.backward_s),
            size(cost.saved_bytes),
            size(cost.peak_bytes),
            size(crossing[last] * rows) if last + 1 < len(profile.layers) else "",
            cost.provenance if mixed else "",
        )
    return table


def _kinds(profile: Profile) -> Table:
    """Return what all layers take on every kind of device."""
    columns = ("device", ">memory", ">micro-batch", ">forward", ">backward", ">times as long", "known")
    table = Table("All layers by kind of device", columns)
    first_s = sum(map(_seconds, profile.layers))
    for device, layers in ((kind.device, kind.layers) for kind in profile.kinds):
        costs = [layer.costs[-1] for layer in layers]
        table.add_row(
            device.name,
            size(device.memory_bytes),
            str(costs[0].micro_batch),
            duration(sum(cost.forward_s for cost in costs)),
            duration(sum(cost.backward_s for cost in costs)),
            f"{sum(map(_seconds, layers)) / first_s:.2f}" if first_s else "",
            least_certain(cost.provenance for cost in costs) or "",
        )
    return table


def _names(layer: Layer, first: int, last: int) -> tuple[str, str]:
    if last > first:
        return f"{first}-{last}", f"{layer.name} .."
    return str(first), layer.name


def _parts(profile: Profile) -> Table:
    """Return what a backward takes in halves or with the forward run again, where that is known."""
    columns = ("index", "layer", ">backward", ">for inputs", ">for weights", ">recompute", ">update")
    rows = profile.layers[0].costs[-1].micro_batch
    table = Table(f"Backwards split or recomputed, and updates (micro-batch of {rows}, each)", columns)
    for first, last in _alike(profile):
        layer, cost = profile.layers[first], profile.layers[first].costs[-1]
        times = ("" if each is None else duration(each) for each in _part_times(cost))
        table.add_row(*_names(layer, first, last), duration(cost.backward_s), *times, duration(layer.update_s))
    return table


def _part_times(cost: Cost) -> tuple[float | None, ...]:
    return cost.backward_input_s, cost.backward_weight_s, cost.recompute_s


def _shares(profile: Profile) -> Table:
    """Return which kinds of layers hold the time, the parameters and the activations; the greatest in time first."""
    kinds: dict[str, list[Layer]] = {}
    for layer in profile.layers:
        kinds.setdefault(layer.measured_as or layer.name, []).append(layer)
    ordered = sorted(kinds.items(), key=lambda item: -sum(_seconds(layer) for layer in item[1]))
    shown, rest = ordered[:_SHOWN_KINDS], [layer for name, layers in ordered[_SHOWN_KINDS:] for layer in layers]
    groups = [*shown, *([("all others", rest)] if rest else [])]
    time, parameters = sum(map(_seconds, profile.layers)), _parameters(profile.layers)
    kept = sum(layer.costs[-1].saved_bytes for layer in profile.layers)
    columns = ("layers like", ">layers", ">time", ">parameters", ">saved")
    table = Table("Where time and memory are (forward and backward)", columns)
    for name, layers in groups:
        shares = (
            _share(sum(map(_seconds, layers)), time),
            _share(_parameters(tuple(layers)), parameters),
            _share(sum(layer.costs[-1].saved_bytes for layer in layers), kept),
        )
        table.add_row(name, str(len(layers)), *shares)
    return table


def _share(part: float, whole: float) -> str:
    return percentage(part / whole) if whole else ""


def _seconds(layer: Layer) -> float:
    return layer.costs[-1].forward_s + layer.costs[-1].backward_s


def _certainty(profile: Profile) -> Iterator[str]:
    """Yield where the times come from, and how far they may be off."""
    costs = [cost for layer in profile.layers for cost in layer.costs]
    counted = Counter(cost.provenance for cost in costs)
    parts = ", ".join(f"{count} of {len(costs)} {known}" for known, count in counted.items())
    yield f"times: {parts if len(counted) > 1 else next(iter(counted))}"
    repeats = [cost.repeats for cost in costs if cost.repeats]
    if counted["measured"]:
        often = f"each {min(repeats)} to {max(repeats)} times, " if repeats else ""
        spread = f"median {percentage(profile.noise.median_spread)}, largest {percentage(profile.noise.max_spread)}"
        caches = "cold caches, as in a step" if profile.noise.caches == "cold" else "warm caches"
        yield f"measuring: {often}{caches}, spread {spread}"
    fits = [(layer.name, line) for layer in profile.layers for line in (layer.forward_fit, layer.backward_fit) if line]
    if fits:
        name, worst = max(fits, key=lambda item: item[1].residual)
        formula = f"{name}: {duration(worst.fixed_s)} + {duration(worst.per_sample_s)} a sample"
        yield f"lines through micro-batch sizes: at most {percentage(worst.residual)} off ({formula})"
    yield from _launches(profile)
    if profile.noise.clock_hz:
        clocks = " and ".join(f"{hertz / 1e6:.0f} MHz" for hertz in profile.noise.clock_hz)
        yield f"clock before and after: {clocks}"
    if profile.noise.throttled is not None:
        yield f"throttled: {profile.noise.throttled}"


def _launches(profile: Profile) -> Iterator[str]:
    """Yield what the host takes to launch all layers, and what their kernels take, where both are known."""
    costs = [layer.costs[-1] for layer in profile.layers]
    if not any(cost.forward_launch_s or cost.backward_launch_s for cost in costs):
        return
    forward_s, backward_s = (sum(getattr(cost, name) or 0.0 for cost in costs) for name in _LAUNCHES)
    kernels_s = sum(map(_seconds, profile.layers))
    longer = "launches" if forward_s + backward_s > kernels_s else "kernels"
    yield (
        f"launches by the host: forward {duration(forward_s)}, backward {duration(backward_s)}; kernels of both: "
        f"{duration(kernels_s)}; a micro-batch takes as long as the {longer}"
    )


_LAUNCHES = "forward_launch_s", "backward_launch_s"


def _totals_in_words(profile: Profile) -> Iterator[str]:
    if profile.step_overhead_s or profile.device.type != "cuda":
        yield f"loading a mini-batch of {profile.batch}: {duration(profile.step_overhead_s)}"
    else:
        yield f"loading a mini-batch of {profile.batch}: beside the GPU's work"
    if profile.read_s is not None and profile.collate_s is not None:
        yield f"reading a sample: {duration(profile.read_s)}, collating it: {duration(profile.collate_s)}"
    update = sum(layer.update_s for layer in profile.layers)
    state = sum(layer.optimizer_bytes for layer in profile.layers)
    gradients = sum(layer.gradient_bytes for layer in profile.layers)
    yield f"updating all parameters: {duration(update)}; gradients {size(gradients)}, optimizer's state {size(state)}"


def _alike(profile: Profile) -> Iterator[tuple[int, int]]:
    """Yield the first and the last index of every run of layers that share a measurement and a boundary's bytes."""
    crossing = profile.crossing_bytes()
    first = 0
    for index, layer in enumerate(profile.layers):
        leader = profile.layers[first]
        alike = layer.measured_as == (leader.measured_as or leader.name) and crossing[index] == crossing[first]
        if index > first and not alike:
            yield first, index - 1
            first = index
    yield first, len(profile.layers) - 1


def _totals(profile: Profile) -> tuple[str, ...]:
    costs = [layer.costs[-1] for layer in profile.layers]
    # Layers count the bytes of tied parameters more than once.
    again = sum(tied.bytes * (len(tied.layers) - 1) for tied in profile.tied)
    return (
        "",
        f"{len(profile.layers)} layer{'s' if len(profile.layers) > 1 else ''}",
        size(_parameters(profile.layers) - again),
        duration(sum(cost.forward_s for cost in costs)),
        duration(sum(cost.backward_s for cost in costs)),
        size(sum({saved.storage: saved.bytes for cost in costs for saved in cost.saved}.values())),
    )


def _parameters(layers: tuple[Layer, ...]) -> int:
    return sum(layer.parameters_bytes for layer in layers)


def render_cluster(cluster: Cluster, *, sizes: bool = False) -> Iterator[Part]:
    """Yield a cluster's devices, links and curves; with ``sizes``, curves at every size and not their ends alone."""
    yield cluster_title(cluster)
    yield _devices(cluster)
    yield _links(cluster)
    if cluster.curves:
        yield _points(cluster) if sizes else _curves(cluster)
    if cluster.overlaps:
        yield _overlaps(cluster)
    for note in cluster.notes:
        yield f"note: {note}"


def cluster_title(cluster: Cluster) -> str:
    """Return a cluster's name, and how many devices it has."""
    count = len(cluster.devices)
    return f"cluster {cluster.name}: {count} device{'s' if count > 1 else ''}, backend {cluster.backend}"


def cluster_summary(cluster: Cluster, share: float = 1.0) -> str:
    """Return in a line what a cluster is: devices, nodes, and what each sends; of networks ``share`` is counted on.

    >>> from autopar.hardware.clusters import cluster_named
    >>> from autopar.hardware.collectives import NETWORK_SHARE
    >>> cluster_summary(cluster_named("2x8xH100:400Gbps"), NETWORK_SHARE).split("; ")[:2]
    ['16 devices (H100-SXM) in 2 nodes of 8', 'within a node 370 GB/s per device']
    """
    sizes = Counter(device.node for device in cluster.devices).values()
    racked = any(link.level == "rack" for link in cluster.links)
    racks = f", {len({device.rack for device in cluster.devices})} racks" if racked else ""
    kinds = Counter(device.type for device in cluster.devices)
    names = ", ".join(kinds if len(kinds) == 1 else (f"{count} {kind}" for kind, count in kinds.items()))
    nodes = "1 node" if len(sizes) == 1 else f"{len(sizes)} nodes of {' and '.join(map(str, sorted(set(sizes))))}"
    plural = "s" if len(cluster.devices) > 1 else ""
    found = [f"{len(cluster.devices)} device{plural} ({names}) in {nodes}{racks}"]
    where = {"node": "within a node", "rack": "between nodes of a rack"}
    where["network"] = "between racks" if racked else "between nodes"
    for link in cluster.links:
        if link.level == "node" and max(sizes) > 1:
            found.append(f"{where[link.level]} {_bandwidth_text(link, 1.0, None)}")
        elif link.level != "node" and len(sizes) > 1:
            found.append(
                f"{where[link.level]} {_bandwidth_text(link, share, min(sizes) if len(set(sizes)) == 1 else None)}"
            )
    return "; ".join(found)


def _bandwidth_text(link: Link, share: float, per_node: int | None) -> str:
    """Return what a device or a node sends over a link, which is shared by as many; ``per_node`` devices have each."""
    rate = link.bytes_per_s / share
    unit = bandwidth if link.level == "node" else lambda bytes_per_s: f"{bytes_per_s * 8 / 1e9:.4g} Gbit/s"
    counted = "" if share == 1 else f", of which {share:.0%} are counted on"
    if link.shared_by > 1:
        whose = " per node" if link.shared_by == per_node else ""
        return f"{unit(rate)}{whose}, shared by {link.shared_by} devices ({unit(rate / link.shared_by)} each){counted}"
    whole = "" if per_node is None else f" ({unit(rate * per_node)} per node)"
    return f"{unit(rate)} per device{whole}{counted}"


def _devices(cluster: Cluster) -> Table:
    """Return how many racks hold as many nodes with as many devices of every make; without racks, all are in one."""
    racked = any(link.level == "rack" for link in cluster.links)
    table = Table("Devices", (">racks", ">nodes", ">devices each", "type", ">memory each", ">price per hour"))
    nodes: dict[tuple[int, int], Counter[tuple[str, int, float | None]]] = defaultdict(Counter)
    for each in cluster.devices:
        nodes[each.rack if racked else 0, each.node][each.type, each.memory_bytes, each.price_per_hour] += 1
    racks: dict[int, Counter[tuple[tuple[tuple[str, int, float | None], int], ...]]] = defaultdict(Counter)
    for (rack, _), makes in nodes.items():
        racks[rack][tuple(makes.items())] += 1
    for alike, count in Counter(tuple(rack.items()) for rack in racks.values()).items():
        for (make, devices), nodes_alike in ((make, number) for makes, number in alike for make in makes):
            kind, memory, price = make
            numbers = (str(count) if racked else "", str(nodes_alike), str(devices))
            table.add_row(*numbers, kind, size(memory), "" if price is None else f"{price:g}")
    return table


def _links(cluster: Cluster) -> Table:
    table = Table("Links", ("level", ">latency", ">bandwidth", "duplex", ">shared by", "known"))
    for link in cluster.links:
        numbers = (duration(link.latency_s), bandwidth(link.bytes_per_s))
        table.add_row(link.level, *numbers, link.duplex, str(link.shared_by), link.provenance)
    return table


def _curves(cluster: Cluster) -> Table:
    ends = dict.fromkeys(f"{size(curve.sizes[0])} to {size(curve.sizes[-1])}" for curve in cluster.curves)
    known = {curve.provenance for curve in cluster.curves}
    title = f"Curves from {' or '.join(ends)}{'' if len(known) > 1 else f' ({min(known)})'}"
    table = Table(
        title, ("operation", ">ranks", ">nodes", "level", ">smallest", ">largest", ">algbw", ">busbw", "known")
    )
    for curve in cluster.curves:
        times = (duration(curve.seconds[0]), duration(curve.seconds[-1]))
        sure = curve.provenance if len(known) > 1 else ""
        table.add_row(*_operation(curve), *times, *_bandwidths(curve, -1), sure)
    return table


def _points(cluster: Cluster) -> Table:
    known = ", ".join(dict.fromkeys(curve.provenance for curve in cluster.curves))
    columns = ("operation", ">ranks", ">nodes", "level", ">size", ">time", ">algbw", ">busbw")
    table = Table(f"Curves ({known})", columns)
    for curve in cluster.curves:
        for at, (count, seconds) in enumerate(zip(curve.sizes, curve.seconds, strict=True)):
            numbers = (size(count), duration(seconds), *_bandwidths(curve, at))
            table.add_row(*_operation(curve), *numbers, end_section=at + 1 == len(curve.sizes))
    return table


def _overlaps(cluster: Cluster) -> Table:
    table = Table("Computing while communicating", ("level", ">computing takes", ">communicating takes", "known"))
    for each in cluster.overlaps:
        table.add_row(each.level, f"{each.compute:.2f} x", f"{each.communication:.2f} x", each.provenance)
    return table


def _operation(curve: Curve) -> tuple[str, ...]:
    nodes = "" if curve.nodes is None else str(curve.nodes)
    return curve.kind.replace("_", "-"), str(curve.ranks), nodes, curve.level


def _bandwidths(curve: Curve, at: int) -> tuple[str, str]:
    if curve.seconds[at] == 0:
        return "", ""
    rate = curve.sizes[at] / curve.seconds[at]
    return bandwidth(rate), bandwidth(rate * bus_bandwidth_factor(curve.kind, curve.ranks))


def render_gpus(gpus: Iterable[Gpu]) -> Iterator[Part]:
    """Yield what is known of GPUs, and below it where that is from."""
    columns = ("name", ">fp32", ">bf16", ">fp16", ">memory", ">its rate", ">NVLink", ">PCIe", ">NCCL bus", ">W")
    table = Table("GPUs (dense TFLOP/s, GB, and GB/s in one direction)", columns)
    listed = list(gpus)
    for gpu in listed:
        flops = (gpu.fp32_flops_per_s, gpu.bf16_flops_per_s, gpu.fp16_flops_per_s)
        links = (gpu.memory_bytes_per_s, gpu.nvlink_bytes_per_s, gpu.pcie_bytes_per_s, gpu.collective_bytes_per_s)
        numbers = (*(_in(1e12, each) for each in flops), *(_in(1e9, each) for each in (gpu.memory_bytes, *links)))
        table.add_row(gpu.name, *numbers, _in(1, gpu.power_w))
    yield table
    yield "Sources:"
    for gpu in listed:
        yield f"{gpu.name}: {gpu.source}"


def render_fabrics(fabrics: Iterable[Fabric]) -> Iterator[Part]:
    """Yield what an all-reduce of all devices was measured to reach over fabrics, and where that is from."""
    table = Table("Fabrics (GB/s of bus bandwidth; :NAME behind a network says one)", ("name", ">nodes", "all-reduce"))
    listed = list(fabrics)
    for fabric in listed:
        table.add_row(fabric.name, *_measured_reach(fabric.all_reduce))
    yield table
    for fabric in listed:
        yield f"{fabric.name}: {fabric.source}"


def _measured_reach(measured: Sequence[Measured]) -> tuple[str, str]:
    """Return of how many nodes there are measurements, and those of the largest messages."""
    largest = {each.nodes: each for each in sorted(measured)}
    rates = ", ".join(f"{each.bytes_per_s / 1e9:.0f} ({size(each.size_bytes)})" for each in largest.values())
    return ", ".join(map(str, largest)) or "-", rates or "-"


def _in(unit: float, value: float | None) -> str:
    return f"{value / unit:.4g}" if value else "-"


def render_captured(entries: Sequence[Entry], folder: Path) -> Iterator[Part]:
    """Yield the captured models that are kept."""
    if not entries:
        yield f"No captured model is kept in {folder}; `autopar profile` keeps what it captures"
        return
    table = Table(f"Captured models in {folder}", ("model", "captured", ">layers", ">size"))
    for entry in entries:
        when = datetime.fromtimestamp(entry.captured_s).isoformat(" ", "minutes")
        table.add_row(entry.model, when, str(entry.layers), size(entry.bytes))
    yield table
