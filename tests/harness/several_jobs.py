"""A script that steps one job after the other, one of which fails: several_jobs.py PLAN..., one plan a job.

The second job fails in its second step, on one rank. Every rank prints the losses of the others, job by job. A job that
is left has given back its groups of ranks. What a job fails of is on standard error.
"""

import os
import sys
from pathlib import Path

import torch

import autopar
from autopar.errors import AutoparError
from labelled import loss, sgd
from script_jobs import batches, make_model


def main() -> None:
    if os.environ.get("OWN_GROUP"):
        torch.distributed.init_process_group("gloo")
    own_threads = 2 if torch.distributed.is_initialized() else 0
    for index, path in enumerate(sys.argv[1:]):
        try:
            losses = _train(path, fails=index == 1)
        except AutoparError as error:
            losses = []
            sys.stderr.write(f"job {index}: {error}\n")
        assert _gloo_threads() == own_threads
        sys.stdout.write(f"job {index} rank {os.environ['RANK']}: {losses}\n")
        sys.stdout.flush()
    if os.environ.get("OWN_GROUP"):
        assert len(torch.distributed.distributed_c10d._world.pg_map) == 1
        torch.distributed.destroy_process_group()


def _train(path: str, *, fails: bool) -> list[float]:
    plan = autopar.Plan.load(Path(path))
    with autopar.materialize(make_model(), plan, loss=loss, optimizer=sgd, timeout_s=4) as job:
        losses = []
        for inputs, targets in batches(3):
            if fails and losses and job.rank == 2:
                targets = targets + 77
            losses.append(job.step((inputs, targets)).loss)
        assert _gloo_threads()
        return losses


def _gloo_threads() -> int:
    """Return how many threads carry out reductions: one that frees a tensor while Python ends aborts the process."""
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return names.count("pt_gloo_runloop\n")


main()
