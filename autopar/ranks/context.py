"""RankContext: what a rank knows about itself and its peers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from autopar.errors import TrainingError, UsageError
from autopar.ranks.board import SET_UP_S, Board
from autopar.ranks.environment import LaunchedRank
from autopar.ranks.interface import interface_towards
from autopar.ranks.meeting import meet

__all__ = ["RankContext", "backend_of", "device_of", "joined", "joined_from_environment", "patience"]


@dataclass(frozen=True)
class RankContext:
    """One process with one device, joined with its peers in a process group."""

    rank: int
    size: int
    local_rank: int
    """Index among the ranks of this host."""
    local_size: int
    """How many ranks this host runs."""
    device: torch.device
    timeout_s: float
    """Longest that a rank waits for another in training before the run is given up."""
    board: Board | None = None
    """Where the rank says what it is doing, for whoever watches over it."""
    report: Callable[[dict[str, object]], None] = field(default=lambda message: None)
    """Sends a JSON-able message to whoever started the rank, while it works."""

    @property
    def leads_host(self) -> bool:
        """Whether this rank does what one process per host does."""
        return self.local_rank == 0

    def barrier(self) -> None:
        """Wait for every rank."""
        dist.barrier()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replace a CPU tensor by rank 0's."""
        dist.broadcast(tensor, 0)

    def gather(self, text: str) -> list[str]:
        """Return every rank's text, in rank order, on every rank; no pickle crosses."""
        content = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([content.numel()]))
        longest = int(max(sizes))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: content.numel()] = content
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        pairs = zip(parts, sizes, strict=True)
        return [bytes(part[: int(size)].tolist()).decode().strip("\0") for part, size in pairs]


def backend_of(device_type: str) -> str:
    """Return the communication backend for a device type."""
    return "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"


@contextmanager
def joined(
    rank: int,
    size: int,
    rendezvous: str,
    device_type: str,
    timeout_s: float,
    board: Board | None,
    report: Callable[[dict[str, object]], None],
) -> Iterator[RankContext]:
    """Join ``size`` ranks of this host through a file that all of them name; leave when done."""
    device = device_of(device_type, rank)
    dist.init_process_group(
        backend_of(device_type),
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=size,
        timeout=patience(timeout_s),
    )
    try:
        yield RankContext(rank, size, rank, size, device, timeout_s, board, report)
    finally:
        dist.destroy_process_group()


@contextmanager
def joined_from_environment(
    launch: LaunchedRank, device_type: str, timeout_s: float, size: int, files: Mapping[str, str] | None = None
) -> Iterator[RankContext]:
    """Join the ranks that a launcher has started, once all are there and were given the same files.

    Raises:
        UsageError: another number of ranks than ``size`` was started.
        AutoparError: as :func:`autopar.ranks.meeting.meet`.
    """
    if launch.size != size:
        trouble = "more than" if launch.size > size else "fewer than"
        raise UsageError(f"the number of ranks started is {launch.size}, {trouble} the {size} that the plan needs")
    device = device_of(device_type, launch.local_rank)
    interface = "lo" if launch.one_host else interface_towards(launch.address, launch.port)
    if interface is not None and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    patient = patience(timeout_s)
    store = meet(launch, files or {}, patient.total_seconds())
    try:
        dist.init_process_group(
            backend_of(device_type), store=store, rank=launch.rank, world_size=launch.size, timeout=patient
        )
    except (RuntimeError, ValueError) as error:
        address = f"{launch.address}:{launch.port}"
        raise TrainingError(f"rank {launch.rank} could not join the others at {address}: {error}") from error
    try:
        yield RankContext(launch.rank, launch.size, launch.local_rank, launch.local_size, device, timeout_s)
    finally:
        dist.destroy_process_group()


def patience(timeout_s: float) -> timedelta:
    """Return the default group's timeout: it serves setting up, training has groups of its own."""
    return timedelta(seconds=max(timeout_s, SET_UP_S))


def device_of(device_type: str, local_rank: int) -> torch.device:
    """Return a rank's device, and make it the current one.

    Raises:
        UsageError: the host has no such device.
    """
    if device_type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError("the plan is for CUDA devices, and this host has none")
    if local_rank >= torch.cuda.device_count():
        raise UsageError(f"rank {local_rank} of this host has no GPU: there are {torch.cuda.device_count()}")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
