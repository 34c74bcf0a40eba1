"""RankContext: what a rank knows about itself and its peers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from autopar.errors import TrainingError, UsageError
from autopar.ranks.board import SET_UP_S, Board

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
def joined_from_environment(device_type: str, timeout_s: float, size: int) -> Iterator[RankContext]:
    """Join the ranks that torchrun, or another launcher that sets its environment, has started.

    Raises:
        UsageError: the environment is incomplete, or holds another number of ranks than ``size``.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise UsageError(f"{', '.join(missing)} not set; start workers with torchrun, or use `autopar run`")
    rank, started = _number("RANK"), _number("WORLD_SIZE")
    local_rank = _number("LOCAL_RANK") if "LOCAL_RANK" in os.environ else rank
    local_size = _number("LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in os.environ else started
    if started != size:
        trouble = "more than" if started > size else "fewer than"
        raise UsageError(f"the number of ranks started is {started}, {trouble} the {size} that the plan needs")
    if rank >= size:
        raise UsageError(f"RANK is {rank}, and WORLD_SIZE {size}: ranks count from 0")
    device = device_of(device_type, local_rank)
    try:
        dist.init_process_group(backend_of(device_type), timeout=patience(timeout_s))
    except (RuntimeError, ValueError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise TrainingError(f"rank {rank} could not join the others at {address}: {error}") from error
    try:
        yield RankContext(rank, size, local_rank, local_size, device, timeout_s)
    finally:
        dist.destroy_process_group()


def _number(name: str) -> int:
    text = os.environ[name]
    if not text.isdecimal():
        raise UsageError(f"{name} must be a number, found {text!r}; start workers with torchrun, or use `autopar run`")
    return int(text)


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
