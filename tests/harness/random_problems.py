"""Random and GPT-like profiles and clusters."""

import random
from collections import Counter
from itertools import pairwise
from typing import Any

from autopar.formats.cluster import LEVELS, Cluster, Curve, Device, Link
from autopar.formats.profile import (
    Cost,
    DeviceCosts,
    DeviceKind,
    Layer,
    ModelSource,
    Noise,
    Profile,
    SavedStorage,
    Tensor,
    TiedParameter,
)
from autopar.options.plan import PlanOptions

MIB = 2**20


def cost(rows: int, forward_s: float, backward_s: float, saved: dict[str, int], peak: int, output: int) -> Cost:
    return Cost(
        micro_batch=rows,
        forward_s=forward_s,
        backward_s=backward_s,
        saved=tuple(SavedStorage(storage=name, bytes=size) for name, size in saved.items()),
        peak_bytes=peak,
        output_bytes=output,
    )


def profile_of(
    layers: list[Layer],
    tensors: list[Tensor],
    batch: int,
    tied: tuple[TiedParameter, ...] = (),
    overhead_s: float = 0.0,
) -> Profile:
    return Profile(
        model=ModelSource(source="model.py", sha256="0" * 64),
        batch=batch,
        device=DeviceKind(type="cpu", name="test", memory_bytes=2**34),
        precision="fp32",
        layers=tuple(layers),
        tensors=tuple(tensors),
        tied=tied,
        noise=Noise(median_spread=0.01, max_spread=0.05),
        step_overhead_s=overhead_s,
    )


def _tensor(name: str, producer: str | None, consumers: tuple[str, ...], size: int, gradient: bool = True) -> Tensor:
    ends = {"producer": producer, "consumers": consumers, "dtype": "i64" if producer is None else "f32"}
    return Tensor(name=name, bytes_per_sample=size, gradient=gradient, **ends)


def _curve(kind: str, sizes: tuple[int, ...], latency_s: float, bytes_per_s: float) -> Curve:
    seconds = tuple(latency_s + size / bytes_per_s for size in sizes)
    return Curve(kind=kind, ranks=2, level="node", sizes=sizes, seconds=seconds)  # type: ignore[arg-type]


def random_profile(
    seed: int, most_layers: int = 7, batches: tuple[int, ...] = (1, 2, 3, 4, 6), skips: float = 0.12
) -> Profile:
    """Skips, side entrances, missing gradients, tied parameters, layers without time or parameters, single layers."""
    rng = random.Random(seed)
    count = rng.randint(1, most_layers)
    batch = rng.choice(batches)
    names = [f"layer.{index}" for index in range(count)]
    tensors = [_tensor("x", None, (names[0],), 64, False)]
    for index in range(count - 1):
        readers = {index + 1} if rng.random() < 0.93 else set()
        readers |= {reader for reader in range(index + 2, count) if rng.random() < skips}
        if readers:
            consumers = tuple(names[reader] for reader in sorted(readers))
            size, gradient = rng.choice([0, 1000, 40_000, 100_000]), rng.random() < 0.93
            tensors.append(_tensor(f"t{index}", names[index], consumers, size, gradient))
    layers = [_random_layer(rng, names, index, tensors, batch) for index in range(count)]
    tied: tuple[TiedParameter, ...] = ()
    if count > 1 and rng.random() < 0.3:
        holders = sorted(rng.sample(range(count), 2))
        size = rng.choice([1000, 200_000])
        tied = (TiedParameter(parameter="w", layers=tuple(names[holder] for holder in holders), bytes=size),)
        for holder in holders:
            layer = layers[holder]
            added = {f"{kind}_bytes": size for kind in ("parameters", "trainable", "gradient")}
            added["optimizer_bytes"] = 2 * size
            update = {name: getattr(layer, name) + more for name, more in added.items()}
            layers[holder] = layer.model_copy(update=update)
    return profile_of(layers, tensors, batch, tied, rng.choice([0.0, 0.004]))


def _random_layer(rng: random.Random, names: list[str], index: int, tensors: list[Tensor], batch: int) -> Layer:
    parameters = rng.choice([0, 10_000, 300_000, 2_000_000])
    forward, backward = (rng.choice([0.0, rng.uniform(0.5, 3.0)]) * 1e-3 for _ in range(2))
    latency = rng.uniform(0, 0.3) * 1e-3
    saved = {f"{names[index]}/saved": rng.choice([0, 50_000, 400_000])}
    saved |= {t.name: t.bytes_per_sample for t in tensors if names[index] in t.consumers and rng.random() < 0.6}
    sizes = sorted(rng.sample(range(1, max(5, batch + 1)), rng.randint(1, 3)))
    costs = tuple(
        cost(
            rows,
            latency + forward * rows,
            (latency + backward * rows) * rng.uniform(0.9, 1.1),
            {name: size * rows for name, size in saved.items()},
            sum(saved.values()) * rows + rng.choice([0, 30_000]) * rows,
            1000 * rows,
        )
        for rows in sizes
    )
    return _layer(names[index], parameters, parameters * 1e-10, costs)


