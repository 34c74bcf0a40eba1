"""What a rank holds of messages and of micro-batches in flight, counted while its program runs without peers; and ranks
that are threads of one process tell each other what processes would.
"""

import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path

import pytest
import torch

from autopar.formats.plan import Plan
from autopar.ranks.channel import Channel, new_channel_ends
from autopar.ranks.failure import PeerLostError
from autopar.runtime import execute
from autopar.runtime.job import Job
from autopar.runtime.messages.transport import Exchange, InProcessTransport, Pending
from autopar.runtime.stage.stage import InFlightMicroBatch, Stage
from autopar.schedules.expand import expand
from threads import own
from training_cases import Case, make_case

MODEL = """
import torch
def model(): return torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range({layers})))
def dataset(): return torch.utils.data.TensorDataset(*[torch.zeros(256, 8)] * 2)
def loss(output, batch): return (output - batch[1]).square().mean()
def optimizer(parameters): return torch.optim.SGD(parameters, lr=0.1)
"""
TORCH_1F1B = 128
"""Boundary tensors that torch's `Schedule1F1B` of version 2.13 holds at once with four stages and sixteen
micro-batches, the stages' most added up: receive buffers for all micro-batches, and outputs."""


class Held:
    """A transport to peers that send zeros; counts the storages of messages that are alive."""

    def __init__(self) -> None:
        self.alive = self.most = 0
        self._seen: set[int] = set()

    def send(self, tensor: torch.Tensor, peer: int) -> Pending:
        return self._hold(tensor)

    def receive(self, tensor: torch.Tensor, peer: int) -> Pending:
        tensor.zero_()
        return self._hold(tensor)

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Pending:
        return Sending(tensor)

    def _hold(self, tensor: torch.Tensor) -> Pending:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self.alive += 1
            self.most = max(self.most, self.alive)
            weakref.finalize(storage, self._let_go, storage._cdata)
        return Sending(tensor)

    def _let_go(self, key: int) -> None:
        self._seen.discard(key)
        self.alive -= 1


class Sending:
    """Keeps its tensor, as a piece of work under way does."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> None:
        return


@cache
def case_of(layers: int) -> Case:
    with tempfile.TemporaryDirectory() as folder:
        return make_case(Path(folder) / "model.py", MODEL.format(layers=layers))


def alone(plan: Plan, rank: int, case: Case, transport: Held) -> Job:
    def zeros(names: Iterable[str]) -> Mapping[str, torch.Tensor]:
        return {name: torch.zeros_like(case.state[name]) for name in names}

    cpu = torch.device("cpu")
    return Job(
        plan, expand(plan), rank, own(case.graph), case.model, zeros, transport, cpu, lambda step, position: None
    )  # type: ignore[arg-type]


def most_held(plan: Plan, case: Case) -> list[int]:
    """Return the most storages of messages that each rank holds at once in a second step."""
    found = []
    for rank in range(len(plan.devices)):
        transport = Held()
        job = alone(plan, rank, case, transport)
        job.step(0)
        transport.most = transport.alive
        job.step(1)
        job.finish()
        found.append(transport.most)
        del job
        assert transport.alive == 0
    return found


def test_tensors_of_messages_are_let_go_early() -> None:
    case = case_of(4)
    held = {count: most_held(case.plan((1, 1, 1, 1), count, 4, "1f1b"), case) for count in (8, 16, 32)}
    assert sum(held[16]) <= TORCH_1F1B / 3
    # As many as are in flight, and some on their way: not more of them, the more micro-batches there are.
    assert held[8] == held[16] == held[32]


@pytest.mark.parametrize(
    ("schedule", "depth", "chunks"),
    [("gpipe", None, 1), ("1f1b", "PA", 1), ("1f1b", "PB", 1), ("interleaved", None, 2)],
)
def test_as_many_micro_batches_are_in_flight_as_the_plan_says(
    schedule: str, depth: str | None, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = case_of(8).plan((1, 1, 1), 6, 4, schedule, warmup=depth, chunks=chunks)
    for group in plan.groups:
        rank = plan.ownership.replicas[group[0]][0][0]
        assert flying(plan, rank, monkeypatch) == [plan.stages[index].warmup for index in group]


def flying(plan: Plan, rank: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the most flights of each of a rank's stages that are there at once."""
    alive: Counter[Stage] = Counter()
    most: Counter[Stage] = Counter()

    class Counted(InFlightMicroBatch):
        def __init__(self, stage: Stage, *rest: object) -> None:
            super().__init__(stage, *rest)  # type: ignore[arg-type]
            alive[stage] += 1
            most[stage] = max(most[stage], alive[stage])
            weakref.finalize(self, alive.subtract, [stage])

    monkeypatch.setattr(execute, "InFlightMicroBatch", Counted)
    job = alone(plan, rank, case_of(8), Held())
    job.step(0)
    assert not any(alive.values())
    return [most[stage] for stage in job.stages.values()]


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
def test_types_of_the_same_size_are_taken_for_each_other_and_another_number_of_bytes_is_an_error(carry: Carry) -> None:
    received = torch.empty(2, dtype=torch.int32)
    carry(torch.tensor([1.0, 2.0]), received)
    assert received.tolist() == [0x3F800000, 0x40000000]
    with pytest.raises(PeerLostError, match="it has sent 8 bytes where 16 were expected"):
        carry(torch.ones(2), torch.empty(2, dtype=torch.float64))


def _meet(size: int, begin: Callable[[InProcessTransport, int, tuple[int, ...]], Pending]) -> None:
    """Have ranks begin something together, and wait for it."""
    exchange, ranks = Exchange(5.0), tuple(range(size))
    for each in [begin(InProcessTransport(exchange, rank), rank, ranks) for rank in ranks]:
        each.wait()


def _summed(*tensors: torch.Tensor) -> None:
    _meet(len(tensors), lambda transport, rank, ranks: transport.all_reduce(tensors[rank], ranks))


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
def test_threads_sum_what_gloo_sums_and_refuse_what_it_would_not(tensors: tuple[torch.Tensor, ...]) -> None:
    one, other = torch.tensor([1 + 2j, 3]), torch.tensor([1j, -1])
    _summed(one, other)
    assert one.tolist() == other.tolist() == [1 + 3j, 2]
    with pytest.raises(PeerLostError):
        _summed(*tensors)


@pytest.mark.parametrize("count", [2, 3])
def test_threads_gather_one_behind_the_other_and_scatter_slices_of_a_sum(count: int) -> None:
    for dtype in (torch.float32, torch.bool, torch.int16, torch.complex64):
        own = [torch.arange(6).view(2, 3).add(rank).to(dtype) for rank in range(count)]
        gathered = [torch.empty(2 * count, 3, dtype=dtype) for _ in range(count)]
        _meet(count, lambda transport, rank, ranks: transport.all_gather(gathered[rank], own[rank], ranks))  # noqa: B023
        assert all(torch.equal(each, torch.cat(own)) for each in gathered)
    wholes, found = torch.randn(count, 2 * count, 3), [torch.empty(2, 3) for _ in range(count)]
    total = wholes.sum(0)
    _meet(count, lambda transport, rank, ranks: transport.reduce_scatter(found[rank], wholes[rank], ranks))
    torch.testing.assert_close(torch.cat(found), total)
