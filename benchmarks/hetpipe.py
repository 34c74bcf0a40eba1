"""HetPipe on its paper's cluster: pipelines of their own (`wsp`) beside data parallelism, on estimated devices.

    python benchmarks/hetpipe.py --json benchmarks/results/hetpipe.json

Four nodes of four GPUs: TITAN V (V), TITAN RTX (R), GeForce RTX 2060 (G) and Quadro P4000 (Q), as Park et al. (USENIX
ATC 2020) have them, with PCIe inside nodes and 56 Gbit/s between them, and with 10 Gbit/s. Times are estimates from
`autopar.hardware.gpus`, in float32; a mini-batch of a GPU, or of a pipeline, has 32 images, as in the paper. Samples
per second are compared:

- ``horovod``: data parallelism with equal shares, on the kinds of GPUs that hold the model;
- ``by speed``: the same, with shares by speed, which the paper does not have;
- ``hetpipe``: the best of HetPipe's dealings and cuts under `wsp` with D = 0, and every dealing, and with D = 4; ranks
  that hold a layer add up its changes in place of parameter servers, which stays within a node where that layer is in
  one node in all pipelines (the paper's "local").

``growing`` adds kinds of GPUs one by one. ``alike`` is one node of eight A100 with NVLink, where `wsp` has nothing to
win. The paper's abstract has up to 49 % faster convergence; that it also has 39 % for ResNet-152, and that there
ResNet-152 does not fit an RTX 2060, is as remembered, and could not be looked up here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import autopar
from autopar.formats.cluster import Cluster
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from autopar.hardware.clusters import cluster_named
from autopar.options.plan import check_policy
from autopar.ownership import Replicas
from autopar.planner import PlanOptions
from autopar.planner.candidate import Candidate, Family, place
from autopar.planner.constraints import Question
from autopar.planner.costs.model import CostModel
from autopar.planner.objectives.waves import hetpipe_plan
from autopar.planner.shares import by_speed
from autopar.planner.simulator.simulate import Simulator
from machine import Watch

MODELS = Path(__file__).parent / "models"
GPUS = {"V": "TITAN-V", "R": "TITAN-RTX", "G": "RTX2060", "Q": "Quadro-P4000"}
ALIKE = "A100-SXM-80G"
SAMPLES, PER_NODE = 32, 4
BETWEEN = ("56Gbps", "10Gbps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    watch, rows = Watch(), list[dict[str, Any]]()
    growing, alike = list[dict[str, Any]](), list[dict[str, Any]]()
    for model in ("vgg19", "resnet152"):
        kinds = ",".join((*GPUS.values(), ALIKE))
        profile = autopar.profile(MODELS / f"{model}.py", SAMPLES, device=kinds, tensor=1)
        for between in BETWEEN:
            rows.append({"model": model, "between": between, **_row(profile, _cluster("VRGQ", between))})
            sys.stderr.write(f"{rows[-1]}\n")
        for letters in ("V", "VR", "VRQ", "VRQG"):
            growing.append({"model": model, "gpus": letters, **_row(profile, _cluster(letters, BETWEEN[0]), few=True)})
            sys.stderr.write(f"{growing[-1]}\n")
        alike.append({"model": model, **_row(profile, cluster_named(f"8x{ALIKE}"))})
        sys.stderr.write(f"{alike[-1]}\n")
    watch.record({"rows": rows, "growing": growing, "alike": alike}, arguments.json)


def _cluster(letters: str, between: str) -> Cluster:
    nodes = "+".join(f"1x{PER_NODE}x{GPUS[letter]}" for letter in letters)
    return cluster_named(f"{nodes}:{between}" if len(letters) > 1 else f"{PER_NODE}x{GPUS[letters]}")


def _row(profile: Profile, cluster: Cluster, *, few: bool = False) -> dict[str, Any]:
    """Return samples per second of every contestant; of ``few``, of the paper's two."""
    kinds, parallel = _parallel(profile, cluster, shares_by_speed=False)
    name, found = hetpipe_plan(_asked(profile, cluster))
    row: dict[str, Any] = {"horovod": parallel, "horovod_gpus": kinds, "hetpipe": _samples_per_s(found), "best": name}
    row["ratio"] = round(row["hetpipe"] / parallel, 3)
    if few:
        return row
    row["dealings"] = {name: row["hetpipe"]}
    for each in found.alternatives:
        assert each.stages is not None
        assert each.step_s is not None
        row["dealings"][each.name] = round(SAMPLES * (each.stages.count("/") + 1) / each.step_s, 1)
    row["stale"] = _samples_per_s(hetpipe_plan(_asked(profile, cluster, staleness=4))[1])
    row["by_speed"] = _parallel(profile, cluster, shares_by_speed=True)[1]
    return row


def _asked(profile: Profile, cluster: Cluster, **more: int) -> Question:
    options = PlanOptions(batch=SAMPLES, policy="wsp", gpus=len(cluster.devices), **more)  # type: ignore[arg-type]
    return Question.of(profile, cluster, check_policy(options))


def _samples_per_s(made: Plan) -> float:
    return round(len(made.pipelines) * made.batch / made.predicted.step_s, 1)


def _parallel(profile: Profile, cluster: Cluster, *, shares_by_speed: bool) -> tuple[list[str], float]:
    """Return the kinds of GPUs that hold all layers and a share of the samples, and what they train a second."""
    listed = tuple(dict.fromkeys(device.type for device in cluster.devices))
    fitting = [kind for kind in listed if _candidate(profile, _of(cluster, (kind,)), shares_by_speed)[1]]
    (costs, candidate), _ = _candidate(profile, _of(cluster, fitting), shares_by_speed)
    return fitting, round(costs.batch / Simulator(costs).step_s(candidate), 1)


def _of(cluster: Cluster, kinds: Sequence[str]) -> Cluster:
    devices = tuple(device for device in cluster.devices if device.type in kinds)
    return cluster.model_copy(update={"devices": devices})


def _candidate(profile: Profile, cluster: Cluster, shares_by_speed: bool) -> tuple[tuple[CostModel, Candidate], bool]:
    """Return one stage on all devices, with its prices, and whether it fits."""
    count = len(cluster.devices)
    costs = CostModel(profile, cluster, PlanOptions(batch=SAMPLES * count, gpus=count))
    family = Family(1, costs.batch, "1f1b")
    (stage,) = place(family, (costs.layer_count,), [Replicas(count)], range(count))
    stage = by_speed(costs, stage, family) if shares_by_speed else stage
    candidate = Candidate(*family, (stage,))
    return (costs, candidate), max(costs.shortfalls(candidate)) <= 0


if __name__ == "__main__":
    main()