def _layer(name: str, parameters: int, update_s: float, costs: tuple[Cost, ...]) -> Layer:
    sizes = {f"{kind}_bytes": parameters for kind in ("parameters", "trainable", "gradient")}
    sizes["optimizer_bytes"] = 2 * parameters
    return Layer(name=name, modules=(name,), **sizes, update_s=update_s, costs=costs)


def random_cluster(seed: int, devices: int) -> Cluster:
    """Links from free to about twice the compute of a layer; one or two nodes; with and without curves."""
    rng = random.Random(seed + 7_000_000)
    bandwidth = 10 ** rng.uniform(7.2, 10.5)
    latency = rng.choice([0.0, 2e-5, 3e-4])
    split = rng.choice([devices, devices, rng.randint(1, devices)])
    nodes = [0 if index < split else 1 for index in range(devices)]
    links = (
        Link(level="node", latency_s=latency, bytes_per_s=bandwidth),
        Link(level="network", latency_s=latency * 3, bytes_per_s=bandwidth / 3),
    )
    curves: tuple[Curve, ...] = ()
    if rng.random() < 0.5:
        sizes = (1024, 65536, 1 << 20)
        curves = _curve("p2p", sizes, latency, bandwidth), _curve("all_reduce", sizes, 2 * latency, bandwidth / 2)
    kinds = tuple(Device(type="cpu", memory_bytes=2**34, node=node) for node in nodes)
    return Cluster(devices=kinds, links=links, curves=curves)


def hierarchy(seed: int, sizes: list[int], *, racks: int = 1, more_links: bool = False) -> Cluster:
    """Uneven nodes of so many devices, in so many racks; each level is mostly slower than the one below it.

    With ``more_links``, a level may have a second link of less latency and less bandwidth.
    """
    rng = random.Random(seed + 5_000_000)
    levels = [level for level in LEVELS if level != "rack" or racks > 1 or rng.random() < 0.3]
    rack_of = [rng.randrange(racks) if "rack" in levels else 0 for _ in sizes]
    rate, latency = 10 ** rng.uniform(7.5, 10.5), rng.choice([0.0, 2e-5, 3e-4])
    links: list[Link] = []
    for level in levels:
        links.append(Link(level=level, latency_s=latency, bytes_per_s=rate))
        if more_links and rng.random() < 0.7:
            second_rate, shared_by = rate / rng.choice([2, 5]), rng.choice([1, 2])
            second = Link(level=level, latency_s=latency / 10, bytes_per_s=second_rate, shared_by=shared_by)
            links.insert(0, second)
        rate, latency = rate / rng.choice([1.0, 3.0, 10.0]), latency * rng.choice([1.0, 3.0])
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    devices = [Device(type="cpu", memory_bytes=2**34, node=node, rack=rack_of[node]) for node in nodes]
    return Cluster(devices=tuple(devices), links=tuple(links))


def with_curves(cluster: Cluster, seed: int) -> Cluster:
    """The same with curves of collectives over several nodes, one or more ranks on each: some rise with the ranks.

    Of each operation, some numbers of ranks and of ranks on a node were not measured, or none.
    """
    rng = random.Random(seed + 13_000_000)
    counts = Counter(device.node for device in cluster.devices)
    rates, slower = {link.level: link.bytes_per_s for link in cluster.links}, rng.choice((1, 30))
    curves = [
        Curve(
            kind=kind,
            level=level,
            ranks=nodes * each,
            nodes=nodes,
            sizes=(1000, 100_000),
            seconds=tuple(rng.uniform(0.5, 2) * (1e-4 + slower * size / rates[level] / each) for size in (0, 100_000)),
        )
        for level in sorted(rates.keys() - {"node"})
        for kind in ("all_reduce", "all_gather", "reduce_scatter")
        for nodes in range(2, len(counts) + 1)
        for each in range(1, max(counts.values()) + 1)
        if rng.random() < 0.6
    ]
    return cluster.model_copy(update={"curves": tuple(curves)})


def two_kinds(profile: Profile, cluster: Cluster, seed: int) -> tuple[Profile, Cluster]:
    """The same on devices of two kinds, the second from 0.4 to 2 times as slow; one of each if there are several."""
    rng = random.Random(seed + 9_000_000)

    def slower(layer: Layer) -> Layer:
        factor = rng.uniform(0.4, 2.0)
        costs = tuple(
            each.model_copy(update={"forward_s": factor * each.forward_s, "backward_s": factor * each.backward_s})
            for each in layer.costs
        )
        return layer.model_copy(update={"costs": costs, "update_s": factor * layer.update_s})

    kind = DeviceKind(type="cpu", name="other", memory_bytes=2**34)
    other = DeviceCosts(device=kind, layers=tuple(map(slower, profile.layers)))
    count = len(cluster.devices)
    of = [rng.choice(("test", "other")) for _ in range(count)]
    if count > 1:
        of[0], of[-1] = ("test", "other") if rng.random() < 0.5 else ("other", "test")
    devices = tuple(device.model_copy(update={"type": kind}) for device, kind in zip(cluster.devices, of, strict=True))
    return profile.model_copy(update={"others": (other,)}), cluster.model_copy(update={"devices": devices})


