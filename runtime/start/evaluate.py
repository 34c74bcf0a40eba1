"""Evaluation: batches of any size through the stages of a job in evaluation mode, to a loss or to predictions.

A batch goes through in rounds of micro-batches; every rank performs its part of a program of forwards for each round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial

import torch

from autopar.capture.graph import Layer, TensorSpec
from autopar.capture.layers.evaluation import EvaluationGraph
from autopar.capture.model.meta import materialize
from autopar.capture.model.terms import terms_of, total_of
from autopar.capture.split.names import MismatchError
from autopar.errors import AutoparError, ModelError, TrainingError, UsageError
from autopar.formats.plan import Plan
from autopar.formats.program import FORWARD, RECEIVE, SEND, Action
from autopar.formats.stage import Crossing
from autopar.runtime.data import split_rows
from autopar.runtime.interpret import interpret, located_error
from autopar.runtime.job import Job
from autopar.runtime.messages.mailbox import Mailbox, receives_ahead
from autopar.runtime.messages.transport import Transport, sendable
from autopar.runtime.stage.layers import autocast_of, check_shares, crossing_specs, crossings, seed_generator, seed_of
from autopar.runtime.stage.parameters import join_layer, with_parts
from autopar.runtime.stage.stage import Stage
from autopar.schedules.check import check
from autopar.schedules.expand import FORWARDS, expand_forwards
from autopar.schedules.repetition import Repetition

Results = dict[int, list[torch.Tensor]]
"""Micro-batch -> what the last layer gave; of a team, one rank has them."""


class Forwards:
    """Runs forwards of one rank; keeps nothing of them but the results."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        stages: Mapping[int, Stage],
        specs: Mapping[str, TensorSpec],
        transport: Transport,
        device: torch.device,
    ) -> None:
        """Prepare to run.

        Args:
            plan: of one round: its micro-batches and shares, and the tensors that cross in evaluation mode.
            rank: which rank this is.
            stages: the layers of its stages in evaluation mode.
            specs: the crossing tensors.
            transport: moves tensors to other ranks.
            device: where this rank computes.
        """
        program = expand_forwards(plan)
        check(program, plan, FORWARDS)
        self.plan, self._rank, self._stages, self._device = plan, rank, stages, device
        self.actions, self._due = list(program.ranks[rank]), receives_ahead(program, rank)
        self._mailbox = Mailbox(plan, program, rank, dict(specs), transport, device)
        self._own = plan.ownership.ranks[rank]
        self.rows = len(self._own.rows)
        """Of every micro-batch that the rank takes part in."""
        self._producer = {tensor.name: tensor.producer for tensor in plan.tensors}
        self._rounds = self._step = 0
        self._inputs: Sequence[Mapping[str, torch.Tensor]] = ()
        self._results: Results = {}
        self._outgoing: dict[str, torch.Tensor] = {}
        self.acts = [self._bind(position, action) for position, action in enumerate(self.actions)]

    def run(self, step: int, inputs: Sequence[Mapping[str, torch.Tensor]]) -> Results:
        """Perform one round, of a step that random layers are seeded with.

        Raises:
            TrainingError: an action failed; names it.
        """
        here = Repetition(self._rounds, self.plan.micro_batches, self._rounds + 1, self._rounds)
        self._step, self._inputs, self._results, self._rounds = step, inputs, {}, self._rounds + 1
        self._mailbox.begin_step(here)
        interpret(self, here)
        results, self._results, self._inputs, self._outgoing = self._results, {}, (), {}
        return results

    def absent(self, repetition: Repetition) -> frozenset[int]:
        """See :class:`.interpret.Machine`."""
        return frozenset()

    def post(self, position: int) -> None:
        """See :class:`.interpret.Machine`."""
        if position in self._due:
            self._mailbox.post(position)

    def note(self, position: int) -> None:
        """See :class:`.interpret.Machine`: nobody asks."""

    def mark(self) -> object:
        """See :class:`.interpret.Machine`: nobody times it."""
        return None

    def _bind(self, position: int, action: Action) -> Callable[[], None]:
        if action.kind == FORWARD:
            return partial(self._forward, action)
        if action.kind == RECEIVE:
            return partial(self._mailbox.receive, position)
        # The sends of a forward follow it at once.
        return lambda: self._mailbox.send(position, self._outgoing)

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""
        self._mailbox.finish()

    def _forward(self, action: Action) -> None:
        stage, micro_batch = self._stages[action.stage], action.micro_batch
        received = {
            spec.name: self._mailbox.take(action.stage, micro_batch, self._producer[spec.name], spec.name)
            for spec in stage.received_specs
        }

        def seed(layer: str) -> None:
            seed_generator(self._device, seed_of(self.plan.seed, layer, self._step, micro_batch, self._own.place))

        with torch.no_grad():
            outputs, _ = stage.forward(self.rows, {**self._inputs[micro_batch], **received}, seed)
        # All ranks of a team have the results: those of one count.
        if stage.loss and self._own.part == 0:
            self._results[micro_batch] = [outputs[name] for name in stage.loss]
        self._outgoing = stage.sendable(self.rows, outputs)
        self._mailbox.pass_on(SEND, action.stage, micro_batch, self._outgoing)

    def error_at(self, error: Exception, action: Action) -> AutoparError:
        """See :class:`.interpret.Machine`."""
        place = f"rank {self._rank} (stage {action.stage}, evaluation, {action})"
        return located_error(error, place, self.plan, self.actions, self._device)


