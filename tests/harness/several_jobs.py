"""A script that steps one job after the other, one of which fails: several_jobs.py PLAN..., one plan a job.

The second job fails in its second step, on one rank. Every rank prints the losses of the others, job by job.
"""

import os
import sys
from pathlib import Path

import torch

import autopar
from autopar.errors import AutoparError
from script_jobs import LEARNING_RATE, batches, loss, make_model


def main() -> None:
    if os.environ.get("OWN_GROUP"):
        torch.distributed.init_process_group("gloo")
    for index, path in enumerate(sys.argv[1:]):
        try:
            losses = _train(path, fails=index == 1)
        except AutoparError:
            losses = []
        sys.stdout.write(f"job {index} rank {os.environ['RANK']}: {losses}\n")
        sys.stdout.flush()
    if os.environ.get("OWN_GROUP"):
        assert len(torch.distributed.distributed_c10d._world.pg_map) == 1
        torch.distributed.destroy_process_group()


def _train(path: str, *, fails: bool) -> list[float]:
    with autopar.materialize(
        make_model(),
        autopar.Plan.load(Path(path)),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9),
        timeout_s=4,
    ) as job:
        losses = []
        for inputs, targets in batches(3):
            if fails and losses and job.rank == 3:
                targets = targets + 77
            losses.append(job.step((inputs, targets)).loss)
        return losses


if __name__ == "__main__":
    main()
