"""Launchers: the launch of autopar's ranks by torchrun, by Slurm and on Kubernetes (`docs/howto/several_hosts.md`)."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator

from autopar.interop.target import ExportFile, ExportSubject, Target, comment, equal_nodes, launch_heading

_TORCHRUN_PORT = 29500


def _torchrun_script(subject: ExportSubject, target: Target) -> Iterator[ExportFile]:
    """Yield a script for every machine, for any plan that can be run.

    Arguments of the script are options of ``autopar worker``, such as ``--steps 100``. All machines have as many ranks,
    which are placed as planned when they meet, in whatever order machines come.

    Tried: ``bash -n``; a script trains two steps on this machine.
    """
    nodes, ranks = equal_nodes(subject)
    plan = shlex.quote(subject.plan_file)
    if nodes == 1:
        meeting, use = "--standalone", []
    else:
        meeting = f'--nnodes {nodes} --rdzv-backend c10d --rdzv-id autopar --rdzv-endpoint "$HOST:{_TORCHRUN_PORT}"'
        use = [f"run HOST=NAME bash {target.file} on every machine, with the name of the first of them"]
    lines = [
        *([": ${HOST:?names the first machine}"] if nodes > 1 else []),
        "export PYTHONSAFEPATH=1",
        f'exec torchrun {meeting} --nproc-per-node {ranks} -m autopar worker {plan} "$@"',
    ]
    text = "\n".join(lines)
    yield ExportFile(
        target.file, f"#!/bin/bash\n{comment([*launch_heading(subject, target), *use])}set -euo pipefail\n{text}\n"
    )


TORCHRUN = Target(
    version="torchrun of torch 2.13.0", trial="it ran such scripts", file="torchrun.sh", write=_torchrun_script
)


def _slurm_script(subject: ExportSubject, target: Target) -> Iterator[ExportFile]:
    """Yield a batch script, whose tasks are the ranks, for any plan that can be run.

    Arguments behind it are options of ``autopar worker``.

    Tried: ``bash -n``; there was no cluster.
    """
    nodes, ranks = equal_nodes(subject)
    on_gpus = subject.plan.device_type == "cuda"
    asked = ["--job-name=autopar", f"--nodes={nodes}", f"--ntasks-per-node={ranks}"]
    asked.append(f"--gpus-per-node={ranks}" if on_gpus else f"--cpus-per-task={subject.plan.threads}")
    head = "".join(f"#SBATCH {each}\n" for each in asked)
    use = [f"sbatch {target.file}; what follows on that line is an option of autopar worker"]
    srun = f'srun --kill-on-bad-exit=1 --distribution=block autopar worker {shlex.quote(subject.plan_file)} "$@"'
    text = f"#!/bin/bash\n{head}{comment([*launch_heading(subject, target), *use])}set -euo pipefail\nexec {srun}\n"
    yield ExportFile(target.file, text)


SLURM = Target(
    version="Slurm 23.11",
    trial="shells took such scripts, and no cluster ran them",
    file="autopar.sbatch",
    write=_slurm_script,
)


_TRAIN_JOB = """\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  generateName: autopar-
spec:
  runtimeRef:
    name: torch-distributed
  trainer:
    image: IMAGE
    numNodes: {nodes}
    numProcPerNode: {ranks}
    command: {command}
    env:
    - name: PYTHONSAFEPATH
      value: "1"
    resourcesPerNode:
      limits:
        {resource}: "{count}"
"""


def _kubernetes_manifest(subject: ExportSubject, target: Target) -> Iterator[ExportFile]:
    """Yield a manifest: a TrainJob of Kubeflow's trainer (`trainer.kubeflow.org/v1alpha1`).

    You name an image in it. Its runtime `torch-distributed` tells every pod by ``PET_*`` where ranks meet, which
    torchrun reads.

    Tried: the models of the schema of kubeflow-trainer-api 2.3.0 read the manifest and leave nothing out; there was no
    cluster.
    """
    nodes, ranks = equal_nodes(subject)
    command = ["torchrun", "-m", "autopar", "worker", subject.plan_file]
    use = [
        "image: one of your own, whose working folder has the plan, the model file and its data, and which has autopar "
        f"and torch; then kubectl create -f {target.file}",
    ]
    resource = "nvidia.com/gpu" if subject.plan.device_type == "cuda" else "cpu"
    count = ranks if subject.plan.device_type == "cuda" else ranks * subject.plan.threads
    text = _TRAIN_JOB.format(nodes=nodes, ranks=ranks, command=json.dumps(command), resource=resource, count=count)
    yield ExportFile(target.file, f"{comment([*launch_heading(subject, target), *use])}{text}")


KUBERNETES = Target(
    version="Kubeflow trainer 2.3.0",
    trial="its schema took such manifests, and no cluster ran them",
    file="trainjob.yaml",
    write=_kubernetes_manifest,
)
