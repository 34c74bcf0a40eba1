"""Devices: which device a rank has, and whether it has it for itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from autopar.errors import UsageError


def device_of(device_type: str, local_rank: int) -> torch.device:
    """Return a rank's device, and make it the current one.

    Ranks of a host take its GPUs in turn: a launcher may show each rank its own alone, or ranks may share.

    Raises:
        UsageError: the host has no such device.
    """
    if device_type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError(
            "the plan is for GPUs, and torch finds none on this host; run it where they are, or profile here with "
            "`device='cpu'`"
        )
    index = local_rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def identity_of(device: torch.device) -> str:
    """Return what tells a GPU from every other, on whichever host."""
    return str(torch.cuda.get_device_properties(device).uuid)


def each_its_own(identities: Sequence[str], *, share: bool) -> bool:
    """Return whether all ranks have different GPUs, given their identities in rank order.

    >>> each_its_own(["a", "b"], share=False), each_its_own(["a", "a"], share=True)
    (True, False)

    Raises:
        UsageError: ranks have the same GPU, and are not to share it; names them.
    """
    users: dict[str, list[int]] = defaultdict(list)
    for rank, identity in enumerate(identities):
        users[identity].append(rank)
    shared = [ranks for ranks in users.values() if len(ranks) > 1]
    if shared and not share:
        ranks = ", ".join(map(str, shared[0]))
        raise UsageError(
            f"ranks {ranks} have the same GPU; start no more ranks than there are GPUs, or let them share it: "
            "`share_gpus=True`"
        )
    return not shared
