"""Instances: large planning problems that a seed makes, for benchmarks of the planner.

    python benchmarks/instances.py --seed 3 --layers 1000 --devices 1024 --output build/instance

writes `profile.json` and `cluster.json` into a folder, and prints the `autopar plan` command that goes with them.

Layers cost what those of a transformer of width 8,192 and sequences of 512 tokens do on an H100 in bf16 (0.8 billion
parameters with Adam in mixed precision, 140 MB of activations and a boundary of 8 MB per sample), each times a
lognormal factor of sigma 0.5 for its computation and parameters, one for its activations and one for its boundary; or
all alike. Nodes of eight devices are linked by NVLink inside and by 200 Gbit/s of every device to the network outside.
A step has four micro-batches of eight samples per stage, were stages on two devices each. Memory is 1.3 x the least
with which any plan fits that has as many micro-batches in flight as keep its stages at work.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from autopar.formats.cluster import Cluster, Device, Link
from autopar.formats.profile import Cost, DeviceKind, Layer, ModelSource, Noise, Profile, SavedStorage, Tensor
from autopar.options.plan import PlanOptions
from autopar.ownership import Replicas
from autopar.planner.costs.memory import Parts, PeakTerms, peak_of
from autopar.planner.costs.model import CostModel

__all__ = ["Instance", "instance", "least_memory_bytes"]

NODE = 8
REPLICAS = 2
"""Of the stages that the number of micro-batches goes by."""
ROWS = 8
SIGMA = 0.5
HEADROOM = 1.3
WIDTHS = (1, 2, 4, 8)
LONGEST = 16
PARAMETERS = 800_000_000
FLOPS_PER_S = 400e12
TOKENS = 512
SAVED_BYTES = 140_000_000
BOUNDARY_BYTES = 2 * TOKENS * 8192
LAUNCH_S = 50e-6


class Instance(NamedTuple):
    """What to plan."""

    profile: Profile
    cluster: Cluster
    options: PlanOptions


def instance(
    seed: int, layers: int = 1000, devices: int = 1024, *, repeated: bool = False, branches: int = 1
) -> Instance:
    """Return the instance of a seed; ``repeated``: all layers alike; ``branches``: as many chains, taken in turn."""
    rng = random.Random(seed)
    micro_batches = 4 * max(1, min(layers, devices // REPLICAS))
    drawn = [[1.0 if repeated else rng.lognormvariate(0.0, SIGMA) for _ in range(3)] for _ in range(layers)]
    names = [f"layer.{index}" for index in range(layers)]
    tensors = [_tensor("x", None, names[0], 8 * TOKENS)]
    tensors += [
        _tensor(
            f"t.{index}", names[index], names[min(index + branches, layers - 1)], int(BOUNDARY_BYTES * drawn[index][2])
        )
        for index in range(layers - 1)
    ]
    profile = Profile(
        model=ModelSource(source="model.py", sha256="0" * 64),
        batch=micro_batches * ROWS,
        device=DeviceKind(type="cuda", name="H100-SXM", memory_bytes=80 * 2**30),
        precision="bf16",
        layers=tuple(_layer(name, drawn[index], tensors[index] if index else None) for index, name in enumerate(names)),
        tensors=tuple(tensors),
        noise=Noise(median_spread=0.0, max_spread=0.0),
    )
    cluster = Cluster(
        name="instance",
        devices=tuple(Device(type="H100-SXM", memory_bytes=2**60, node=index // NODE) for index in range(devices)),
        links=(
            Link(level="node", latency_s=3e-6, bytes_per_s=300e9),
            Link(level="network", latency_s=8e-6, bytes_per_s=25e9),
        ),
    )
    options = PlanOptions(gpus=devices, micro_batches=micro_batches)
    limit = int(HEADROOM * least_memory_bytes(CostModel(profile, cluster, options), micro_batches))
    return Instance(profile, cluster, PlanOptions(gpus=devices, micro_batches=micro_batches, memory_bytes=limit))


def least_memory_bytes(costs: CostModel, micro_batches: int) -> int:
    """Return the least memory per device with which a plan fits that keeps PA's micro-batches in flight.

    These are one more than stages are behind, with which 1F1B keeps all stages at work. Everything is recomputed.
    """
    rows = {width: max(costs.shares(ROWS, Replicas(width))) for width in WIDTHS if width <= len(costs.devices)}
    longest = min(costs.layer_count, LONGEST)
    every = costs.recompute_levels(ROWS)[-1]
    parts = {width: costs.memory[0].arrays(each, every, longest) for width, each in rows.items()}
    peaks = {width: _peaks(parts[width], PeakTerms(rows[width], 1, micro_batches, width)) for width in parts}
    low, high = 0, 64 * max(int(each.max()) for each in peaks.values())
    while high - low > max(1, high // 1000):
        middle = (low + high) // 2
        depths = {
            width: np.where(peak <= middle, 1 + (middle - peak) // np.maximum(1, _peaks(parts[width])), 0)
            for width, peak in peaks.items()
        }
        low, high = (low, middle) if _fewest_devices(depths) <= len(costs.devices) else (middle, high)
    return high


def _peaks(parts: Parts, held: PeakTerms | None = None) -> np.ndarray:
    """What stages hold with one micro-batch in flight, or what each further one adds, ``[first, length - 1]``."""
    found = np.asarray(parts.activations if held is None else peak_of(parts, held))
    layers, longest = found.shape
    there = np.arange(layers)[:, None] + np.arange(1, longest + 1) <= layers
    return np.where(there, found, 2**50 if held is not None else 1)


def _fewest_devices(depths: dict[int, np.ndarray]) -> float:
    """Fewest devices of a plan whose every stage may have one more in flight than stages are behind."""
    layers, longest = next(iter(depths.values())).shape
    stops = np.minimum(np.arange(layers)[:, None] + np.arange(1, longest + 1), layers)
    fewest = np.full(layers + 1, np.inf)
    fewest[layers] = 0
    best = np.inf
    for depth in range(1, layers + 1):
        widths = np.full((layers, longest), np.inf)
        for width, most in sorted(depths.items(), reverse=True):
            widths[most >= depth] = width
        fewest = np.append((widths + fewest[stops]).min(axis=1), np.inf)
        best = min(best, float(fewest[0]))
        if not np.isfinite(fewest).any():
            break
    return best


def _layer(name: str, factors: list[float], read: Tensor | None) -> Layer:
    size, kept, _ = factors
    parameters = int(2 * PARAMETERS * size)
    forward_s = 2 * PARAMETERS * TOKENS * size / FLOPS_PER_S
    received = {} if read is None else {read.name: read.bytes_per_sample}
    costs = []
    for rows in (1, 2, 4, 8):
        saved = {name: int(SAVED_BYTES * kept) * rows, **{other: each * rows for other, each in received.items()}}
        costs.append(
            Cost(
                micro_batch=rows,
                forward_s=LAUNCH_S + forward_s * rows,
                backward_s=2 * (LAUNCH_S + forward_s * rows),
                saved=tuple(SavedStorage(storage=storage, bytes=each) for storage, each in saved.items()),
                peak_bytes=int(1.2 * SAVED_BYTES * kept) * rows,
                output_bytes=BOUNDARY_BYTES * rows,
            )
        )
    return Layer(
        name=name,
        modules=(name,),
        parameters_bytes=parameters,
        trainable_bytes=parameters,
        gradient_bytes=parameters,
        optimizer_bytes=6 * parameters,
        update_s=16 * PARAMETERS * size / 2e12,
        costs=tuple(costs),
    )


def _tensor(name: str, producer: str | None, consumer: str, size: int) -> Tensor:
    return Tensor(
        name=name,
        producer=producer,
        consumers=(consumer,),
        bytes_per_sample=size,
        dtype="i64" if producer is None else "bf16",
        gradient=producer is not None,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="another instance for every seed")
    parser.add_argument("--layers", type=int, default=1000, help="in a chain")
    parser.add_argument("--devices", type=int, default=1024, help="in nodes of eight")
    parser.add_argument("--repeated", action="store_true", help="all layers alike")
    parser.add_argument("--output", type=Path, required=True, help="folder for the profile and the cluster")
    arguments = parser.parse_args()
    made = instance(arguments.seed, arguments.layers, arguments.devices, repeated=arguments.repeated)
    arguments.output.mkdir(parents=True, exist_ok=True)
    made.profile.save(arguments.output / "profile.json")
    made.cluster.save(arguments.output / "cluster.json")
    sys.stdout.write(
        f"autopar plan {arguments.output / 'profile.json'} --gpus {arguments.devices} "
        f"--micro-batches {made.options.micro_batches} --memory {made.options.memory_bytes}B\n"
    )


if __name__ == "__main__":
    main()
