"""What a rank holds of messages and of micro-batches in flight, counted while its program runs without peers."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest
import torch

from autopar.capture.export import capture
from autopar.capture.graph import LayerGraph
from autopar.capture.source import UserModel, load
from autopar.formats.plan import Plan
from autopar.runtime import execute
from autopar.runtime.messages.transport import Pending
from autopar.runtime.stage.stage import InFlightMicroBatch, Stage
from autopar.runtime.start.job import Job
from autopar.schedules.expand import expand, rank_of
from dictated import dictate

Make = Callable[[int], tuple[LayerGraph, UserModel]]
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


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def made(layers: int) -> tuple[LayerGraph, UserModel]:
        path = tmp_path / f"model{layers}.py"
        path.write_text(MODEL.format(layers=layers))
        user = load(str(path))
        return capture(user, user.build(0)), user

    return made


def alone(plan: Plan, rank: int, graph: LayerGraph, user: UserModel, transport: Held) -> Job:
    shapes = {full: layer.parameter(at).shape for layer in graph.layers for at, full in layer.parameters.items()}

    def zeros(names: Iterable[str]) -> Mapping[str, torch.Tensor]:
        return {name: torch.zeros(shapes[name]) for name in names}

    cpu = torch.device("cpu")
    return Job(plan, expand(plan), rank, graph, user, zeros, transport, cpu, lambda step, position: None)


def most_held(plan: Plan, graph: LayerGraph, user: UserModel) -> list[int]:
    """Return the most storages of messages that each rank holds at once in a second step."""
    found = []
    for rank in range(len(plan.devices)):
        transport = Held()
        job = alone(plan, rank, graph, user, transport)
        job.step(0)
        transport.most = transport.alive
        job.step(1)
        job.finish()
        found.append(transport.most)
        del job
        assert transport.alive == 0
    return found


def test_tensors_of_messages_are_let_go_early(make: Make) -> None:
    graph, user = make(4)
    held = {
        count: most_held(dictate(graph, user, (1, 1, 1, 1), count, 4, "1f1b"), graph, user) for count in (8, 16, 32)
    }
    assert sum(held[16]) <= TORCH_1F1B / 3
    # As many as are in flight, and some on their way: not more of them, the more micro-batches there are.
    assert held[8] == held[16] == held[32]


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_as_many_micro_batches_are_in_flight_as_the_plan_says(
    make: Make,
    schedule: str,
    chunks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, user = make(8)
    for depth in ("PA", "PB") if schedule == "1f1b" else (None,):
        plan = dictate(graph, user, (1, 1, 1), 6, 4, schedule, warmup=depth, chunks=chunks)
        for group in plan.groups:
            rank = rank_of(plan, group[0], 0)
            assert flying(plan, rank, graph, user, monkeypatch) == [plan.stages[index].warmup for index in group]


def flying(plan: Plan, rank: int, graph: LayerGraph, user: UserModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
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
    job = alone(plan, rank, graph, user, Held())
    job.step(0)
    assert not any(alive.values())
    return [most[stage] for stage in job.stages.values()]
