"""Rehearsal: a plan's program performed on fake tensors, which take no memory, to see how much real ones would take.

A rank is rehearsed alone: its transport takes whatever is sent, and gives tensors of the right shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.capture.cache.recall import build_and_capture
from autopar.capture.graph import LayerGraph
from autopar.capture.model.effects import StorageTracker
from autopar.capture.model.source import UserModel, load
from autopar.capture.model.terms import Term
from autopar.errors import TrainingError, UsageError, first_line
from autopar.formats.plan import Plan
from autopar.progress import Progress, no_progress
from autopar.runtime.job import Job
from autopar.runtime.loss import LossTally, StepRecord
from autopar.runtime.messages.transport import Done, Pending
from autopar.runtime.settings import check_scope
from autopar.runtime.start.workspace import fit_to_plan
from autopar.runtime.update import Update
from autopar.schedules.check import check
from autopar.schedules.expand import expand, messages
from autopar.signals import unwinding_aborts

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class _FakeTransport:
    """Takes whatever is sent, and fills nothing; what is received has the right shape."""

    def __init__(self, meshes: Mapping[tuple[int, ...], DeviceMesh]) -> None:
        """Take the meshes of ranks that shard, which are made of values."""
        self._meshes = meshes

    def send(self, tensor: torch.Tensor, peer: int) -> Pending:
        return Done(tensor)

    receive = send

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...], *, apart: bool = False) -> Pending:
        return Done(tensor)

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor, ranks: tuple[int, ...]) -> Pending:
        return Done(whole, own)

    def reduce_scatter(self, own: torch.Tensor, whole: torch.Tensor, ranks: tuple[int, ...]) -> Pending:
        return Done(own, whole)

    def has_arrived(self, peer: int) -> bool:
        return True

    def mesh(self, ranks: tuple[int, ...]) -> DeviceMesh:
        return self._meshes[ranks]


@contextmanager
def _fake_transport(plan: Plan, rank: int) -> Iterator[_FakeTransport]:
    """Give one rank peers that are not there; what its replicas shard meets in a process group of torch's fake kind.

    Raises:
        UsageError: this process has a process group already.
    """
    own = plan.ownership.ranks[rank]
    if all(plan.stages[stage].shard == "none" for stage in own.stages):
        yield _FakeTransport({})
        return
    if dist.is_initialized():
        raise UsageError("what is sharded cannot be rehearsed in a process that has a process group")
    from torch.distributed.device_mesh import DeviceMesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=len(plan.devices))
    try:
        yield _FakeTransport({own.copies: DeviceMesh.from_group(dist.new_group(list(own.copies)), "cpu")})
    finally:
        dist.destroy_process_group()


_CPU = torch.device("cpu")


@unwinding_aborts()
def rehearse(
    plan: Plan, graph: LayerGraph, model: UserModel, progress: Callable[[int], None] = lambda stage: None
) -> tuple[int, ...]:
    """Return the most bytes that a rank of every stage's largest replica holds in a step, all its stages counted.

    Parameters, gradients, optimizer state, activations, inputs and messages are counted, as the runtime allocates
    them; what a kernel takes for itself while it runs is not. The second step is the one that counts, for the
    optimizer makes its state in the first.

    Args:
        plan: what would be carried out.
        graph: its model; the parameters of its layers are replaced.
        model: the user's file, for the optimizer.
        progress: called with the index of every stage that is about to be rehearsed.

    Raises:
        TrainingError: the model, or its optimizer, does something that fake tensors cannot.
    """
    peaks = [0] * len(plan.stages)
    state = torch.get_rng_state()
    try:
        for chunks in plan.groups:
            progress(chunks[0])
            first = plan.stages[chunks[0]]
            largest = max(range(first.replicas), key=first.rows.__getitem__)
            ranks = _different_ranks(plan, chunks, plan.ownership.replicas[chunks[0]][largest])
            peak_bytes = max(_peak_bytes(plan, rank, graph, model) for rank in ranks)
            for index in chunks:
                peaks[index] = peak_bytes
    finally:
        torch.set_rng_state(state)
    return tuple(peaks)


def _different_ranks(plan: Plan, stages: Sequence[int], team: Sequence[int]) -> Iterable[int]:
    """Return the ranks of a team of which none has as many indices, and rows of messages, as one before."""
    cuts = [cut for stage in stages for cut in plan.stages[stage].cuts]
    handed: dict[int, list[tuple[int, int, float]]] = {rank: [] for rank in team}
    for flow in messages(plan):
        for rank in {flow.sender, flow.receiver} & handed.keys():
            handed[rank].append((flow.producer, flow.consumer, flow.samples.rows))
    indices = [tuple(sum(piece.size for piece in cut.pieces(part)) for cut in cuts) for part in range(len(team))]
    return {(indices[part], tuple(handed[rank])): rank for part, rank in reversed(list(enumerate(team)))}.values()


def rehearse_model(plan: Plan, model: str, data: Path | None, progress: Progress = no_progress) -> tuple[int, ...]:
    """Capture MODEL and rehearse a plan of it; see :func:`rehearse`.

    Raises:
        FileError: the plan is not one of this model.
        TrainingError: as :func:`rehearse`.
    """
    check_scope(plan)
    plan.policy.check("commands")
    check(expand(plan), plan)
    user = load(model, data, plan.model)
    progress("capturing the model", 0.0)
    # It may be larger than this machine's memory.
    graph = fit_to_plan(build_and_capture(user, plan.seed)[1], plan, user)
    stages = len(plan.stages)
    return rehearse(plan, graph, user, lambda index: progress(f"rehearsing stage {index} of {stages}", 0.0))


def _peak_bytes(plan: Plan, rank: int, graph: LayerGraph, model: UserModel) -> int:
    known = {name: layer.module.get_buffer(at) for layer in graph.layers for at, name in layer.buffers.items()}
    known |= {name: layer.parameter(at) for layer in graph.layers for at, name in layer.parameters.items()}

    def blank(names: Iterable[str]) -> Mapping[str, torch.Tensor]:
        return {name: torch.empty(known[name].shape, dtype=known[name].dtype) for name in names}

    try:
        # What the model's graph holds itself (constants) is real; it is taken for fake where it meets fake tensors.
        with (
            _fake_transport(plan, rank) as peers,
            FakeTensorMode(allow_non_fake_inputs=True),
            StorageTracker() as tracker,
        ):
            job = _FakeJob(plan, expand(plan), rank, graph, model, blank, peers, _CPU, lambda step, at: None)
            job.step(0)
            tracker.peak_bytes = tracker.alive_bytes
            job.step(1)
    except UsageError:
        raise
    except Exception as error:
        raise TrainingError(f"cannot be rehearsed without real values: {first_line(error)}") from error
    return int(tracker.peak_bytes)


class _UnreadUpdate(Update):
    """An update that asks for no number."""

    def _step(self, record: StepRecord, mini_batches: int) -> None:
        self._reducer.sum_in_team(record.step)
        if self.optimizer is not None:
            self.optimizer.step()


class _FakeJob(Job):
    """A job whose peers are not there: what it receives has the right shape, and nobody asks for values."""

    update_of = _UnreadUpdate
    loads_data = reads_values = False

    def _tally(self, terms: Sequence[Term]) -> LossTally:
        return _UnreadTally(1, 1)


class _UnreadTally(LossTally):
    def total(self, step: int, *, finite: bool = True) -> tuple[float, float]:
        return 0.0, 0.0
