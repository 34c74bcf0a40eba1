"""Silence: peers that say nothing and take everything, as a rank that is rehearsed alone has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from autopar.errors import UsageError
from autopar.formats.plan import Plan
from autopar.runtime.groups import replica_ranks
from autopar.runtime.transport import Pending
from autopar.schedules.expand import stages_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Silence", "silent_peers"]


class Silence:
    """A transport to them."""

    def __init__(self, meshes: Mapping[tuple[int, ...], DeviceMesh]) -> None:
        """Take the meshes of ranks that shard, which are made of values."""
        self._meshes = meshes

    def send(self, tensor: torch.Tensor, peer: int) -> Pending:
        return _Holding(tensor)

    def receive(self, tensor: torch.Tensor, peer: int) -> Pending:
        return _Holding(tensor)

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...], *, apart: bool = False) -> Pending:
        return _Holding(tensor)

    def mesh(self, ranks: tuple[int, ...]) -> DeviceMesh:
        return self._meshes[ranks]


class _Holding:
    """Like a piece of work under way, it keeps its tensor alive until it is let go."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> None:
        return


@contextmanager
def silent_peers(plan: Plan, rank: int) -> Iterator[Silence]:
    """Give one rank peers that are not there; what its replicas shard meets in a process group of torch's fake kind.

    Raises:
        UsageError: this process has a process group already.
    """
    stages, _ = stages_of(plan, rank)
    if all(plan.stages[stage].shard == "none" for stage in stages):
        yield Silence({})
        return
    if dist.is_initialized():
        raise UsageError("what is sharded cannot be rehearsed in a process that has a process group")
    from torch.distributed.device_mesh import DeviceMesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=len(plan.devices))
    try:
        ranks = replica_ranks(plan, stages)
        yield Silence({ranks: DeviceMesh.from_group(dist.new_group(list(ranks)), "cpu")})
    finally:
        dist.destroy_process_group()
