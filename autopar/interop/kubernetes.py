"""kubernetes: the launch of autopar's own ranks as a TrainJob of Kubeflow's trainer (`docs/howto/several_hosts.md`).

Its runtime `torch-distributed` tells every pod by ``PET_*`` where ranks meet, which torchrun reads
(`trainer.kubeflow.org/v1alpha1`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from autopar.interop.target import ExportFile, ExportSubject, Target, comment, equal_nodes, launch_heading


def write(subject: ExportSubject, target: Target) -> Iterator[ExportFile]:
    """Yield a manifest."""
    nodes, ranks = equal_nodes(subject)
    command = ["torchrun", "-m", "autopar", "worker", subject.plan_file]
    use = [
        "image: one of your own, whose working folder has the plan, the model file and its data, and which has autopar "
        f"and torch; then kubectl create -f {target.file}",
    ]
    resource = "nvidia.com/gpu" if subject.plan.device_type == "cuda" else "cpu"
    count = ranks if subject.plan.device_type == "cuda" else ranks * subject.plan.threads
    lines = [
        "apiVersion: trainer.kubeflow.org/v1alpha1",
        "kind: TrainJob",
        "metadata:",
        "  generateName: autopar-",
        "spec:",
        "  runtimeRef:",
        "    name: torch-distributed",
        "  trainer:",
        "    image: IMAGE",
        f"    numNodes: {nodes}",
        f"    numProcPerNode: {ranks}",
        f"    command: {json.dumps(command)}",
        "    resourcesPerNode:",
        "      limits:",
        f'        {resource}: "{count}"',
    ]
    text = "\n".join(lines)
    yield ExportFile(target.file, f"{comment([*launch_heading(subject, target), *use])}{text}\n")


TARGET = Target(
    version="Kubeflow trainer 2.3.0",
    trial="its schema took such manifests, and no cluster ran them",
    file="trainjob.yaml",
    write=write,
)
