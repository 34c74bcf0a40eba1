"""Ranks as threads tell each other what ranks as processes would, and fail where those would."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from autopar.ranks.channel import Channel, new_channel_ends
from autopar.ranks.failure import PeerLostError
from autopar.runtime.messages.in_process import Exchange, InProcessTransport

Carry = Callable[[torch.Tensor, torch.Tensor], None]
"""Sends the first tensor, and receives it into the second."""


def _between_processes(sent: torch.Tensor, received: torch.Tensor) -> None:
    (one_sends, other_receives), (other_sends, one_receives) = new_channel_ends(), new_channel_ends()
    one, other = Channel(one_sends, one_receives, 5.0), Channel(other_sends, other_receives, 5.0)
    one.send(sent)
    other.receive(received).wait()


def _between_threads(sent: torch.Tensor, received: torch.Tensor) -> None:
    exchange = Exchange(5.0)
    InProcessTransport(exchange, 0).send(sent, 1)
    InProcessTransport(exchange, 1).receive(received, 0).wait()


both = pytest.mark.parametrize("carry", [_between_processes, _between_threads])


@both
@pytest.mark.parametrize(
    "tensor",
    [torch.randn(3, 4), torch.tensor(7), torch.zeros(0, 2), torch.randn(5, dtype=torch.complex128)],
    ids=["matrix", "scalar", "empty", "complex"],
)
def test_what_lies_in_memory_as_it_is_read_arrives(carry: Carry, tensor: torch.Tensor) -> None:
    received = torch.empty_like(tensor)
    carry(tensor, received)
    assert torch.equal(received, tensor)


@both
@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4).t(),
        torch.randn(4, 3)[:, :2],
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(1, dtype=torch.complex64).conj().imag,
    ],
    ids=["transposed", "sliced", "conjugated", "negated"],
)
def test_what_does_not_is_refused_on_both_sides(carry: Carry, tensor: torch.Tensor) -> None:
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    with pytest.raises(PeerLostError, match="not contiguous, or conjugated"):
        carry(tensor, whole)
    with pytest.raises(PeerLostError, match="not contiguous, or conjugated"):
        carry(whole, tensor)


@both
def test_types_of_the_same_size_are_taken_for_each_other(carry: Carry) -> None:
    received = torch.empty(2, dtype=torch.int32)
    carry(torch.tensor([1.0, 2.0]), received)
    assert received.tolist() == [0x3F800000, 0x40000000]


@both
def test_another_number_of_bytes_is_an_error(carry: Carry) -> None:
    with pytest.raises(PeerLostError, match="it has sent 8 bytes where 16 were expected"):
        carry(torch.ones(2), torch.empty(2, dtype=torch.float64))


def _summed(*tensors: torch.Tensor) -> None:
    exchange = Exchange(5.0)
    ranks = tuple(range(len(tensors)))
    pending = [InProcessTransport(exchange, rank).all_reduce(each, ranks) for rank, each in enumerate(tensors)]
    for each in pending:
        each.wait()


def test_threads_sum_what_gloo_sums() -> None:
    one, other = torch.tensor([1 + 2j, 3]), torch.tensor([1j, -1])
    _summed(one, other)
    assert one.tolist() == other.tolist() == [1 + 3j, 2]


@pytest.mark.parametrize(
    "tensors",
    [
        (torch.ones(3, dtype=torch.int16), torch.ones(3, dtype=torch.int16)),
        (torch.randn(2, 3).t(), torch.randn(3, 2)),
        (torch.randn(2, dtype=torch.complex64).conj(), torch.randn(2, dtype=torch.complex64)),
        (torch.randn(2), torch.randn(3)),
        (torch.randn(2), torch.randn(2, dtype=torch.float64)),
    ],
    ids=["short integers", "transposed", "conjugated", "sizes", "types"],
)
def test_threads_sum_nothing_that_gloo_refuses_or_would_sum_wrongly(tensors: tuple[torch.Tensor, ...]) -> None:
    with pytest.raises(PeerLostError):
        _summed(*tensors)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int16, torch.complex64])
def test_threads_gather_one_behind_the_other(count: int, dtype: torch.dtype) -> None:
    exchange, ranks = Exchange(5.0), tuple(range(count))
    own = [torch.arange(6).view(2, 3).add(rank).to(dtype) for rank in ranks]
    found = [torch.empty(2 * count, 3, dtype=dtype) for _ in ranks]
    transports = [InProcessTransport(exchange, rank) for rank in ranks]
    for each in [transports[rank].all_gather(found[rank], own[rank], ranks) for rank in ranks]:
        each.wait()
    assert all(torch.equal(each, torch.cat(own)) for each in found)


@pytest.mark.parametrize("count", [2, 3])
def test_threads_scatter_slices_of_a_sum(count: int) -> None:
    exchange, ranks = Exchange(5.0), tuple(range(count))
    wholes = [torch.randn(2 * count, 3) for _ in ranks]
    total = torch.stack(wholes).sum(0)
    found = [torch.empty(2, 3) for _ in ranks]
    transports = [InProcessTransport(exchange, rank) for rank in ranks]
    for each in [transports[rank].reduce_scatter(found[rank], wholes[rank], ranks) for rank in ranks]:
        each.wait()
    torch.testing.assert_close(torch.cat(found), total)
