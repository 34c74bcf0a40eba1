"""Connect: the transport of a rank, as the ranks' devices are connected."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch

from autopar.formats.plan import Plan
from autopar.ranks.channel import Channel
from autopar.ranks.context import RankContext
from autopar.ranks.handshake import open_channels, partners
from autopar.runtime.copies import CudaCopies
from autopar.runtime.groups import reducing_groups, reduction_groups, synced_groups
from autopar.runtime.settings import TrainSettings
from autopar.runtime.staged import StagedTransport
from autopar.runtime.transport import GroupTransport, Transport
from autopar.schedules.expand import messages

__all__ = ["connect", "directions", "warm_up"]


def connect(context: RankContext, plan: Plan, settings: TrainSettings) -> Transport:
    """Return a rank's transport for a run of the plan; all ranks ask at once."""
    apart = synced_groups(plan) if settings.sync_batch_norm else []
    pairs = directions(plan)
    # What GPUs tell each other over NCCL never is in a host's memory.
    channels = {} if context.nccl else open_channels(context, pairs)
    grouped = context.nccl or _any_without(context, pairs, channels)
    transport = GroupTransport(context, reduction_groups(plan), apart, channels, grouped=grouped)
    if context.device.type == "cpu":
        return transport
    if not context.nccl:
        return StagedTransport(transport, CudaCopies(context.device))
    with warnings.catch_warnings():
        # One communicator for each pair is what is wanted.
        warnings.filterwarnings("ignore", message=".*unbatched P2P op")
        warm_up(transport, plan, context.rank, context.device, apart)
    torch.cuda.synchronize(context.device)
    return transport


def _any_without(context: RankContext, pairs: Sequence[tuple[int, int]], channels: Mapping[int, Channel]) -> bool:
    """Return whether any rank's messages need more than its channels; all ranks ask at once."""
    lacking = not partners(context.rank, pairs) <= channels.keys()
    return bool(pairs) and "true" in context.gather(json.dumps(lacking))


def directions(plan: Plan) -> list[tuple[int, int]]:
    """Return the ordered pairs of ranks that messages go between, in an order that all ranks share."""
    found = set()
    for flow in messages(plan):
        # Of replicas that take turns, some may have none.
        if not flow.local and flow.first < plan.micro_batches:
            found.add((flow.sender, flow.receiver))
            if flow.gradients:
                found.add((flow.receiver, flow.sender))
    return sorted(found)


def warm_up(
    transport: Transport, plan: Plan, rank: int, device: torch.device, apart: Iterable[tuple[int, ...]] = ()
) -> None:
    """Use every communicator of a run once, in an order that all ranks share.

    NCCL makes a communicator where it is first used, and both ends wait for each other there: in the middle of a
    program, ranks that begin with different peers would wait in a ring.
    """
    for sender, receiver in directions(plan):
        if rank == sender:
            transport.send(torch.zeros(1, device=device), receiver).wait()
        elif rank == receiver:
            transport.receive(torch.zeros(1, device=device), sender).wait()
    for ranks, own in [*((each, False) for each in reducing_groups(plan)), *((each, True) for each in apart)]:
        if rank in ranks:
            transport.all_reduce(torch.zeros(1, device=device), ranks, apart=own).wait()
