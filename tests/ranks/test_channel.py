"""Channels: what is sent arrives, in order and unchanged, whatever waits on the way; a lost end is noticed.

Ranks of a host open the channels they ask for; those of several hosts do without.
"""

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import TrainingError
from autopar.ranks.channel import Channel, is_supported, new_channel_ends
from autopar.ranks.failure import PeerLostError
from autopar.ranks.pool import RankPool

pytestmark = pytest.mark.skipif(not is_supported(), reason="this system has no memory to share that way")


def ends(timeout_s: float = 20.0) -> tuple[Channel, Channel]:
    (one_sends, other_receives), (other_sends, one_receives) = new_channel_ends(), new_channel_ends()
    return Channel(one_sends, one_receives, timeout_s), Channel(other_sends, other_receives, timeout_s)


def test_any_tensor_arrives_in_the_order_in_which_it_was_sent() -> None:
    one, other = ends()
    sizes = (torch.arange(12.0).reshape(3, 4), torch.tensor(7), torch.zeros(0, 5), torch.randn(400_000))
    kinds = (torch.bool, torch.int16, torch.bfloat16, torch.complex64)
    tensors = (*sizes, *(torch.ones(3, 2, dtype=kind) for kind in kinds), torch.randn(3, requires_grad=True))
    for tensor in tensors:
        for sender, receiver in ((one, other), (other, one)):
            sender.send(tensor)
            received = torch.empty_like(tensor, requires_grad=False)
            receiver.receive(received).wait()
            assert torch.equal(received, tensor)
    one, other = ends()
    assert not other.has_arrived()
    sent, received = torch.ones(1), (torch.empty(1), torch.empty(1))
    pending = [other.receive(each) for each in received]
    for value in (1.0, 2.0, 3.0):
        one.send(sent.fill_(value))
    pending[1].wait()
    pending[0].wait()
    assert [float(each) for each in received] == [1.0, 2.0]
    assert other.has_arrived()
    other.receive(sent).wait()
    assert not other.has_arrived()
    # That nothing comes any more is known at once, too.
    one.close()
    assert other.has_arrived()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 3000), st.none()), max_size=120))
def test_messages_keep_their_order_and_contents_while_others_come_and_go(moves: list[int | None]) -> None:
    """What is no size of a message to send is one to receive."""
    one, other = ends()
    under_way: list[torch.Tensor] = []
    for number, size in enumerate([*moves, *[None] * len(moves)]):
        if size is not None:
            under_way.append(torch.full((size,), number))
            one.send(under_way[-1])
        elif under_way:
            expected = under_way.pop(0)
            received = torch.empty_like(expected)
            other.receive(received).wait()
            assert torch.equal(received, expected)


def test_memory_is_used_again_and_more_messages_than_a_pipe_holds_wait() -> None:
    one, other = ends()
    received = torch.empty(100_000)
    for _ in range(300):
        one.send(received)
        one.send(received)
        other.receive(received).wait()
        other.receive(received).wait()
    assert one._outlet._end <= 3 * received.nbytes
    one, other = ends()
    count = 20_000
    sender = threading.Thread(target=lambda: [one.send(torch.tensor([float(number)])) for number in range(count)])
    sender.start()
    received = torch.empty(1)
    for number in range(count):
        other.receive(received).wait()
        assert float(received) == number
    sender.join()


def test_what_a_lost_end_has_sent_arrives_and_what_it_has_not_is_missed() -> None:
    one, other = ends()
    one.send(torch.ones(2))
    del one
    received = torch.empty(2)
    other.receive(received).wait()
    assert received.sum() == 2
    with pytest.raises(PeerLostError, match="closed the connection"):
        other.receive(received).wait()
    with pytest.raises(PeerLostError, match="closed the connection"):
        other.send(received)


def test_silence_and_another_size_are_errors_and_an_end_outlives_its_channel() -> None:
    one, other = ends(timeout_s=0.05)
    with pytest.raises(PeerLostError, match=r"said nothing for 0\.05 s"):
        other.receive(torch.empty(2)).wait()
    one.send(torch.ones(3))
    with pytest.raises(PeerLostError, match="has sent 12 bytes where 8 were expected"):
        other.receive(torch.empty(2)).wait()
    one, other = ends()
    received = torch.empty(1)
    pending = other.receive(received)
    del other
    one.send(torch.ones(1))
    pending.wait()
    assert float(received) == 1


def test_nothing_is_left_open() -> None:
    gc.collect()
    open_ends = Path("/proc/self/fd")
    before = len(list(open_ends.iterdir()))
    for _ in range(3):
        one, other = ends()
        pending = other.receive(torch.empty(1))
        one.send(torch.ones(1))
        pending.wait()
    assert len(list(open_ends.iterdir())) > before
    for _ in range(2):
        one.close()
        other.close()
        assert len(list(open_ends.iterdir())) == before
    del one, other, pending
    assert len(list(open_ends.iterdir())) == before


@pytest.fixture
def pool() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


def test_pairs_of_one_host_have_a_channel_and_miss_who_is_killed_at_once(pool: RankPool) -> None:
    for hosts, pairs, expected in (
        (1, [(0, 1), (1, 0), (1, 2), (3, 0)], [[1, 3], [0, 2], [1], [0]]),
        (2, [(0, 1), (1, 2), (2, 3), (3, 0)], [[1], [0], [3], [2]]),
        (4, [(0, 1), (1, 2)], [[], [], [], []]),
        (1, [], [[], [], [], []]),
    ):
        found = pool.run("jobs_for_ranks:pass_around", {"hosts": hosts, "pairs": pairs})
        assert found == [{str(rank): float(rank) for rank in peers} for peers in expected]
    with pytest.raises(TrainingError, match=r"rank 1 .*was killed by SIGKILL"):
        pool.run("jobs_for_ranks:lose_while_receiving", ranks=2)


def test_ranks_that_do_not_reach_each_other_have_none(pool: RankPool) -> None:
    try:
        found = pool.run("jobs_for_ranks:pass_around", {"hosts": 1, "pairs": [(0, 1), (1, 2)], "apart": 1})
    except TrainingError as error:
        if "unshare" not in str(error):
            raise
        pytest.skip("this process may not make networks")
    assert found == [{}, {}, {}, {}]