def launched(profile: Profile, seed: int) -> Profile:
    """The same on devices whose host launches what they compute, from quicker than they are to slower.

    Layer by layer, forward and backward apart.
    """
    rng = random.Random(seed + 11_000_000)

    def timed(layer: Layer) -> Layer:
        forward, backward = rng.choice([0.0, rng.uniform(0, 3)]), rng.uniform(0, 3)
        costs = tuple(
            each.model_copy(
                update={
                    "forward_launch_s": forward * layer.costs[0].forward_s,
                    "backward_launch_s": backward * layer.costs[0].backward_s,
                }
            )
            for each in layer.costs
        )
        return layer.model_copy(update={"costs": costs})

    others = tuple(other.model_copy(update={"layers": tuple(map(timed, other.layers))}) for other in profile.others)
    return profile.model_copy(update={"layers": tuple(map(timed, profile.layers)), "others": others})


def problem(seed: int, devices: int, kinds: int, **asked: Any) -> tuple[Profile, Cluster]:  # noqa: ANN401
    """Return a random profile and cluster; one in ``kinds`` on two kinds of device."""
    profile, cluster = random_profile(seed, **asked), random_cluster(seed, devices)
    return (profile, cluster) if seed % kinds else two_kinds(profile, cluster, seed)


def small_question(seed: int) -> tuple[Profile, Cluster, PlanOptions]:
    """Few layers with every option, or up to 8 layers or 6 devices with fewer; one in three on two kinds of device.

    Every plan of these can be simulated, and the one to be found is the fastest, to the last digit.
    """
    rng = random.Random(seed)
    layers, devices, batches, asked = rng.choice(
        [
            (4, 3, (1, 2, 3, 4), {}),
            (4, 2, (2, 4, 6), {}),
            (8, 2, (2, 3), {"recompute": "none"}),
            (6, 3, (2, 3), {"recompute": "none", "shard": "none"}),
            (3, 6, (2,), {"shard": "optimizer", "recompute": "full"}),
            (5, 4, (2,), {"shard": "parameters", "recompute": "none"}),
        ]
    )
    profile, cluster = problem(seed, devices, 3, most_layers=layers, batches=batches)
    return profile, cluster, PlanOptions(**{"gpus": devices, "gap": 0.0, "shard": "auto", **asked})


def gpt_profile(blocks: int = 12, width: int = 192, context: int = 128, batch: int = 16) -> Profile:
    """An embedding, blocks, and a head tied to the embedding, with a CPU's times."""
    names = ["wte", *(f"h.{index}" for index in range(blocks)), "head"]
    stream = context * width * 4
    tensors = [_tensor("tokens", None, ("wte",), 1024, False)]
    tensors += [_tensor(f"h{at}", made, (read,), stream) for at, (made, read) in enumerate(pairwise(names))]
    layers = []
    for index, name in enumerate(names):
        scale = {"wte": 0.1, "head": 0.8}.get(name, 1.0)
        parameters = 4 * (12 * width * width if "." in name else 256 * width)
        costs = []
        for rows in (1, 2, 4, 8, 16):
            saved = {f"{name}/{part}": stream * rows for part in range(14 if "." in name else 2)}
            if index:
                saved[f"h{index - 1}"] = stream * rows
            time = scale * (2e-4 + 1.6e-3 * rows)
            costs.append(cost(rows, time, 2.1 * time, saved, 18 * stream * rows, stream * rows))
        layers.append(_layer(name, parameters, parameters * 2e-10, tuple(costs)))
    tied = (TiedParameter(parameter="wte.weight", layers=("wte", "head"), bytes=4 * 256 * width),)
    return profile_of(layers, tensors, batch, tied, 0.001)


def local_cluster(devices: int = 2, memory_bytes: int = 8 * 2**30) -> Cluster:
    """Processes of one host over loopback, measured among two."""
    sizes = tuple(1024 << (2 * step) for step in range(8))
    curves = (_curve("p2p", sizes, 6e-5, 2e9), _curve("all_reduce", sizes, 2e-4, 8e8))
    link = Link(level="node", latency_s=6e-5, bytes_per_s=2e9, provenance="measured")
    return Cluster(devices=(Device(type="cpu", memory_bytes=memory_bytes),) * devices, links=(link,), curves=curves)
