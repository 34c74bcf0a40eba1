"""Ranks of a user's own script: joined as torchrun started them, as the script did, or a single one."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from autopar.errors import UsageError
from autopar.ranks.context import RankContext, backend_of, device_of, join_from_environment, patience
from autopar.ranks.environment import rank_from_environment


@contextmanager
def join_in_script(device_type: str, timeout_s: float, size: int, share_gpus: bool = False) -> Iterator[RankContext]:
    """Join ``size`` ranks: those of the script's own process group, else those that a launcher started, else one.

    Raises:
        UsageError: there is another number of ranks, or the script's group cannot carry what training does.
    """
    try:
        with _join(device_type, timeout_s, size, share_gpus) as context:
            yield context
    finally:
        # What lies in cycles may hold groups, whose threads must not outlive Python.
        gc.collect()


@contextmanager
def _join(device_type: str, timeout_s: float, size: int, share_gpus: bool) -> Iterator[RankContext]:
    if dist.is_initialized():
        context = _of_script(device_type, timeout_s, size, share_gpus)
        try:
            yield context
        finally:
            # Its group is the script's, and stays.
            context.leave()
    elif "WORLD_SIZE" in os.environ:
        launch = rank_from_environment(os.environ)
        with join_from_environment(launch, device_type, timeout_s, size, share_gpus=share_gpus) as context:
            yield context
    elif size > 1:
        raise UsageError(
            f"the plan needs {size} ranks, and this process is alone; start the script with "
            f"torchrun --nproc-per-node {size}"
        )
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend_of(device_type), store=store, rank=0, world_size=1, timeout=patience(timeout_s))
        try:
            yield RankContext(0, 1, 0, 1, device_of(device_type, 0), timeout_s).detect_nccl(share_gpus=False)
        finally:
            dist.destroy_process_group()


def _of_script(device_type: str, timeout_s: float, size: int, share_gpus: bool) -> RankContext:
    rank, started = dist.get_rank(), dist.get_world_size()
    if started != size:
        raise UsageError(f"the script's process group has {started} ranks, the plan needs {size}")
    carried = dist.get_backend_config()
    if not all(f"{kind}:" in carried for kind in ("cpu", device_type)):
        wanted = backend_of(device_type)
        raise UsageError(f"the script's process group has the backend {carried}; initialise it with {wanted!r}")
    if device_type == "cuda" and getattr(dist.group.WORLD, "bound_device_id", None) is not None:
        # NCCL would then run all messages of a rank in one order, and wait for ever where two ranks differ in it.
        raise UsageError("the script's process group is bound to a device; initialise it without device_id")
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", started))
    device = device_of(device_type, local_rank)
    context = RankContext(rank, size, local_rank, local_size, device, timeout_s, has_external_group=True)
    return context.detect_nccl(share_gpus=share_gpus)
