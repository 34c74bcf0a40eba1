"""A script that steps a plan's job until it is ended: endless_job.py PLAN."""

import sys
from pathlib import Path

import autopar
from labelled import loss, sgd
from script_jobs import batches, make_model

if __name__ == "__main__":
    with autopar.materialize(make_model(), autopar.Plan.load(Path(sys.argv[1])), loss=loss, optimizer=sgd) as job:
        while True:
            job.step(batches(1)[0])
            Path("stepping").touch()
