"""Channels: what is sent arrives, in order and unchanged, whatever waits on the way; a lost end is noticed."""

import gc
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ranks.channel import Channel, is_supported, new_channel_ends
from autopar.ranks.failure import PeerLostError

pytestmark = pytest.mark.skipif(not is_supported(), reason="this system has no memory to share that way")


def ends(timeout_s: float = 20.0) -> tuple[Channel, Channel]:
    (one_sends, other_receives), (other_sends, one_receives) = new_channel_ends(), new_channel_ends()
    return Channel(one_sends, one_receives, timeout_s), Channel(other_sends, other_receives, timeout_s)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4),
        torch.tensor([True, False, True]),
        torch.tensor(7),
        torch.zeros(0, 5),
        torch.arange(6, dtype=torch.int16),
        torch.randn(5, dtype=torch.bfloat16),
        torch.randn(3, 2, dtype=torch.complex64),
        torch.randn(400_000),
        torch.randn(3, requires_grad=True),
    ],
    ids=lambda tensor: f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}",
)
def test_a_tensor_of_any_kind_arrives_unchanged_in_both_directions(tensor: torch.Tensor) -> None:
    one, other = ends()
    for sender, receiver in ((one, other), (other, one)):
        sender.send(tensor)
        received = torch.empty_like(tensor, requires_grad=False)
        receiver.receive(received).wait()
        assert torch.equal(received, tensor)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 3000).map(lambda size: ("send", size)), st.just(("receive", 0))), max_size=120)
)
def test_messages_keep_their_order_and_contents_while_others_come_and_go(moves: list[tuple[str, int]]) -> None:
    one, other = ends()
    under_way: list[torch.Tensor] = []
    for number, (what, size) in enumerate([*moves, *[("receive", 0)] * len(moves)]):
        if what == "send":
            under_way.append(torch.full((size,), number))
            one.send(under_way[-1])
            continue
        if under_way:
            expected = under_way.pop(0)
            received = torch.empty_like(expected)
            other.receive(received).wait()
            assert torch.equal(received, expected)


def test_what_was_sent_may_be_changed_at_once() -> None:
    one, other = ends()
    tensor, received = torch.ones(1000), torch.empty(1000)
    one.send(tensor)
    tensor.zero_()
    other.receive(received).wait()
    assert received.sum() == 1000


def test_a_message_that_is_waited_for_first_is_not_the_first_to_arrive() -> None:
    one, other = ends()
    received = torch.empty(1), torch.empty(1)
    pending = [other.receive(each) for each in received]
    one.send(torch.tensor([1.0]))
    one.send(torch.tensor([2.0]))
    pending[1].wait()
    pending[0].wait()
    assert [float(each) for each in received] == [1.0, 2.0]


def test_memory_is_used_again_once_messages_have_been_taken() -> None:
    one, other = ends()
    received = torch.empty(100_000)
    for _ in range(300):
        one.send(received)
        one.send(received)
        other.receive(received).wait()
        other.receive(received).wait()
    assert one._outlet._end <= 3 * received.nbytes


def test_more_messages_than_a_pipe_holds_wait_for_the_receiver() -> None:
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


def test_silence_and_another_size_are_errors() -> None:
    one, other = ends(timeout_s=0.05)
    with pytest.raises(PeerLostError, match=r"said nothing for 0\.05 s"):
        other.receive(torch.empty(2)).wait()
    one.send(torch.ones(3))
    with pytest.raises(PeerLostError, match="has sent 12 bytes where 8 were expected"):
        other.receive(torch.empty(2)).wait()


def test_nothing_is_left_open() -> None:
    gc.collect()
    before = descriptors()
    for _ in range(3):
        one, other = ends()
        pending = other.receive(torch.empty(1))
        one.send(torch.ones(1))
        pending.wait()
    assert descriptors() > before
    one.close()
    other.close()
    one.close()
    assert descriptors() == before
    del one, other, pending
    assert descriptors() == before


def test_an_end_outlives_its_channel_while_a_message_is_awaited() -> None:
    one, other = ends()
    received = torch.empty(1)
    pending = other.receive(received)
    del other
    one.send(torch.ones(1))
    pending.wait()
    assert float(received) == 1
