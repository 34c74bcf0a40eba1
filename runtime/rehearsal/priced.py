"""Priced transport: messages and sums that take their prices, by a clock that nothing else makes go on.

In come the prices of a rank's actions and a transport, which really carries what is sent; a clock takes what actions
cost. A message carries the moment of its arrival, for which its receiver's clock waits. Those who reduce tell each
other when they came, and so do the ranks of a team before they compute. Ranks decide nothing together but this, so that
no order of theirs is taken for granted.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from itertools import cycle

import torch

from autopar.formats.plan import Plan
from autopar.formats.program import (
    BACKWARDS,
    CORRECT,
    FORWARD,
    INPUT_BACKWARD,
    PREDICT,
    PULL,
    PUSH,
    RECEIVES,
    REDUCE,
    REDUCE_TIED,
    SENDS,
    UPDATE,
    Action,
    RankPrices,
    RankProgram,
    price_key,
)
from autopar.runtime.messages.mailbox import messages_by_action
from autopar.runtime.messages.transport import Later, Pending, Transport, sharing_groups
from autopar.runtime.rehearsal.stand_ins import MemoryLedger, tensors_on
from autopar.schedules.repetition import last_backwards

_COMPUTED = (FORWARD, *BACKWARDS, PREDICT, CORRECT, UPDATE)
"""What the ranks of a team begin together, all of which have a part in it."""


class PricedTransport:
    """Charges a rank's clock for its actions, and carries moments beside tensors.

    A message waits for the one before it to the same rank, and occupies no one's time but the receiver's who waits. A
    reduction of gradients ends when every replica's part does, which began beside its last backward, and not sooner
    after the one before than it takes. The price of what a team computes has all that its ranks add up and join there:
    those sums themselves are free.
    """

    def __init__(
        self,
        inner: Transport,
        ledger: MemoryLedger,
        prices: RankPrices,
        plan: Plan,
        rank: int,
        actions: RankProgram,
    ) -> None:
        """Prepare.

        Args:
            inner: carries tensors and moments.
            ledger: counts the bytes of messages, over the time of the rank's clock.
            prices: of its actions.
            plan: what is carried out.
            rank: which rank this is.
            actions: its program.
        """
        self._inner, self._ledger, self._clock, self._prices = inner, ledger, ledger.clock, prices
        self._plan, self._rank, self._own = plan, rank, plan.ownership.ranks[rank]
        groups = (sharing_groups(plan, tied) for tied in plan.tied)
        self._holders = [next((each for each in some if rank in each), ()) for some in groups]
        """By shared parameter, the ranks that add up its gradients with this one; none where this one has none."""
        self._sharing = [each.ranks for each in plan.shared_layers if rank in each.ranks]
        """By sum of a wave, who adds up."""
        self._tensors = tensors_on(plan, rank, plan.tensors)
        # What they take is charged by the actions that ask for them.
        self.all_reduce, self.all_gather = inner.all_reduce, inner.all_gather
        self.reduce_scatter, self.mesh, self.has_arrived = inner.reduce_scatter, inner.mesh, inner.has_arrived
        self._actions = list(actions)
        self._seconds = [prices.seconds.get(price_key(action), 0.0) for action in self._actions]
        self._sent_bytes: list[int] = []
        self._last_backwards = last_backwards(self._actions, plan)
        self._count_messages()
        self.refill()

    def _count_messages(self) -> None:
        """Find the bytes of every tensor that is sent, by position, and received, by peer in their order."""
        flows = messages_by_action(self._plan, self._rank)
        received: dict[int, list[int]] = defaultdict(list)
        self._sizes: list[list[int]] = []
        for action in self._actions:
            self._sizes.append([])
            if action.peer >= 0:
                flow, indices = flows[action.kind, action.stage, action.peer, action.peer_stage]
                rows = int(flow.samples.rows)
                self._sizes[-1] = [rows * self._tensors[index].bytes_per_sample for index in indices]
                if action.kind in RECEIVES:
                    received[action.peer] += self._sizes[-1]
        self._received_bytes = {peer: cycle(sizes) for peer, sizes in received.items()}

    def refill(self) -> None:
        """Begin with a pipeline that is empty."""
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
        self._pushes: deque[list[tuple[torch.Tensor, Pending]]] = deque()
        """By wave that is not pulled yet, and by sum, when each had pushed it."""
        self._waves_ends_s = [-math.inf] * len(self._sharing)
        """When the sums of the wave before ended."""
        self._early_pulls = self._plan.early_pulls
        """Pulls that are still to come and wait for no wave."""

    def charge(self, position: int) -> None:
        """Let what the action at a position takes pass, as it begins; all of a rank's are charged, in their order."""
        action, seconds, clock = self._actions[position], self._seconds[position], self._clock
        self._ledger.is_halved = action.kind == INPUT_BACKWARD
        if action.kind in SENDS:
            self._sent_bytes = list(self._sizes[position])
            self._arrival_s = max(clock.now_s, self._free_s.get(action.peer, -math.inf)) + seconds
            self._free_s[action.peer] = self._arrival_s
        elif action.kind == REDUCE:
            clock.wait_until(self._reduction_end_s(action, seconds))
        elif action.kind == REDUCE_TIED:
            if not self._plan.policy.reduces_at_backward:
                self._say_shared(action.micro_batch)
            clock.wait_until(self._shared_end_s(action.micro_batch, seconds))
        elif action.kind == PUSH:
            clock.spend(seconds)
            self._pushes.append([self._say(ranks, clock.now_s) for ranks in self._sharing])
        elif action.kind == PULL:
            self._pull()
            clock.spend(seconds)
        elif action.kind in _COMPUTED:
            clock.wait_until(self._latest_s(self._own.team, clock.now_s))
            clock.spend(seconds)
            if position in self._last_backwards:
                self._end_backward(action)

    def _end_backward(self, action: Action) -> None:
        """Note the end of a mini-batch's last backward, where sums may begin."""
        self._backward_ends_s[action.stage].append(self._clock.now_s)
        for index, tied in enumerate(self._plan.tied if self._plan.policy.reduces_at_backward else ()):
            if action.stage in tied.stages:
                self._say_shared(index)

    def _pull(self) -> None:
        """Wait for the sums of the next wave, each of which begins with the last push."""
        if self._early_pulls:
            self._early_pulls -= 1
            return
        for at, (moments, pending) in enumerate(self._pushes.popleft()):
            pending.wait()
            begun_s = max(float(moments.max()), self._waves_ends_s[at])
            self._waves_ends_s[at] = begun_s + self._prices.waves_s[at]
            self._clock.wait_until(self._waves_ends_s[at])

    def _say_shared(self, index: int) -> None:
        """Begin the sum of a shared parameter's gradients."""
        self._shared_moments[index].append(self._say(self._holders[index], self._clock.now_s))

    def _shared_end_s(self, index: int, seconds: float) -> float:
        """Return when the next sum of a shared parameter's gradients ends."""
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
        latest_s = self._latest_s(self._own.copies, own_s)
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
        self._ledger.count(tensor, self._sent_bytes.pop(0))
        moment = torch.tensor([self._arrival_s], dtype=torch.float64)
        return Later(self._inner.send(moment, peer).wait, self._inner.send(tensor, peer).wait)

    def receive(self, tensor: torch.Tensor, peer: int) -> Pending:
        """See :class:`autopar.runtime.messages.transport.Transport`."""
        self._ledger.count(tensor, next(self._received_bytes[peer]))
        moment = torch.zeros(1, dtype=torch.float64)
        begun = self._inner.receive(moment, peer), self._inner.receive(tensor, peer)
        return Later(*(each.wait for each in begun), lambda: self._clock.wait_until(float(moment)))
