"""LaunchedRank: which rank of how many a launcher's environment makes of this process, and where all meet.

Read are the variables of torchrun and PyTorchJob, of Open MPI's, MVAPICH's and Intel MPI's mpirun, of Slurm's srun, of
pods told what torchrun would read (``PET_*``), and of Kubernetes' indexed jobs; in this order, for a launcher's
processes also see the variables of those around it.

Variables alone do not say that a launcher is at work: shells keep them, and batch scripts have them, too. What says so
is another process of this host with the variables of another rank of the same job, or, where every host has a single
rank, that somebody listens where the job's ranks meet.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from autopar.errors import UsageError

_PORT = 29500
"""Where ranks meet if nothing says otherwise; torchrun's default, too."""
_LAST_PORT = 65535
_SLURM_PORTS = range(15000, 30000)
"""Ports that jobs are spread over: below those that systems give out by themselves."""
SUPERVISED = "AUTOPAR_SUPERVISED"
"""Where a rank reads who watches over it."""

Environment = Mapping[str, str]


class LaunchedRank(NamedTuple):
    """One process among those that a launcher has started."""

    rank: int
    size: int
    local_rank: int
    """Index among the ranks of this host."""
    local_size: int
    address: str
    """Host of rank 0."""
    port: int
    starter: str
    """What is to start workers here, for errors."""

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on this host."""
        return self.local_size == self.size

    @property
    def ranks_of_host(self) -> range:
        """The ranks of this host, which follow each other."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_size)


def is_supervised(environment: Environment) -> bool:
    """Whether this process is a rank that a supervisor has started."""
    return SUPERVISED in environment


def is_launched(environment: Environment) -> bool:
    """Whether a launcher has started this process as a rank."""
    return any(marker in environment for marker, _ in _LAUNCHERS)


def rank_from_environment(environment: Environment) -> LaunchedRank:
    """Return the rank that the environment describes.

    Raises:
        UsageError: a variable is missing, is no number, or contradicts another; names it.
    """
    for marker, read in _LAUNCHERS:
        if marker in environment:
            return _check_rank(read(environment))
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in environment]
    raise UsageError(f"{', '.join(missing)} not set; start workers with torchrun, srun or mpirun, or use `autopar run`")


