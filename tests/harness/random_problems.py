"""Random and GPT-like profiles and clusters."""

import random
from itertools import pairwise
from typing import Any

from autopar.formats.cluster import Cluster, Curve, Device, Link
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
from autopar.planner.options import PlanOptions

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


def random_profile(
    seed: int, most_layers: int = 7, batches: tuple[int, ...] = (1, 2, 3, 4, 6), skips: float = 0.12
) -> Profile:
    """Skips, side entrances, missing gradients, tied parameters, layers without time or parameters, single layers."""
    rng = random.Random(seed)
    count = rng.randint(1, most_layers)
    batch = rng.choice(batches)
    names = [f"layer.{index}" for index in range(count)]
    tensors = [Tensor(name="x", producer=None, consumers=(names[0],), bytes_per_sample=64, dtype="i64", gradient=False)]
    for index in range(count - 1):
        readers = {index + 1} if rng.random() < 0.93 else set()
        readers |= {reader for reader in range(index + 2, count) if rng.random() < skips}
        if readers:
            consumers = tuple(names[reader] for reader in sorted(readers))
            size, gradient = rng.choice([0, 1000, 40_000, 100_000]), rng.random() < 0.93
            tensors.append(
                Tensor(
                    name=f"t{index}",
                    producer=names[index],
                    consumers=consumers,
                    bytes_per_sample=size,
                    dtype="f32",
                    gradient=gradient,
                )
            )
    layers = [_random_layer(rng, names, index, tensors, batch) for index in range(count)]
    tied: tuple[TiedParameter, ...] = ()
    if count > 1 and rng.random() < 0.3:
        holders = sorted(rng.sample(range(count), 2))
        size = rng.choice([1000, 200_000])
        tied = (TiedParameter(parameter="w", layers=tuple(names[holder] for holder in holders), bytes=size),)
        for holder in holders:
            layer = layers[holder]
            layers[holder] = layer.model_copy(
                update={
                    "parameters_bytes": layer.parameters_bytes + size,
                    "trainable_bytes": layer.trainable_bytes + size,
                    "gradient_bytes": layer.gradient_bytes + size,
                    "optimizer_bytes": layer.optimizer_bytes + 2 * size,
                }
            )
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
    return Layer(
        name=names[index],
        modules=(names[index],),
        parameters_bytes=parameters,
        trainable_bytes=parameters,
        gradient_bytes=parameters,
        optimizer_bytes=2 * parameters,
        update_s=parameters * 1e-10,
        costs=costs,
    )


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
        seconds = tuple(latency + size / bandwidth for size in sizes)
        curves = (
            Curve(kind="p2p", ranks=2, level="node", sizes=sizes, seconds=seconds),
            Curve(kind="all_reduce", ranks=2, level="node", sizes=sizes, seconds=tuple(2 * s for s in seconds)),
        )
    kinds = tuple(Device(type="cpu", memory_bytes=2**34, node=node) for node in nodes)
    return Cluster(devices=kinds, links=links, curves=curves)


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
    tensors = [
        Tensor(name="tokens", producer=None, consumers=("wte",), bytes_per_sample=1024, dtype="i64", gradient=False)
    ]
    tensors += [
        Tensor(name=f"h{index}", producer=made, consumers=(read,), bytes_per_sample=stream, dtype="f32", gradient=True)
        for index, (made, read) in enumerate(pairwise(names))
    ]
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
        sizes = {f"{kind}_bytes": parameters for kind in ("parameters", "trainable", "gradient")}
        update = parameters * 2e-10
        layers.append(
            Layer(
                name=name, modules=(name,), **sizes, optimizer_bytes=2 * parameters, update_s=update, costs=tuple(costs)
            )
        )
    tied = (TiedParameter(parameter="wte.weight", layers=("wte", "head"), bytes=4 * 256 * width),)
    return profile_of(layers, tensors, batch, tied, 0.001)


def local_cluster(devices: int = 2, memory_bytes: int = 8 * 2**30) -> Cluster:
    """Processes of one host over loopback, measured among two."""
    sizes = tuple(1024 << (2 * step) for step in range(8))
    curves = (
        Curve(kind="p2p", ranks=2, level="node", sizes=sizes, seconds=tuple(6e-5 + size / 2e9 for size in sizes)),
        Curve(
            kind="all_reduce", ranks=2, level="node", sizes=sizes, seconds=tuple(2e-4 + size / 8e8 for size in sizes)
        ),
    )
    link = Link(level="node", latency_s=6e-5, bytes_per_s=2e9, provenance="measured")
    return Cluster(devices=(Device(type="cpu", memory_bytes=memory_bytes),) * devices, links=(link,), curves=curves)
