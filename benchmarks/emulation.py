"""Emulation: what the planner is told of layers that sleep, so that it predicts how long they take to train."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.formats.cluster import Cluster, Device, Link
from autopar.formats.plan import Plan
from autopar.formats.profile import Cost, DeviceKind, Layer, ModelSource, Noise, Profile, Tensor
from autopar.planner import simulate
from sleeping import Pace

__all__ = ["free_links", "later", "predicted_s", "profile_of"]

MEMORY_BYTES = 2**40


def profile_of(paces: Sequence[Pace], rows: int, batch: int, overshoot_s: float, *, split: bool) -> Profile:
    """Return a profile of layers that sleep as long as ``paces`` say, and ``overshoot_s`` longer every time."""
    last = len(paces) - 1
    layers = tuple(
        Layer(
            name=str(index),
            modules=(str(index),),
            parameters_bytes=4,
            trainable_bytes=4,
            gradient_bytes=4,
            optimizer_bytes=0,
            costs=tuple(_cost(pace, count, overshoot_s, split) for count in range(1, rows + 1)),
        )
        for index, pace in enumerate(paces)
    )
    tensors = tuple(
        Tensor(
            name=f"h{index}",
            producer=str(index),
            consumers=(str(index + 1),),
            bytes_per_sample=4 * paces[index].values,
            dtype="float32",
            gradient=True,
        )
        for index in range(last)
    )
    device = DeviceKind(type="cpu", name="cpu", memory_bytes=MEMORY_BYTES)
    noise = Noise(median_spread=0.0, max_spread=0.0)
    source = ModelSource(source="sleeping.py", sha256="0" * 64)
    return Profile(
        model=source, batch=batch, device=device, precision="fp32", layers=layers, tensors=tensors, noise=noise
    )


def _cost(pace: Pace, rows: int, overshoot_s: float, split: bool) -> Cost:
    half_s = rows * pace.backward_s / 2 + overshoot_s if split else None
    return Cost(
        micro_batch=rows,
        forward_s=rows * pace.forward_s + overshoot_s,
        backward_s=rows * pace.backward_s + overshoot_s * (2 if split else 1),
        backward_input_s=half_s,
        backward_weight_s=half_s,
        saved=(),
        peak_bytes=0,
        output_bytes=0,
    )


def free_links(ranks: int) -> Cluster:
    """Return devices between which messages take no time."""
    device = Device(type="cpu", memory_bytes=MEMORY_BYTES)
    return Cluster(devices=(device,) * ranks, links=(Link(level="node", latency_s=0.0, bytes_per_s=1e15),))


def later(cluster: Cluster, delay_s: float) -> Cluster:
    """Return a cluster whose messages take so much longer."""
    links = [link.model_copy(update={"latency_s": link.latency_s + delay_s}) for link in cluster.links]
    curves = [
        curve.model_copy(update={"seconds": tuple(seconds + delay_s for seconds in curve.seconds)})
        if curve.kind == "p2p"
        else curve
        for curve in cluster.curves
    ]
    return cluster.model_copy(update={"links": tuple(links), "curves": tuple(curves)})


def predicted_s(plan: Plan, profile: Profile, cluster: Cluster) -> float:
    """Return the seconds of a step of a plan."""
    return simulate(plan, profile, cluster).end_s
