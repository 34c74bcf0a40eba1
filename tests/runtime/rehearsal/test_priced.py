"""Messages of a pair take their time one after the other, and reductions end with their last part."""

import torch

from autopar.formats.program import Action, RankPrices, RankProgram
from autopar.runtime.clocks import VirtualClock
from autopar.runtime.messages.transport import Exchange, InProcessTransport, Transport
from autopar.runtime.rehearsal.priced import PricedTransport
from autopar.runtime.rehearsal.stand_ins import MemoryLedger
from drawn_plans import chain, make
from threads import in_ranks


def test_reductions_end_with_their_last_part() -> None:
    ranks = _ranks(
        [(1, 1)],
        (["B0@0", "A@0", "A@0", "U@0"], RankPrices({"B@0": 3.0, "A@0": 4.0, "U@0": 1.0}, {"A@0": 0.5})),
        (["B0@0", "A@0", "A@0", "U@0"], RankPrices({"B@0": 5.0, "A@0": 4.0, "U@0": 1.0}, {"A@0": 0.25})),
    )

    def act(rank: int, _: Transport) -> None:
        transport, clock = ranks[rank]
        clock.refill()
        for position in range(4):
            transport.charge(position)

    in_ranks(2, act)
    # The slower one's backward ends at 6, its part at 6.25; the next one ends 4 later, and both update.
    assert [clock.now_s for _, clock in ranks] == [11.25, 11.25]


def _ranks(
    shares: list[tuple[int, ...]], *ranks: tuple[list[str], RankPrices]
) -> list[tuple[PricedTransport, VirtualClock]]:
    plan = make("1f1b", 2, shares, [1] * len(shares), chain(len(shares)))
    exchange, found = Exchange(5.0), []
    for rank, (actions, prices) in enumerate(ranks):
        clock = VirtualClock(1.0)
        program = RankProgram.of(map(Action.parse, actions))
        inner = InProcessTransport(exchange, rank)
        found.append((PricedTransport(inner, MemoryLedger(clock, 0), prices, plan, rank, program), clock))
    return found


def test_messages_of_a_pair_follow_each_other_and_are_waited_for() -> None:
    ((transport, clock),) = _ranks([(1,)], (["F0@0", "A@0", "U@0"], RankPrices()))
    clock.refill()
    for position in range(3):
        transport.charge(position)
    assert clock.now_s == 1.0, "what is not priced takes no time"
    prices = RankPrices({"F@0": 2.0, "S@0>1@1": 5.0})
    (sender, here), (receiver, there) = _ranks(
        [(1,), (1,)],
        (["F0@0", "S0@0>1@1", "F1@0", "S1@0>1@1"], prices),
        (["R0@1<0@0", "F0@1", "R1@1<0@0", "F1@1"], RankPrices({"F@1": 1.0})),
    )
    for _ in range(2):
        # Every step begins anew, whatever was under way.
        for transport, clock in ((sender, here), (receiver, there)):
            transport.refill()
            clock.refill()
        for position in range(4):
            sender.charge(position)
            if position % 2:
                sender.send(torch.zeros(1), 1)
        # Two forwards behind an overhead of 1; sending took no time.
        assert here.now_s == 5.0
        moments = []
        for position in range(4):
            receiver.charge(position)
            if position % 2 == 0:
                receiver.receive(torch.zeros(1), 0).wait()
                moments.append(there.now_s)
        # The first is sent at 3 and there at 8; the second waits for it.
        assert moments == [8.0, 13.0]
        assert there.now_s == 14.0
