"""Messages that pass through the host's memory arrive as others do, and keep nobody waiting.

Communicators are made before the first step, all that it uses, and in an order that no ranks wait in a ring for.
"""

from pathlib import Path
from threading import Event
from unittest.mock import Mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from autopar.errors import UsageError
from autopar.formats.plan import Plan
from autopar.formats.program import SEND, SEND_GRADIENT
from autopar.ranks.failure import PeerLostError
from autopar.runtime.messages.staging import StagedTransport, directions, warm_up
from autopar.runtime.messages.transport import (
    Exchange,
    InProcessTransport,
    Pending,
    Transport,
    reducing_groups,
    team_groups,
)
from autopar.schedules.expand import expand
from drawn_models import model_case, plans, team_plans
from fake_copies import TIMEOUT_S, FakeCopies
from training_cases import same_bits


class Said:
    """A transport that notes what it is asked for; ``count`` things have been when ``all_there`` is set."""

    def __init__(self, count: int) -> None:
        self.said: list[tuple[str, object, list[float]]] = []
        self.all_there = Event()
        self._count = count

    def send(self, tensor: torch.Tensor, peer: int) -> Pending:
        return self._note("send", tensor, peer)

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...], *, apart: bool = False) -> Pending:
        return self._note("reduce", tensor, (ranks, apart))

    def _note(self, kind: str, tensor: torch.Tensor, whom: object) -> Pending:
        self.said.append((kind, whom, tensor.tolist()))
        if len(self.said) == self._count:
            self.all_there.set()
        return Mock()


def test_what_is_sent_and_reduced_begins_in_order_when_its_copy_is_there_and_nobody_waits_for_it() -> None:
    inner, copies = Said(4), FakeCopies()
    transport = StagedTransport(inner, copies)  # type: ignore[arg-type]
    copies.going.clear()
    first, second = torch.tensor([1.0]), torch.tensor([2.0])
    on_host = copies.buffer(torch.tensor([3.0])).fill_(3.0)
    begun = [
        transport.send(first, 1),
        transport.all_reduce(on_host, (0, 1)),
        transport.send(second, 2),
        transport.all_reduce(second, (0, 2), apart=True),
    ]
    assert inner.said == []
    # The device makes the value before the copy, and the host is ahead of it.
    first.fill_(5.0)
    copies.going.set()
    assert inner.all_there.wait(TIMEOUT_S)
    for each in begun:
        each.wait()
    assert inner.said == [
        ("send", 1, [5.0]),
        ("reduce", ((0, 1), False), [3.0]),
        ("send", 2, [2.0]),
        ("reduce", ((0, 2), True), [2.0]),
    ]
    # One reduction was of the device.
    assert (copies.landed, copies.threads) == (1, 1)


def test_what_arrives_or_is_scattered_is_copied_in_order() -> None:
    exchange = Exchange()
    one, other = (StagedTransport(InProcessTransport(exchange, rank), FakeCopies()) for rank in range(2))
    sent = [torch.arange(3.0), torch.tensor([True, False]), torch.tensor([[7]])]
    received = [torch.zeros_like(tensor) for tensor in sent]
    posted = [other.receive(tensor, 0) for tensor in received]
    sums = [torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])]
    begun = [*(one.send(tensor, 1) for tensor in sent), *posted]
    for pending in [*begun, one.all_reduce(sums[0], (0, 1)), other.all_reduce(sums[1], (0, 1))]:
        pending.wait()
    assert all(map(torch.equal, received, sent))
    assert [part.tolist() for part in sums] == [[11.0, 22.0]] * 2
    transport = StagedTransport(Mock(send=Mock(side_effect=PeerLostError("gone"))), FakeCopies())
    with pytest.raises(PeerLostError, match="gone"):
        transport.send(torch.zeros(1), 1).wait()
    with pytest.raises(UsageError, match=r"ranks 0, 1 shard, .*plan with `shard='none'`"):
        transport.mesh((0, 1))
    exchange, copies = Exchange(TIMEOUT_S), [FakeCopies(), FakeCopies()]
    transports = [StagedTransport(InProcessTransport(exchange, rank), copies[rank]) for rank in range(2)]
    own, wholes = torch.randn(2, 3), [torch.randn(4, 3), torch.randn(4, 3)]
    gathered, slices = [torch.empty(4, 3), torch.empty(4, 3)], [torch.empty(2, 3), torch.empty(2, 3)]
    total = wholes[0] + wholes[1]
    begun = [transports[rank].all_gather(gathered[rank], own + rank, (0, 1)) for rank in range(2)]
    begun += [transports[rank].reduce_scatter(slices[rank], wholes[rank], (0, 1)) for rank in range(2)]
    for each in begun:
        each.wait()
    assert all(torch.equal(each, torch.cat([own, own + 1])) for each in gathered)
    assert torch.equal(torch.cat(slices), total)
    assert [each.landed for each in copies] == [2, 2]


