"""Whether a launcher that is at work has started a process beside others, which `autopar run` must not be."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import pytest

from autopar.errors import UsageError
from autopar.ranks.environment import refuse_siblings

TORCHRUN = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
OMPI = {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
SLURM = {
    "SLURM_JOB_ID": "77123",
    "SLURM_STEP_ID": "2",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "3",
    "SLURM_STEP_NODELIST": "here",
}
LAUNCHERS = {
    "torchrun": (TORCHRUN, ("RANK", "LOCAL_RANK")),
    "mpirun": (OMPI, ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")),
    "srun": (SLURM, ("SLURM_PROCID", "SLURM_LOCALID")),
}


def variables(launcher: str, rank: int) -> dict[str, str]:
    common, own = LAUNCHERS[launcher]
    return {**common, **dict.fromkeys(own, str(rank))}


@contextmanager
def process(environment: Mapping[str, str]) -> Iterator[None]:
    """Keep a process with some variables beside this one."""
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, stdin=-1, stdout=-1, env={**os.environ, **environment}) as running:
        assert running.stdout is not None
        running.stdout.readline()
        yield
        running.communicate(b"\n")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_one_of_several_that_are_at_work_is_refused_and_the_remedy_leaves_it_alone(launcher: str) -> None:
    own = variables(launcher, 1)
    # Stale variables, and those of this process's own children.
    refuse_siblings(own)
    with ExitStack() as running:
        running.enter_context(process(own))
        running.enter_context(process(variables("mpirun" if launcher == "srun" else "srun", 2)))
        refuse_siblings(own)
        running.enter_context(process(variables(launcher, 2)))
        with pytest.raises(UsageError, match=f"{launcher} has started it 3 times .here as rank 1.") as refusal:
            refuse_siblings(own)
        unset = re.findall(r"-u (\w+)", str(refusal.value))
        refuse_siblings({name: value for name, value in own.items() if name not in unset})


def test_an_agent_that_waits_where_ranks_meet_is_at_work_and_batch_scripts_and_single_ranks_are_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        own = {**variables("torchrun", 0), "MASTER_PORT": str(server.getsockname()[1])}
        with pytest.raises(UsageError, match="`autopar worker`"):
            refuse_siblings(own)
        refuse_siblings({**own, "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"})
    for alone in ({}, {"SLURM_JOB_ID": "77123", "SLURM_PROCID": "0", "SLURM_NTASKS": "3"}):
        with process({**alone, "SLURM_PROCID": "1"}):
            refuse_siblings(alone)
