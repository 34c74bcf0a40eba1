"""StagedTransport: tensors of GPUs that nothing connects move through their hosts' memory.

Ranks that share a GPU have no NCCL between them. What one sends is copied to page-locked memory beside what the GPU
computes, sent from there, and copied on by who receives it. ``connect`` chooses the transport that ranks' devices need.
"""

from __future__ import annotations

import json
import secrets
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from autopar.errors import UsageError
from autopar.formats.plan import Plan
from autopar.options.train import TrainSettings
from autopar.ranks.channel import open_channels, partners
from autopar.ranks.context import RankContext
from autopar.runtime.device import Copies
from autopar.runtime.messages.transport import (
    Arrivals,
    GroupTransport,
    Later,
    Pending,
    Transport,
    reducing_groups,
    synced_groups,
    team_groups,
)
from autopar.schedules.expand import messages

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class StagedTransport:
    """Puts copies between a device and a transport of host memory.

    A thread begins each send and reduction when its copy is there, in the order in which they were asked for, so that
    computing waits for none. Receives are begun at once.
    """

    def __init__(self, inner: Transport, copies: Copies) -> None:
        self._inner, self._copies = inner, copies
        self._thread = ThreadPoolExecutor(1, "staged", copies.prepare_thread)

    def send(self, tensor: torch.Tensor, peer: int) -> Pending:
        """See :class:`autopar.runtime.messages.transport.Transport`."""
        return self._submit(tensor, lambda host: self._inner.send(host, peer))[1]

    def receive(self, tensor: torch.Tensor, peer: int) -> Pending:
        """See :class:`autopar.runtime.messages.transport.Transport`."""
        if not self._copies.holds(tensor):
            return self._inner.receive(tensor, peer)
        host = self._copies.buffer(tensor)
        return self._landing(self._inner.receive(host, peer), host, tensor)

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...], *, apart: bool = False) -> Pending:
        """See :class:`autopar.runtime.messages.transport.Transport`."""
        host, begun = self._submit(tensor, lambda host: self._inner.all_reduce(host, ranks, apart=apart))
        return self._landing(begun, host, tensor)

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor, ranks: tuple[int, ...]) -> Pending:
        """See :class:`autopar.runtime.messages.transport.Transport`."""
        return self._fill(whole, own, lambda into, host: self._inner.all_gather(into, host, ranks))

    def reduce_scatter(self, own: torch.Tensor, whole: torch.Tensor, ranks: tuple[int, ...]) -> Pending:
        """See :class:`autopar.runtime.messages.transport.Transport`."""
        return self._fill(own, whole, lambda into, host: self._inner.reduce_scatter(into, host, ranks))

    def _fill(
        self, tensor: torch.Tensor, source: torch.Tensor, begin: Callable[[torch.Tensor, torch.Tensor], Pending]
    ) -> Pending:
        """Begin to fill a tensor with what is made of another."""
        host = self._copies.buffer(tensor) if self._copies.holds(tensor) else tensor
        return self._landing(self._submit(source, lambda copy: begin(host, copy))[1], host, tensor)

    def has_arrived(self, peer: int) -> bool:
        """See :class:`autopar.runtime.messages.transport.Transport`."""
        return self._inner.has_arrived(peer)

    def _landing(self, arriving: Pending, host: torch.Tensor, tensor: torch.Tensor) -> Pending:
        """Return what, waited for, is in the host's memory, and is copied to the device's, for which its work waits."""
        if host is tensor:
            return arriving
        since = self._copies.moment()
        return Later(arriving.wait, lambda: self._copies.to_device(host, tensor, since))

    def mesh(self, ranks: tuple[int, ...]) -> DeviceMesh:
        """Refuse: what shards goes from device to device."""
        raise UsageError(
            f"ranks {', '.join(map(str, ranks))} shard, and NCCL does not connect their GPUs; plan with `shard='none'`"
        )

    def _submit(self, tensor: torch.Tensor, begin: Callable[[torch.Tensor], Pending]) -> tuple[torch.Tensor, Pending]:
        """Return a tensor's copy in the host's memory, and what begins with it once it is there."""
        copy = self._copies.to_host(tensor) if self._copies.holds(tensor) else None
        host = tensor if copy is None else copy.tensor

        def act() -> Pending:
            if copy is not None:
                copy.wait()
            return begin(host)

        future = self._thread.submit(act)
        return host, Later(lambda: future.result().wait())


def connect(
    context: RankContext, plan: Plan, settings: TrainSettings, apart: Sequence[tuple[int, ...]] = ()
) -> Transport:
    """Return a rank's transport for a run of the plan; all ranks ask at once.

    ``apart`` are ranks that reduce in an order of their own, too, beside those whose settings want it.
    """
    apart = list(dict.fromkeys([*apart, *(synced_groups(plan) if settings.sync_batch_norm else ())]))
    # Without flushes, sums over all ranks are under way beside those of gradients; hosts add them up.
    hosts = [tuple(range(len(plan.devices)))] if plan.policy.sums_apart else []
    waves = wave_directions(plan)
    # What GPUs tell each other over NCCL never is in a host's memory, but for waves.
    pairs = [*([] if context.nccl else directions(plan)), *waves]
    channels = open_channels(context, pairs)
    lacking = not partners(context.rank, pairs) <= channels.keys()
    some_lack = bool(pairs) and "true" in context.gather(json.dumps(lacking))
    groups = list(dict.fromkeys([*reducing_groups(plan), *team_groups(plan), tuple(range(len(plan.devices)))]))
    arrivals = _arrivals(context, partners(context.rank, waves) - channels.keys()) if waves and some_lack else None
    grouped = context.nccl or some_lack
    transport = GroupTransport(
        context, groups, [*apart, *hosts], channels, with_message_group=grouped, arrivals=arrivals
    )
    if context.device.type == "cpu":
        return transport
    if not context.nccl:
        return StagedTransport(transport, Copies(context.device))
    with warnings.catch_warnings():
        # One communicator for each pair is what is wanted.
        warnings.filterwarnings("ignore", message=".*unbatched P2P op")
        warm_up(transport, plan, context.rank, context.device, apart)
    torch.cuda.synchronize(context.device)
    return transport


def _arrivals(context: RankContext, peers: Collection[int]) -> Arrivals:
    """Return what counts the waves that go through groups, from host to host; all ranks ask at once."""
    name = context.gather(secrets.token_hex(8))[0]
    store = dist.distributed_c10d._get_default_store()
    own = dist.PrefixStore(f"autopar/waves-{name}", store)  # type: ignore[attr-defined]
    return Arrivals(own, context.rank, peers)


def wave_directions(plan: Plan) -> list[tuple[int, int]]:
    """Return the ordered pairs of ranks that send each other waves whole, in an order that all ranks share."""
    return sorted({pair for each in plan.shared_layers for pair in permutations(each.ranks, 2)} if plan.eager else ())


def directions(plan: Plan) -> list[tuple[int, int]]:
    """Return the ordered pairs of ranks that messages go between, in an order that all ranks share."""
    found = set()
    for flow in messages(plan):
        # Of replicas that take turns, some may have none.
        if not flow.local and flow.samples.first < plan.micro_batches:
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
    groups = dict.fromkeys([*reducing_groups(plan), *team_groups(plan)])
    for ranks, own in [*((each, False) for each in groups), *((each, True) for each in apart)]:
        if rank in ranks:
            transport.all_reduce(torch.zeros(1, device=device), ranks, apart=own).wait()
