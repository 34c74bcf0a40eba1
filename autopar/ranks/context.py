"""RankContext: what a rank knows about itself and its peers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from autopar.errors import TrainingError, UsageError
from autopar.ranks.board import SET_UP_S, Board
from autopar.ranks.devices import device_of, each_its_own, identity_of
from autopar.ranks.environment import LaunchedRank
from autopar.ranks.interface import interface_towards
from autopar.ranks.meeting import meet


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
    nccl: bool = False
    """Whether NCCL connects the ranks' devices; if not, what they tell each other passes through the hosts' memory."""
    board: Board | None = None
    """Where the rank says what it is doing, for whoever watches over it."""
    report: Callable[[dict[str, object]], None] = field(default=lambda message: None)
    """Sends a JSON-able message to whoever started the rank, while it works."""
    outlived: bool = False
    """Whether the process group was there before the rank joined, and stays when it leaves."""
    on_leaving: list[Callable[[], None]] = field(default_factory=list)
    """Called when the rank leaves its peers: what was opened to reach them is closed."""

    @property
    def leads_host(self) -> bool:
        """Whether this rank does what one process per host does."""
        return self.local_rank == 0

    @property
    def backend(self) -> str:
        """What carries tensors between the ranks."""
        return "nccl" if self.nccl else "gloo"

    def met(self, *, share_gpus: bool) -> RankContext:
        """Return the context, knowing what connects the ranks' devices; all ranks ask at once.

        Raises:
            UsageError: ranks have the same GPU, and are not to share it.
        """
        if self.device.type == "cpu":
            return self
        # NCCL does not connect a GPU with itself.
        own = each_its_own(self.gather(identity_of(self.device)), share=share_gpus)
        return replace(self, nccl=own and "cuda:nccl" in dist.get_backend_config())

    def leave(self) -> None:
        """Close what was opened to reach the other ranks."""
        for close in self.on_leaving:
            close()

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
    """Return the communication backend for a device type, in torch's words."""
    return "cpu:gloo,cuda:nccl" if device_type == "cuda" and dist.is_nccl_available() else "gloo"


@contextmanager
def joined(
    rank: int,
    size: int,
    rendezvous: str,
    device_type: str,
    timeout_s: float,
    board: Board | None,
    report: Callable[[dict[str, object]], None],
    share_gpus: bool = False,
) -> Iterator[RankContext]:
    """Join ``size`` ranks of this host through a file that all of them name; leave when done.

    Raises:
        UsageError: as :meth:`RankContext.met`.
    """
    device = device_of(device_type, rank)
    dist.init_process_group(
        backend_of(device_type),
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=size,
        timeout=patience(timeout_s),
    )
    context = RankContext(rank, size, rank, size, device, timeout_s, board=board, report=report)
    try:
        yield context.met(share_gpus=share_gpus)
    finally:
        _leave(context)


@contextmanager
def joined_from_environment(
    launch: LaunchedRank,
    device_type: str,
    timeout_s: float,
    size: int,
    files: Mapping[str, str] | None = None,
    share_gpus: bool = False,
) -> Iterator[RankContext]:
    """Join the ranks that a launcher has started, once all are there and were given the same files.

    Raises:
        UsageError: another number of ranks than ``size`` was started; or as :meth:`RankContext.met`.
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
    context = RankContext(launch.rank, launch.size, launch.local_rank, launch.local_size, device, timeout_s)
    try:
        yield context.met(share_gpus=share_gpus)
    finally:
        _leave(context)


def _leave(context: RankContext) -> None:
    context.leave()
    dist.destroy_process_group()


def patience(timeout_s: float) -> timedelta:
    """Return the default group's timeout: it serves setting up, training has groups of its own."""
    return timedelta(seconds=max(timeout_s, SET_UP_S))
