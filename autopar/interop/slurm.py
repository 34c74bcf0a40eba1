"""slurm: the launch of autopar's own ranks by Slurm, a task for each (`docs/howto/several_hosts.md`)."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from autopar.interop.target import ExportFile, ExportSubject, Target, comment, equal_nodes, launch_heading


def write(subject: ExportSubject, target: Target) -> Iterator[ExportFile]:
    """Yield a batch script."""
    nodes, ranks = equal_nodes(subject)
    on_gpus = subject.plan.device_type == "cuda"
    asked = ["--job-name=autopar", f"--nodes={nodes}", f"--ntasks-per-node={ranks}"]
    asked.append(f"--gpus-per-node={ranks}" if on_gpus else f"--cpus-per-task={subject.plan.threads}")
    head = "".join(f"#SBATCH {each}\n" for each in asked)
    use = [f"sbatch {target.file}; what follows on that line is an option of autopar worker"]
    srun = f'srun --kill-on-bad-exit=1 --distribution=block autopar worker {shlex.quote(subject.plan_file)} "$@"'
    text = f"#!/bin/bash\n{head}{comment([*launch_heading(subject, target), *use])}set -euo pipefail\nexec {srun}\n"
    yield ExportFile(target.file, text)


TARGET = Target(
    version="Slurm 23.11", trial="shells took such scripts, and no cluster ran them", file="autopar.sbatch", write=write
)
