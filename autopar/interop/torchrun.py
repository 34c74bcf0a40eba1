"""torchrun: the launch of autopar's own ranks by torch's launcher (`docs/howto/several_hosts.md`)."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from autopar.interop.target import ExportFile, ExportSubject, Target, comment, equal_nodes, launch_heading

PORT = 29500


def write(subject: ExportSubject, target: Target) -> Iterator[ExportFile]:
    """Yield a script."""
    nodes, ranks = equal_nodes(subject)
    plan = shlex.quote(subject.plan_file)
    if nodes == 1:
        meeting, use = "--standalone", []
    else:
        meeting = f'--nnodes {nodes} --rdzv-backend c10d --rdzv-id autopar --rdzv-endpoint "$HOST:{PORT}"'
        use = [f"run HOST=NAME bash {target.file} on every machine, with the name of the first of them"]
    lines = [
        *([": ${HOST:?names the first machine}"] if nodes > 1 else []),
        f'exec torchrun {meeting} --nproc-per-node {ranks} -m autopar worker {plan} "$@"',
    ]
    text = "\n".join(lines)
    yield ExportFile(
        target.file, f"#!/bin/bash\n{comment([*launch_heading(subject, target), *use])}set -euo pipefail\n{text}\n"
    )


TARGET = Target(version="torchrun of torch 2.13.0", trial="it ran such scripts", file="torchrun.sh", write=write)