def rounds(plan: Plan, rows: int) -> list[tuple[int, int]]:
    """Divide a batch of any size into rounds of (micro-batches, samples in each): the plan's, and what is left.

    Raises:
        UsageError: fewer samples are left for the last micro-batch than a stage has replicas to split it among.
    """
    full, rest = divmod(rows, plan.batch)
    count, left = divmod(rest, plan.micro_batch_size)
    for index, stage in enumerate(plan.stages):
        if 0 < left < stage.replicas and stage.division == "split":
            raise UsageError(
                f"a batch of {rows} leaves {left} samples for its last micro-batch, which the {stage.replicas} "
                f"replicas of stage {index} cannot split; give a multiple of {plan.micro_batch_size}"
            )
    found = [(plan.micro_batches, plan.micro_batch_size)] * full + [(count, plan.micro_batch_size)] + [(1, left)]
    return [(count, size) for count, size in found if count and size]


class Evaluation:
    """One rank's stages in evaluation mode; they share the parameters that the job trains, and its buffers."""

    def __init__(
        self,
        job: Job,
        graph: EvaluationGraph,
        transport: Transport,
        device: torch.device,
        weights: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Place the layers.

        Args:
            job: whose stages they are.
            graph: has the layers.
            transport: moves tensors to other ranks.
            device: where this rank computes.
            weights: makes the context in which the job's parameters are those to evaluate with.

        Raises:
            ModelError: a layer reads a parameter or buffer that its stage does not train with.
        """
        # Nothing is updated meanwhile: there is one version of the weights, and every round ends by itself.
        # Sequences are whole: nothing is kept for a backward.
        stages = tuple(stage.model_copy(update={"sequence": ()}) for stage in job.plan.stages)
        self._plan = job.plan.model_copy(update={"weight_policy": "sync", "stages": stages})
        self._job, self._transport, self._device, self._weights = job, transport, device, weights
        self.graph = graph
        stage_of = {layer: index for index, stage in enumerate(job.plan.stages) for layer in stage.layers}
        self._last = stage_of[graph.layers[-1].name]
        specs = crossing_specs(job.plan, graph)
        self._specs = {spec.name: spec for spec in specs}
        self._crossings = crossings((replace(tensor, gradient=False) for tensor in graph.tensors), stage_of)
        self._own = job.plan.ownership.ranks[job.rank]
        layers = {index: [each for each in graph.layers if stage_of[each.name] == index] for index in self._own.stages}
        held = {name for each in layers.values() for layer in each for name in layer.buffers.values()}
        known = {name: job.buffers[name] for name in sorted(held) if name in job.buffers}
        # Those of replica 0 are the model's, which the others are given before they run.
        own = known if self._own.replica == 0 else {name: torch.empty_like(each) for name, each in known.items()}
        self._buffers = own
        layers = {index: [self._place(index, layer) for layer in each] for index, each in layers.items()}
        autocast = autocast_of(job.plan.precision, device)
        self._stages = {
            index: Stage(job.stages[index].lend(each), specs, graph.inputs, graph.results, autocast)
            for index, each in layers.items()
        }
        self.inputs = tuple(dict.fromkeys(name for stage in self._stages.values() for name in stage.inputs))
        """Names of the model's inputs that layers of this rank read."""
        self._forwards: dict[tuple[int, int], Forwards] = {}

    def run(self, step: int, rows: int, values: Mapping[str, torch.Tensor]) -> Iterator[tuple[Forwards, Results]]:
        """Run all rounds of a batch, and yield what this rank has of each.

        Args:
            step: what random layers are seeded with.
            rows: samples in the batch.
            values: the whole batch's tensors that this rank reads.

        Raises:
            UsageError: shares are of fewer or more samples than a layer takes.
        """
        planned = [self._forwards_of(count, size) for count, size in rounds(self._plan, rows)]
        self._refresh()
        first = 0
        with ExitStack() as lending:
            lending.enter_context(self._weights())
            for stage in self._job.stages.values():
                lending.enter_context(stage.lending())
            for forwards in planned:
                stop = first + forwards.plan.batch
                part = {name: value[first:stop] for name, value in values.items()}
                inputs = split_rows(forwards.plan, self._job.rank, part, self.inputs, self._device)
                yield forwards, forwards.run(step, inputs)
                first = stop
        for forwards in dict.fromkeys(planned):
            forwards.finish()

    def loss(self, step: int, rows: int, values: Mapping[str, torch.Tensor]) -> list[tuple[float, float]]:
        """Return this rank's part of every term of a batch's loss: a sum, and the samples or the count to divide by."""
        terms, parts = terms_of(self.graph.results), []
        for forwards, results in self.run(step, rows, values):
            for given in results.values():
                outputs = dict(zip(self.graph.results, given, strict=True))
                pairs = [
                    (outputs[term.value] * forwards.rows, torch.tensor(forwards.rows))
                    if term.divisor is None
                    else (outputs[term.value], outputs[term.divisor])
                    for term in terms
                ]
                parts.append(torch.stack([each.double().to(self._device) for pair in pairs for each in pair]))
        if not parts:
            return [(0.0, 0.0)] * len(terms)
        found = torch.stack(parts).sum(0).tolist()
        return list(zip(found[::2], found[1::2], strict=True))

    def mean(
        self, parts: Sequence[Sequence[tuple[float, float]]], add_up: Callable[[Sequence[float]], list[float]]
    ) -> float:
        """Return the loss of several batches, given what :meth:`loss` gave for each.

        Args:
            parts: this rank's, of at least one batch.
            add_up: returns the sums over all ranks, which ask together.

        Raises:
            TrainingError: nothing was counted.
        """
        flat = [[number for pair in part for number in pair] for part in parts]
        found = add_up([sum(each) for each in zip(*flat, strict=True)])
        sums = list(zip(found[::2], found[1::2], strict=True))
        if not any(count for _, count in sums):
            raise TrainingError("loss() returned a count of 0 for the whole batch")
        return total_of(terms_of(self.graph.results), sums)

    def prepare(self, rows: int) -> None:
        """Prepare for batches of so many samples, none of which has run.

        Raises:
            UsageError: as :meth:`run`.
        """
        for count, size in rounds(self._plan, rows):
            self._forwards_of(count, size)

    def predict(self, step: int, rows: int, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """Return the model's outputs on rank 0, on the CPU, samples in order; None on other ranks."""
        parts: dict[str, list[torch.Tensor]] = {spec.name: [] for spec in self.graph.specs}
        for forwards, results in self.run(step, rows, values):
            self._collect(forwards.plan, results, parts)
        if self._job.rank != 0:
            return None
        return {spec.name: torch.cat(parts[spec.name], dim=spec.batch_dim) for spec in self.graph.specs}

    def training_outputs(
        self, step: int, rows: int, values: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor] | None:
        """Return what the forwards of a step are about to give, as :meth:`predict`; its layers compute as in training.

        They draw what the step draws, and what they write of buffers is put back.
        """
        kept = {name: buffer.clone() for name, buffer in self._buffers.items()}
        try:
            return self.predict(step, rows, values)
        finally:
            for name, buffer in kept.items():
                self._buffers[name].copy_(buffer)

    def _collect(self, plan: Plan, results: Results, parts: dict[str, list[torch.Tensor]]) -> None:
        """Send what the last layer gave to rank 0, share by share."""
        holders, sending = [own for own in plan.ownership.holders(self._last) if own.part == 0], []
        for micro_batch in range(plan.micro_batches):
            for own in (each for each in holders if micro_batch in each.micro_batches):
                for at, spec in enumerate(self.graph.specs):
                    if own.rank == self._job.rank == 0:
                        parts[spec.name].append(results[micro_batch][at].cpu())
                    elif own.rank == self._job.rank:
                        sending.append(self._transport.send(sendable(results[micro_batch][at].to(spec.dtype)), 0))
                    elif self._job.rank == 0:
                        tensor = torch.empty(spec.shape(len(own.rows)), dtype=spec.dtype, device=self._device)
                        self._transport.receive(tensor, own.rank).wait()
                        parts[spec.name].append(tensor.cpu())
        for pending in sending:
            pending.wait()

    def _forwards_of(self, count: int, size: int) -> Forwards:
        if (count, size) not in self._forwards:
            plan = _round_plan(self._plan, count, size, self._crossings)
            check_shares(self.graph.layers, plan)
            place = (self._job.rank, self._stages, self._specs, self._transport, self._device)
            self._forwards[count, size] = Forwards(plan, *place)
        return self._forwards[count, size]

    def _refresh(self) -> None:
        """Give the buffers of replica 0, which are the model's, to the other replicas."""
        (first, *others), sending = self._own.copies, []
        for buffer in self._buffers.values():
            if first != self._own.rank:
                self._transport.receive(buffer, first).wait()
                continue
            sending += [self._transport.send(sendable(buffer), other) for other in others]
        for pending in sending:
            pending.wait()

    def _place(self, stage: int, layer: Layer) -> Layer:
        """Return this rank's part of a layer, with its parameters; of what does not split as in training, all."""
        names = (*layer.parameters.values(), *layer.buffers.values())
        missing = [name for name in names if name not in self._job.parameters and name not in self._buffers]
        if missing:
            raise ModelError(
                f"layer {layer.name} reads {missing[0]} in evaluation mode, but its stage does not train with it"
            )
        team, joins = self._job.team, False
        if team.divides(layer):
            try:
                layer = team.split_captured(stage, layer)
            except MismatchError:
                layer, joins = with_parts(layer, team), True
        materialize(layer, {**self._job.parameters, **self._buffers}, self._device)
        return join_layer(layer, team) if joins else layer


def _round_plan(plan: Plan, count: int, size: int, crossings: tuple[Crossing, ...]) -> Plan:
    """Return a plan of so many micro-batches of so many samples, on the same stages."""
    stages = plan.stages
    if size != plan.micro_batch_size:
        stages = tuple(stage.model_copy(update={"shares": stage.replication.shares(size)}) for stage in stages)
    update = {"batch": count * size, "micro_batches": count, "micro_batch_size": size, "stages": stages}
    return plan.model_copy(update={**update, "tensors": crossings, "tied": ()})
