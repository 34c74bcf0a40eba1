"""A script that steps a plan's job until it is ended: endless_job.py PLAN."""

import sys
from pathlib import Path

import torch

import autopar
from script_jobs import LEARNING_RATE, batches, loss, make_model


def main() -> None:
    with autopar.materialize(
        make_model(),
        autopar.Plan.load(Path(sys.argv[1])),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE),
    ) as job:
        (batch,) = batches(1)
        while True:
            job.step(batch)
            Path("stepping").touch()


if __name__ == "__main__":
    main()