def _torchrun(environment: Environment) -> LaunchedRank:
    _need(environment, "torchrun", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    rank, size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    local_rank, local_size = (
        _number(environment, name) if name in environment else None for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    address = environment["MASTER_ADDR"]
    if local_rank is None and local_size is None:
        if _is_loopback(address) or size == 1:
            local_rank, local_size = rank, size
        elif "PET_NODE_RANK" in environment or "KUBERNETES_SERVICE_HOST" in environment:
            _one_per_pod(environment)
            local_rank, local_size = 0, 1
    elif local_size is None and _is_loopback(address):
        local_size = size
    if local_rank is None or local_size is None:
        _need(environment, "torchrun", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert local_rank is not None
    assert local_size is not None
    return LaunchedRank(rank, size, local_rank, local_size, address, _port(environment), "torchrun")


def _pod(environment: Environment) -> LaunchedRank:
    _need(environment, "torchrun", "PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR")
    _one_per_pod(environment)
    rank, size = _number(environment, "PET_NODE_RANK"), _number(environment, "PET_NNODES")
    return LaunchedRank(
        rank, size, 0, 1, environment["PET_MASTER_ADDR"], _port(environment, "PET_MASTER_PORT"), "torchrun"
    )


def _indexed_job(environment: Environment) -> LaunchedRank:
    starter = "the indexed job's pod template"
    _need(environment, starter, "WORLD_SIZE", "MASTER_ADDR")
    rank, size = _number(environment, "JOB_COMPLETION_INDEX"), _number(environment, "WORLD_SIZE")
    return LaunchedRank(rank, size, 0, 1, environment["MASTER_ADDR"], _port(environment), starter)


def _slurm(environment: Environment) -> LaunchedRank:
    _need(environment, "srun", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_LOCALID", "SLURM_NODEID")
    _need(environment, "srun", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST")
    job, step = _number(environment, "SLURM_JOB_ID"), _number(environment, "SLURM_STEP_ID")
    # Steps of a job may run at once: jobs are 16 ports apart.
    port = _SLURM_PORTS[(16 * job + step) % len(_SLURM_PORTS)]
    return LaunchedRank(
        _number(environment, "SLURM_PROCID"),
        _number(environment, "SLURM_STEP_NUM_TASKS"),
        _number(environment, "SLURM_LOCALID"),
        _tasks_of_node(environment["SLURM_STEP_TASKS_PER_NODE"], _number(environment, "SLURM_NODEID")),
        environment.get("MASTER_ADDR") or _first_host(environment["SLURM_STEP_NODELIST"]),
        _port(environment, default=port),
        "srun",
    )


def _mpi(rank: str, size: str, local_rank: str, local_size: str) -> Callable[[Environment], LaunchedRank]:
    def read(environment: Environment) -> LaunchedRank:
        _need(environment, "mpirun", rank, size, local_rank, local_size)
        numbers = {name: _number(environment, name) for name in (rank, size, local_rank, local_size)}
        if numbers[size] != numbers[local_size]:
            # Nothing that mpirun sets says where rank 0 is.
            _need(environment, "mpirun -x MASTER_ADDR=HOST", "MASTER_ADDR")
        address = environment.get("MASTER_ADDR", "127.0.0.1")
        own = (numbers[rank], numbers[size], numbers[local_rank], numbers[local_size])
        return LaunchedRank(*own, address, _port(environment), "mpirun")

    return read


_LAUNCHERS: tuple[tuple[str, Callable[[Environment], LaunchedRank]], ...] = (
    ("RANK", _torchrun),
    *(
        (f"{world}_RANK", _mpi(*(f"{world}_{part}" for part in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))))
        for world in ("OMPI_COMM_WORLD", "MV2_COMM_WORLD")
    ),
    ("MPI_LOCALRANKID", _mpi("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
    ("SLURM_PROCID", _slurm),
    ("PET_NODE_RANK", _pod),
    ("JOB_COMPLETION_INDEX", _indexed_job),
)
MARKERS = tuple(marker for marker, _ in _LAUNCHERS)
"""Variables by which launchers are known."""


def _check_rank(own: LaunchedRank) -> LaunchedRank:
    if own.rank >= own.size:
        raise UsageError(f"the rank is {own.rank} of {own.size}: ranks count from 0; start workers with {own.starter}")
    if own.local_rank >= own.local_size or own.local_size > own.size:
        raise UsageError(
            f"rank {own.rank} is number {own.local_rank} of {own.local_size} on its host, and there are "
            f"{own.size} in all: these contradict each other; start workers with {own.starter}"
        )
    return own


def _first_host(hosts: str) -> str:
    """Return the first host of a Slurm node list.

    >>> _first_host("gpu[003-006,9],login1")
    'gpu003'
    >>> _first_host("r[1-2]n[07-08]-ib")
    'r1n07-ib'
    >>> _first_host("alone,other[1-2]")
    'alone'
    """
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", hosts)
    assert first is not None
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group())


def _tasks_of_node(counts: str, node: int) -> int:
    """Return how many tasks Slurm's ``TASKS_PER_NODE`` gives the node.

    >>> [_tasks_of_node("4(x2),3", node) for node in range(3)]
    [4, 4, 3]

    Raises:
        UsageError: the text is of another form, or has fewer nodes.
    """
    each: list[int] = []
    for part in counts.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise UsageError(f"SLURM_STEP_TASKS_PER_NODE must be like 4(x2),3, found {counts!r}")
        each += [int(found.group(1))] * int(found.group(2) or 1)
    if node >= len(each):
        raise UsageError(f"SLURM_STEP_TASKS_PER_NODE is {counts}, of {len(each)} nodes, and SLURM_NODEID {node}")
    return each[node]


def _one_per_pod(environment: Environment) -> None:
    count = environment.get("PET_NPROC_PER_NODE", "1")
    if count != "1":
        raise UsageError(
            f"PET_NPROC_PER_NODE is {count}: this pod holds several ranks, which torchrun starts; "
            "use `PYTHONSAFEPATH=1 torchrun -m autopar worker` in it"
        )


def _need(environment: Environment, starter: str, *names: str) -> None:
    missing = [name for name in names if name not in environment]
    if missing:
        raise UsageError(f"{', '.join(missing)} not set; start workers with {starter}, or use `autopar run`")


def _port(environment: Environment, name: str = "MASTER_PORT", default: int = _PORT) -> int:
    found = _number(environment, name) if name in environment else default
    if found > _LAST_PORT:
        raise UsageError(f"{name} must be at most {_LAST_PORT}, found {found}")
    return found


def _number(environment: Environment, name: str) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(f"{name} must be a number, found {text!r}; start workers with torchrun, or use `autopar run`")
    return int(text)


def _is_loopback(address: str) -> bool:
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


_CONNECT_S = 1.0


def refuse_siblings(environment: Environment) -> None:
    """Check that this process, which is to start ranks, is not one of several that a launcher has started alike.

    Raises:
        UsageError: it is; names ``worker``.
    """
    own = _rank_of(environment)
    if own is None or own.size == 1:
        return
    others = (each for each in map(_rank_of, _environments_of_others()) if each is not None and each.rank != own.rank)
    alike = (each._replace(rank=own.rank, local_rank=own.local_rank) == own for each in others)
    if any(alike) or _is_listened_to(own):
        unset = " ".join(f"-u {name}" for name in MARKERS if name in environment)
        raise UsageError(
            f"`autopar run` starts all ranks itself, and {own.starter} has started it {own.size} times (here as "
            f"rank {own.rank}): each would train alone, and write the same files; have {own.starter} start "
            f"`autopar worker`, or put `env {unset}` before `autopar run` if it is to be alone"
        )


def _rank_of(environment: Environment) -> LaunchedRank | None:
    try:
        return rank_from_environment(environment)
    except UsageError:
        # A batch script has some of srun's variables.
        return None


def _environments_of_others() -> Iterator[Environment]:
    """Yield the environments that this user's other processes were started with; none where the system has no /proc."""
    for file in Path("/proc").glob("[0-9]*/environ"):
        # Others' are not to be read, and processes end.
        with suppress(OSError):
            if file.parent.name != str(os.getpid()):
                lines = file.read_bytes().decode(errors="replace").split("\0")
                yield dict(line.split("=", 1) for line in lines if "=" in line)


def _is_listened_to(own: LaunchedRank) -> bool:
    """Whether torchrun's agent waits where ranks meet; others open that port only when ranks ask for it."""
    if own.starter != "torchrun":
        return False
    with suppress(OSError), socket.create_connection((own.address, own.port), _CONNECT_S):
        return True
    return False
