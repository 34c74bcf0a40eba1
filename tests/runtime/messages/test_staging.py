"""Messages that pass through the host's memory arrive as others do, and keep nobody waiting."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from threading import Event

import pytest
import torch
from safetensors.torch import load_file

from autopar.capture.export import capture
from autopar.capture.graph import LayerGraph
from autopar.capture.source import UserModel, load
from autopar.errors import UsageError
from autopar.formats.plan import Plan
from autopar.ranks.failure import PeerLostError
from autopar.ranks.pool import RankPool
from autopar.runtime.messages.staging import StagedTransport
from autopar.runtime.messages.transport import Exchange, InProcessTransport, Pending, Transport
from autopar.runtime.start.workspace import Workspace
from dictated import dictate
from fake_copies import TIMEOUT_S, FakeCopies
from paths import HARNESS, MODELS
from threads import train_in_threads


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
        return Gone()


class Gone:
    def wait(self) -> None:
        return


class Broken:
    def send(self, tensor: torch.Tensor, peer: int) -> Pending:
        raise PeerLostError("gone")


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


def test_what_arrives_is_copied_on_in_the_order_in_which_it_was_sent() -> None:
    exchange = Exchange()
    one, other = (StagedTransport(InProcessTransport(exchange, rank), FakeCopies()) for rank in range(2))
    sent = [torch.arange(3.0), torch.tensor([True, False]), torch.tensor([[7]])]
    received = [torch.zeros_like(tensor) for tensor in sent]
    posted = [other.receive(tensor, 0) for tensor in received]
    for pending in [*(one.send(tensor, 1) for tensor in sent), *posted]:
        pending.wait()
    for tensor, expected in zip(received, sent, strict=True):
        assert torch.equal(tensor, expected)
    sums = [torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])]
    reducing = [rank.all_reduce(part, (0, 1)) for rank, part in zip((one, other), sums, strict=True)]
    for pending in reducing:
        pending.wait()
    assert [part.tolist() for part in sums] == [[11.0, 22.0]] * 2


def test_what_is_gathered_and_scattered_is_copied_both_ways() -> None:
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


def test_a_lost_peer_is_found_by_who_waits_and_sharding_is_refused() -> None:
    transport = StagedTransport(Broken(), FakeCopies())  # type: ignore[arg-type]
    with pytest.raises(PeerLostError, match="gone"):
        transport.send(torch.zeros(1), 1).wait()
    with pytest.raises(UsageError, match=r"ranks 0, 1 shard, .*plan with `shard='none'`"):
        transport.mesh((0, 1))


@cache
def _captured(name: str) -> tuple[UserModel, LayerGraph, dict[str, torch.Tensor]]:
    model = load(str(MODELS / f"{name}.py"))
    module = model.build(0)
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    graph = capture(model, module)
    return model, graph, {key: value.detach().clone() for key, value in state.items()}


def _staged(transport: Transport) -> Transport:
    return StagedTransport(transport, FakeCopies())


def _same(plan: Plan, one: Path, other: Path) -> None:
    for rank in range(len(plan.devices)):
        for kind in ("gradients", "parameters", "buffers"):
            expected, found = load_file(one / f"{kind}-{rank}"), load_file(other / f"{kind}-{rank}")
            assert expected.keys() == found.keys()
            assert all(torch.equal(found[name], value) for name, value in expected.items()), f"{kind} of rank {rank}"


@pytest.mark.parametrize(
    ("widths", "schedule", "chunks"), [((1, 2, 1), "1f1b", 1), ((2, 1), "interleaved", 2), ((1, 1), "zb-v", 2)]
)
def test_skips_ties_masks_and_integers_train_bit_for_bit_as_without_copies(
    widths: tuple[int, ...], schedule: str, chunks: int, tmp_path: Path
) -> None:
    model, graph, state = _captured("everything")
    plan = dictate(graph, model, widths, 3, 4, schedule, chunks=chunks)
    plainly, staged = tmp_path / "plainly", tmp_path / "staged"
    losses = []
    for folder, carry in ((plainly, None), (staged, _staged)):
        folder.mkdir()
        losses.append(train_in_threads(plan, graph, model, state, folder, 3, carry=carry))
    assert losses[0] == losses[1]
    _same(plan, plainly, staged)


@pytest.mark.slow
def test_processes_train_bit_for_bit_as_without_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, graph, _ = _captured("everything")
    plan = dictate(graph, model, (1, 2), 3, 4)
    Workspace(tmp_path).prepare(model, dictate(graph, model, (1,), 1, 2), None)
    arguments = {"plan": plan.dumps(), "model": model.spec, "workspace": str(tmp_path), "steps": 3}
    monkeypatch.setenv("PYTHONPATH", str(HARNESS), prepend=os.pathsep)
    with RankPool(3) as pool:
        for folder in ("keep", "stage"):
            (tmp_path / folder).mkdir()
            pool.run(f"rank_jobs:train_and_{folder}", {**arguments, "folder": str(tmp_path / folder)})
    _same(plan, tmp_path / "keep", tmp_path / "stage")
