"""PricedTransport: a rank's messages and reductions with the moments at which they are there.

In come the prices of the rank's actions and another transport, which really carries what is sent; a clock takes what
actions cost. A message carries the moment of its arrival, for which its receiver's clock waits. Those who reduce tell
each other when they came. Ranks decide nothing together but this, so that no order of theirs is taken for granted.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from itertools import cycle
from typing import TYPE_CHECKING

import torch

from autopar.formats.plan import Plan
from autopar.formats.prices import RankPrices, price_key
from autopar.formats.program import (
    BACKWARD,
    INPUT_BACKWARD,
    RECEIVES,
    REDUCE,
    REDUCE_TIED,
    SENDS,
    WEIGHT_BACKWARD,
    Action,
    RankProgram,
)
from autopar.runtime.device import PricedClock
from autopar.runtime.messages.mailbox import messages_by_action
from autopar.runtime.messages.transport import Pending, Transport, replica_ranks
from autopar.runtime.rehearsal.stand_ins import MemoryLedger

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class PricedTransport:
    """Charges a rank's clock for its actions, and carries moments beside tensors.

    A message waits for the one before it to the same rank, and occupies no one's time but the receiver's who waits. A
    reduction of gradients ends when every replica's part does, which began beside its last backward, and not sooner
    after the one before than it takes.
    """

    def __init__(
        self,
        inner: Transport,
        clock: PricedClock,
        prices: RankPrices,
        plan: Plan,
        rank: int,
        actions: RankProgram,
        ledger: MemoryLedger | None = None,
    ) -> None:
        """Prepare.

        Args:
            inner: carries tensors and moments.
            clock: the rank's.
            prices: of its actions.
            plan: what is carried out.
            rank: which rank this is.
            actions: its program.
            ledger: counts the bytes of messages, if anybody does.
        """
        self._inner, self._clock, self._prices, self._plan, self._rank = inner, clock, prices, plan, rank
        self._actions = list(actions)
        self._seconds = [prices.seconds.get(price_key(action), 0.0) for action in self._actions]
        self._ledger = ledger
        self._sent_bytes: list[int] = []
        self._received_bytes: dict[int, cycle[int]] = {}
        if ledger is not None:
            self._count_messages()
        self._begin_step()

    def _count_messages(self) -> None:
        """Find the bytes of every tensor that is sent, by position, and received, by peer in their order."""
        flows = messages_by_action(self._plan, self._rank)
        received: dict[int, list[int]] = defaultdict(list)
        self._sizes: list[list[int]] = []
        for action in self._actions:
            self._sizes.append([])
            if action.peer >= 0:
                flow, indices = flows[action.kind, action.stage, action.peer, action.peer_stage]
                rows = flow.stop - flow.start
                self._sizes[-1] = [rows * self._plan.tensors[index].bytes_per_sample for index in indices]
                if action.kind in RECEIVES:
                    received[action.peer] += self._sizes[-1]
        self._received_bytes = {peer: cycle(sizes) for peer, sizes in received.items()}

    def _begin_step(self) -> None:
        self._free_s: dict[int, float] = {}
        """When the last message to a peer is through."""
        self._arrival_s = -math.inf
        """Of the message that is being sent."""
        self._backward_ends_s: dict[int, deque[float]] = defaultdict(deque)
        """By stage, of the last backwards of mini-batches whose gradients are not reduced yet."""
        self._shared_ends_s: dict[int, float] = {}
        """By shared parameter, when the sum before ended."""
        self._shared_moments: dict[int, deque[tuple[torch.Tensor, Pending]]] = defaultdict(deque)
        """By shared parameter, when each holder had its gradient of mini-batches whose sums are under way."""
        self._reduced_s = -math.inf
        """When the reduction before ended."""

    def charge(self, position: int) -> None:
        """Let what the action at a position takes pass, as it begins; all of a rank's are charged, in their order."""
        if position == 0 and self._plan.weight_policy == "sync":
            self._begin_step()
        action, seconds, clock = self._actions[position], self._seconds[position], self._clock
        if self._ledger is not None:
            self._ledger.is_halved = action.kind == INPUT_BACKWARD
        if action.kind in SENDS:
            self._sent_bytes = [] if self._ledger is None else list(self._sizes[position])
            self._arrival_s = max(clock.now_s, self._free_s.get(action.peer, -math.inf)) + seconds
            self._free_s[action.peer] = self._arrival_s
        elif action.kind == REDUCE:
            clock.wait_until(self._reduction_end_s(action, seconds))
        elif action.kind == REDUCE_TIED:
            clock.wait_until(self._shared_end_s(action.micro_batch, seconds))
        elif action.kind not in RECEIVES:
            clock.spend(seconds)
            if action.kind in (BACKWARD, WEIGHT_BACKWARD):
                self._end_backward(action)

    def _end_backward(self, action: Action) -> None:
        """Note the end of a backward that may be its mini-batch's last, where sums begin of what is never flushed."""
        ends_s, moment_s = self._backward_ends_s[action.stage], self._clock.now_s
        if self._plan.weight_policy == "sync":
            ends_s.clear()
            ends_s.append(moment_s)
        elif action.micro_batch % self._plan.micro_batches == self._plan.micro_batches - 1:
            ends_s.append(moment_s)
            for index, tied in enumerate(self._plan.tied):
                if action.stage in tied.stages:
                    self._shared_moments[index].append(self._say(replica_ranks(self._plan, tied.stages), moment_s))

    def _shared_end_s(self, index: int, seconds: float) -> float:
        """Return when the next sum of a shared parameter's gradients ends."""
        if self._plan.weight_policy == "sync":
            return self._latest_s(replica_ranks(self._plan, self._plan.tied[index].stages), self._clock.now_s) + seconds
        moments, pending = self._shared_moments[index].popleft()
        pending.wait()
        begun_s = max(float(moments.max()), self._shared_ends_s.get(index, -math.inf))
        self._shared_ends_s[index] = begun_s + seconds
        return begun_s + seconds

    def _reduction_end_s(self, action: Action, seconds: float) -> float:
        """Return when a stage's gradients are reduced; its replicas ask for that together."""
        ends_s = self._backward_ends_s[action.stage]
        own_s = ends_s.popleft() if ends_s else self._clock.now_s
        own_s += self._prices.exposed_s.get(price_key(action), 0.0)
        latest_s = self._latest_s(replica_ranks(self._plan, [action.stage]), own_s)
        self._reduced_s = max(latest_s, self._reduced_s + seconds)
        return self._reduced_s

    def _latest_s(self, ranks: tuple[int, ...], moment_s: float) -> float:
        """Return the latest moment of some ranks, which say one each."""
        if len(ranks) == 1:
            return moment_s
        moments, pending = self._say(ranks, moment_s)
        pending.wait()
        return float(moments.max())

    def _say(self, ranks: tuple[int, ...], moment_s: float) -> tuple[torch.Tensor, Pending]:
        """Begin to tell some ranks a moment, and to be told theirs."""
        moments = torch.zeros(len(ranks), dtype=torch.float64)
        moments[ranks.index(self._rank)] = moment_s
        # Backwards begin to reduce gradients in an order that may be another than that of their ends.
        return moments, self._inner.all_reduce(moments, ranks, apart=True)

    def send(self, tensor: torch.Tensor, peer: int) -> Pending:
        """See :class:`autopar.runtime.messages.transport.Transport`."""
        if self._ledger is not None:
            self._ledger.count(tensor, self._sent_bytes.pop(0))
        moment = torch.tensor([self._arrival_s], dtype=torch.float64)
        return _Both(self._inner.send(moment, peer), self._inner.send(tensor, peer))

    def receive(self, tensor: torch.Tensor, peer: int) -> Pending:
        """See :class:`autopar.runtime.messages.transport.Transport`."""
        if self._ledger is not None:
            self._ledger.count(tensor, next(self._received_bytes[peer]))
        moment = torch.zeros(1, dtype=torch.float64)
        return _Arriving(self._inner.receive(moment, peer), self._inner.receive(tensor, peer), moment, self._clock)

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...], *, apart: bool = False) -> Pending:
        """See :class:`autopar.runtime.messages.transport.Transport`."""
        return self._inner.all_reduce(tensor, ranks, apart=apart)

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor, ranks: tuple[int, ...]) -> Pending:
        """See :class:`autopar.runtime.messages.transport.Transport`."""
        return self._inner.all_gather(whole, own, ranks)

    def reduce_scatter(self, own: torch.Tensor, whole: torch.Tensor, ranks: tuple[int, ...]) -> Pending:
        """See :class:`autopar.runtime.messages.transport.Transport`."""
        return self._inner.reduce_scatter(own, whole, ranks)

    def mesh(self, ranks: tuple[int, ...]) -> DeviceMesh:
        """See :class:`autopar.runtime.messages.transport.Transport`."""
        return self._inner.mesh(ranks)


class _Both:
    """Two pieces of work."""

    def __init__(self, first: Pending, second: Pending) -> None:
        self._first, self._second = first, second

    def wait(self) -> None:
        """See :class:`autopar.runtime.messages.transport.Pending`."""
        self._first.wait()
        self._second.wait()


class _Arriving(_Both):
    """A message with the moment at which it is there."""

    def __init__(self, first: Pending, second: Pending, moment: torch.Tensor, clock: PricedClock) -> None:
        super().__init__(first, second)
        self._moment, self._clock = moment, clock

    def wait(self) -> None:
        """Wait for the message, and let time pass until it is there."""
        super().wait()
        self._clock.wait_until(float(self._moment))