def _staged(transport: Transport) -> Transport:
    return StagedTransport(transport, FakeCopies())


@pytest.mark.parametrize(
    ("widths", "schedule", "chunks"), [((1, 2, 1), "1f1b", 1), ((2, 1), "interleaved", 2), ((1, 1), "zb-v", 2)]
)
def test_skips_ties_masks_and_integers_train_bit_for_bit_as_without_copies(
    widths: tuple[int, ...], schedule: str, chunks: int, tmp_path: Path
) -> None:
    case = model_case("everything")
    plan = case.plan(widths, 3, 4, schedule, chunks=chunks)
    plainly, staged = tmp_path / "plainly", tmp_path / "staged"
    assert case.train(plan, plainly, 3) == case.train(plan, staged, 3, carry=_staged)
    same_bits(plan, plainly, staged)


Communicator = tuple[str, tuple[int, ...]]


def used_by(rank: int, plan: Plan, apart: list[tuple[int, ...]]) -> list[Communicator]:
    """Return which communicators a rank uses, in order."""
    used: list[Communicator] = []

    def use(kind: str, *ranks: int) -> Mock:
        used.append((kind, ranks))
        return Mock()

    noting = Mock()
    noting.send = lambda tensor, peer: use("message", rank, peer)
    noting.receive = lambda tensor, peer: use("message", peer, rank)
    noting.all_reduce = lambda tensor, ranks, apart=False: use("apart" if apart else "reduction", *ranks)
    warm_up(noting, plan, rank, torch.device("cpu"), apart)
    return used


def made(plan: Plan, apart: list[tuple[int, ...]]) -> set[Communicator]:
    """Return what ranks make that wait for each other where one is made, until none can go on."""
    left = [used_by(rank, plan, apart) for rank in range(len(plan.devices))]
    found: set[Communicator] = set()
    while any(left):
        heads = {used[0] for used in left if used}
        ready = [(kind, ranks) for kind, ranks in heads if all(left[rank][:1] == [(kind, ranks)] for rank in ranks)]
        assert ready, f"ranks wait in a ring: {heads}"
        for each in ready:
            found.add(each)
            for rank in each[1]:
                left[rank].pop(0)
    return found


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(plan=plans("everything"))
def test_all_that_a_program_uses_is_made_and_nothing_else(plan: Plan) -> None:
    sent = {
        (rank, action.peer)
        for rank, actions in enumerate(expand(plan).ranks)
        for action in actions
        if action.kind in (SEND, SEND_GRADIENT)
    }
    assert set(directions(plan)) == sent
    groups = reducing_groups(plan)
    expected = {("message", pair) for pair in sent} | {("reduction", group) for group in groups}
    assert made(plan, groups[:1]) == expected | {("apart", group) for group in groups[:1]}


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(plan=team_plans("everything"))
def test_all_that_teams_use_is_made_too(plan: Plan) -> None:
    groups = {("reduction", group) for group in (*reducing_groups(plan), *team_groups(plan))}
    assert made(plan, []) == {("message", pair) for pair in directions(plan)} | groups
