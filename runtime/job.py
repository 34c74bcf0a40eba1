"""Job: one rank's part of a training run, built from a plan, a captured model and its weights.

In come these; out come stages, of which replicas divide what the plan says, with an executor, an update and batches;
stepped, they give the records of steps.

``Feed`` steps a job by what it is given, one mini-batch at a time, where nobody knows how many there will be. In comes
a rank's share of a mini-batch; out comes the record of the mini-batch that has ended. With flushes that is the same
one. Without, it is one some mini-batches before, until the pipeline is drained; the next one then fills it again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from autopar.capture.graph import LayerGraph, TensorSpec
from autopar.capture.layers.build import counting_module, counts_of
from autopar.capture.model.meta import retarget
from autopar.capture.model.optimizer import Settings
from autopar.capture.model.source import UserModel
from autopar.capture.model.terms import Term, is_named, terms_of
from autopar.depths import delay, updates_ahead
from autopar.errors import UsageError
from autopar.formats.plan import Plan
from autopar.formats.program import FORWARD, Program
from autopar.options.train import TrainSettings
from autopar.policies import WRITTEN_BUFFERS
from autopar.runtime.average import WeightAverage
from autopar.runtime.clocks import Clock, clock_of
from autopar.runtime.data import Batch, Batches, BlankLoader, Loader, ShareLoader
from autopar.runtime.device import copies_of
from autopar.runtime.execute import Executor, ExecutorSettings
from autopar.runtime.gradients import Reducer, reducer_of
from autopar.runtime.loaders.client import LoadedShares
from autopar.runtime.loss import LossScale, LossTally, LossTerms, StepRecord
from autopar.runtime.messages.mailbox import Mailbox
from autopar.runtime.messages.transport import Transport
from autopar.runtime.stage.layers import AGAIN, autocast_of, check_exchange, crossing_specs, warm_up
from autopar.runtime.stage.parameters import OptimizerParameters, RankInputs, Team, Weights, whole
from autopar.runtime.stage.stage import Stage
from autopar.runtime.stage.transforms import layers_of, transform
from autopar.runtime.stage.versions import CorrectedWeights, NewestWeights, PredictedWeights, WeightVersions
from autopar.runtime.stage.waves import wave_weights
from autopar.runtime.update import Update, UpdateSettings
from autopar.schedules.repetition import repetition_of

DEFAULTS = TrainSettings()


class Job:
    """One rank: its stages, optimizer and data, stepped together with the other ranks' jobs.

    Where nobody reads numbers, or time is not the device's, a subclass has another ``_tally``, ``update_of``,
    ``_clock`` or ``_open_mailbox``.
    """

    update_of: ClassVar[type[Update]] = Update
    loads_data: ClassVar[bool] = True
    """Whether mini-batches are those of the dataset; else they are zeros, unless others are given."""
    reads_values: ClassVar[bool] = True
    """Whether tensors have values that the host may ask for."""
    notes_sends: ClassVar[bool] = False
    """Whether every send is noted, too."""

    def __init__(
        self,
        plan: Plan,
        program: Program,
        rank: int,
        graph: LayerGraph,
        model: UserModel,
        weights: Weights,
        transport: Transport,
        device: torch.device,
        note: Callable[[int, int], None],
        settings: TrainSettings = DEFAULTS,
        whole: Settings | None = None,
        loaders: Path | None = None,
    ) -> None:
        """Build the rank's stages, holding only its own parameters.

        Args:
            plan: what is carried out.
            program: its expansion.
            rank: which rank this is.
            graph: the captured model.
            model: the user's file: dataset, optimizer.
            weights: reads initial parameters and buffers by name.
            transport: moves tensors to other ranks.
            device: where this rank computes.
            note: called with (step, position in the program) before every action that may take a while.
            settings: what the user asks beyond the plan.
            whole: what the optimizer gives every parameter of the whole model, to be held against this rank's.
            loaders: where processes listen that load this host's mini-batches; None: the rank does so itself.
        """
        self.plan, self.actions, self.rank, self._device = plan, program.ranks[rank], rank, device
        self.transport = transport
        """Moves tensors to other ranks."""
        self._user = model
        self.own = plan.ownership.ranks[rank]
        """What it has of the plan."""
        self._lead, self._span = plan.lead, plan.span
        self._specs = {tensor.name: tensor for tensor in graph.tensors}
        self.team = Team(plan, rank, transport, split_seeds=settings.split_seeds)
        """With whom it runs its replica."""
        inputs = RankInputs(plan, program, graph, weights, settings, self.team, transport, device, rank)
        self._made = transform(inputs)
        self._local_parameters = self._made.local
        self.stages = self._build_stages(graph)
        self.parameters, self.buffers = self._local_parameters.parameters, self._local_parameters.buffers
        """This rank's, by the model's own names; of divided parameters, its parts."""
        clock, self._copies = self._clock(), copies_of(device)
        reducer = reducer_of(plan, rank, self.stages, self._local_parameters, transport, clock.mark, self.team)
        scale = LossScale() if plan.precision == "fp16" else None
        self.average = self._weight_average(graph)
        """Of its trained parameters, where one is kept."""
        self.update = self._updating(graph, reducer, transport, settings, scale, whole)
        """What completes the gradients and steps the optimizer."""
        self._loaders = loaders
        self.batches = Batches(self._loader(model, graph, settings), self._copies)
        crossing = {tensor.name: tensor for tensor in self._crossing_specs(graph)}
        marked = not graph.portable and self.reads_values
        self._mailbox = self._open_mailbox(program, crossing, with_marks=marked)
        executing = ExecutorSettings(plan, self.actions, rank, device, clock, note, scale, self.notes_sends)
        self.versions = self._weight_versions(graph)
        """Of its parameters."""
        terms = terms_of(graph.outputs) if is_named(graph.outputs) else []
        self.terms = tuple(term.name for term in terms)
        """Names of the terms of a loss that has several."""
        tally = self._tally(terms)
        parts = (self._mailbox, reducer, tally, self.update, self.versions, self._loss_terms(graph, transport))
        self._executor = Executor(executing, self.stages, *parts)
        self._inputs: dict[int, Batch] = {}

    def _build_stages(self, graph: LayerGraph) -> dict[int, Stage]:
        crossing, autocast = self._crossing_specs(graph), autocast_of(self.plan.precision, self._device)
        found = {}
        for index, layers in self._made.layers.items():
            kind, recompute = self._made.kinds.get(index, Stage), self.plan.stages[index].recompute
            found[index] = kind(layers, crossing, graph.inputs, graph.outputs, autocast, recompute)
        return found

    def _crossing_specs(self, graph: LayerGraph) -> list[TensorSpec]:
        """Return the tensors between layers, as this rank has them."""
        return [self.team.local_spec(spec, self.own.stages) for spec in crossing_specs(self.plan, graph)]

    @property
    def notes(self) -> list[str]:
        """What whoever reads the report should know of this rank."""
        return [*self.update.notes, *self._made.notes]

    @property
    def rows(self) -> int:
        """Samples in this rank's share of a micro-batch."""
        return len(self.own.rows)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the model's inputs that layers of this rank read."""
        return tuple(dict.fromkeys(name for stage in self.stages.values() for name in stage.inputs))

    def state(self) -> dict[str, torch.Tensor]:
        """Return this rank's parameters and buffers by the model's own names."""
        return self._local_parameters.state()

    def whole(self, name: str) -> torch.Tensor:
        """Return all of a parameter or buffer; those that divide parameters, replicas or teams, ask for it together."""
        return self.team.whole(name, whole(self.state()[name]))

    def used_weights(self) -> AbstractContextManager[None]:
        """Return the context in which parameters are those that are evaluated, saved and exported."""
        return self.average.in_place() if self.average and self.plan.used_weights == "average" else nullcontext()

    def _weight_average(self, graph: LayerGraph) -> WeightAverage | None:
        if self.plan.ema_decay is None:
            return None
        for layer in graph.layers:
            if layer.writes is not None and layer.writes.parameters:
                raise UsageError(
                    f"layer {layer.name} writes parameter {layer.writes.parameters[0]} in its forward, of which "
                    "`ema_decay` keeps no average; make it a buffer (register_buffer), or plan without `ema_decay`"
                )
        return WeightAverage(self._local_parameters.trainable_parameters(), self.plan.ema_decay)

    def check_exchange(self, graph: LayerGraph) -> None:
        """Check that the rank's stages can compute what another graph of the model does.

        Raises:
            UsageError: they cannot; names the layer.
        """
        for index, stage in self.stages.items():
            for mine, other in zip(stage.layers, layers_of(self.plan, index, graph), strict=True):
                check_exchange(mine, other)

    def exchange(self, graph: LayerGraph) -> None:
        """Compute from now on what another graph of the model does, with the parameters and buffers that are there."""
        for index, stage in self.stages.items():
            layers = self.team.split(index, layers_of(self.plan, index, graph))
            for layer in layers:
                retarget(layer, self._device)
            stage.exchange(layers)

    def check_trained(self, flags: Mapping[str, bool]) -> None:
        """Check that parameters can be frozen, or trained again, by their names in the model.

        Raises:
            UsageError: names a parameter.
        """
        name, trained = next(iter(flags.items()))
        change = f"{name}.requires_grad_({trained})"
        why = self.plan.policy.refusal_of("frozen")
        if why is not None:
            raise UsageError(f"{change} {why}; {AGAIN}")
        if self._made.mesh is not None:
            raise UsageError(f"{change} between steps is not followed by stages that are sharded; {AGAIN}")
        for name in flags:
            if name in self.parameters and name not in self.update.optimizer_parameters:
                raise UsageError(f"{name} was frozen when the job was built, and nothing steps it; {AGAIN}")

    def warm_up(self) -> list[str]:
        """Run the compiled layers once, on zeros, so that they compile; return warnings of those that do not."""
        warnings, autocast = list[str](), autocast_of(self.plan.precision, self._device)
        for stage in self.stages.values():
            read = [*stage.received_specs, *(self._specs[name] for name in stage.inputs)]
            warnings += warm_up(stage.layers, self.rows, read, self._device, autocast)
        return warnings

    def try_optimizer(self) -> None:
        """Have the optimizer step small divided parameters, before training; replicas do so together.

        Raises:
            UsageError: it does not do what it does with whole ones; says what to do.
        """
        for check in self._made.optimizer_checks:
            check(self._user, list(self._local_parameters.trainable_parameters().items()))

    def step(self, step: int, stop: int | None = None, start: int = 0) -> StepRecord:
        """Train one mini-batch; steps count from 0 and choose their samples.

        Without flushes this is one repetition: its backwards are of that mini-batch, and of as many as follow in its
        span, its forwards of later ones. The pipeline is filled in the steps from ``-lead`` to 0, of which there is no
        record.

        Args:
            step: which.
            stop: the first that is not to be trained any more, or not before a drain; by default the next.
            start: the first with which the pipeline is filled.
        """
        ahead, stop = self._ahead, step + 1 if stop is None else stop
        for done in [each for each in self._inputs if each < step + ahead.start]:
            del self._inputs[done]
        for later in range(max(start, step + ahead.start), min(stop, step + ahead.stop)):
            # The others are other replicas'.
            if later not in self._inputs and self.own.has(later, start):
                following = range(later + self.own.turns, stop, self.own.turns)
                self._inputs[later] = self.batches.load(later, following, start)
        record = self.train(step, self._inputs, stop, start)
        record.loading = self.batches.times()
        return record

    def train(self, step: int, inputs: Mapping[int, Batch], stop: int, start: int) -> StepRecord:
        """Train as :meth:`step` does, given this rank's rows of the model's inputs in every micro-batch.

        Args:
            step: which.
            inputs: by mini-batch, of all that begin.
            stop: the first that is not to be trained any more, or not yet.
            start: the first with which the pipeline is filled.
        """
        if step == start - self._lead:
            self.versions.refill(start)
        record = self._executor.run(repetition_of(self.plan, step, range(start, stop)), inputs)
        if step + self._span >= stop:
            self.versions.drain()
        return record

    @cached_property
    def _ahead(self) -> range:
        """How many mini-batches ahead of a step its forwards are."""
        count = self.plan.micro_batches
        forwards = [action.micro_batch // count for action in self.actions if action.kind == FORWARD]
        return range(min(forwards, default=0), max(forwards, default=0) + 1)

    def _check_policy(self, graph: LayerGraph) -> None:
        """Refuse a model that the plan's policy does not train.

        Raises:
            UsageError: says what to do.
        """
        last = self.plan.stages[-1]
        if self.plan.counts_apart and graph.loss != "mean" and last.replicas > last.period:
            self.plan.policy.check("uneven_counts")
        if isinstance(self.update.scheduler, ReduceLROnPlateau):
            self.plan.policy.check("watched_loss")
        why = self.plan.policy.refusal_of("written_parameters")
        for layer in (layer for stage in self.stages.values() for layer in stage.layers):
            if why is not None and layer.writes is not None and layer.writes.parameters:
                raise UsageError(f"layer {layer.name} {why}")
            if self.plan.pipelines and layer.writes is not None and layer.writes.buffers:
                raise UsageError(f"layer {layer.name} {WRITTEN_BUFFERS}")

    def _weight_versions(self, graph: LayerGraph) -> NewestWeights:
        self._check_policy(graph)
        if not self.plan.policy.keeps_versions:
            return NewestWeights()
        (stage,) = self.stages
        policy, depths = self.plan.policy, self.plan.depths[stage]
        # Modules that are listed, and not captured, may read their parameters in their backward.
        recomputes = bool(self.plan.stages[stage].recompute) or not graph.portable
        trained, optimizer = self._local_parameters.parameters.values(), self.update.optimizer
        if policy.prepares == "predict":
            return PredictedWeights(trained, optimizer, updates_ahead(depths), recomputes=recomputes)
        if self.plan.anneal_steps is not None:
            steps = self.plan.anneal_steps, self.plan.synchronous_steps
            return CorrectedWeights(trained, optimizer, delay(depths), *steps, recomputes=recomputes)
        if self.plan.pipelines:
            kept = policy.kept_versions(depths)
            own = self.rank, graph, self._local_parameters, self.transport, kept
            return wave_weights(self.plan, *own, recomputes=recomputes)
        return WeightVersions(trained, policy.kept_versions(depths), recomputes=recomputes)

    def finish(self) -> None:
        """Wait until everything that was sent has arrived, and all work of the device is done."""
        self._mailbox.finish()
        self.batches.close()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _updating(
        self,
        graph: LayerGraph,
        reducer: Reducer,
        transport: Transport,
        settings: TrainSettings,
        scale: LossScale | None,
        whole: Settings | None,
    ) -> Update:
        """Return what completes the gradients and steps the optimizer."""
        twins = OptimizerParameters(self._local_parameters.trainable_parameters(), self._made.mesh)
        read = ((index, layer) for index in reversed(self.stages) for layer in self.stages[index].layers)
        stage_of = {name: index for index, layer in read for name in layer.parameters.values()}
        # Replicas that take turns divide the sum of each mini-batch by its own count.
        counts = graph.loss == "sum_count" and not self.plan.counts_apart
        clipping = settings.clip_norm, settings.clip == "stage"
        how = UpdateSettings(self.plan, self.rank, self._user, stage_of, whole, counts, *clipping, scale)
        after = self._made.after_update, *([] if self.average is None else [self.average.update])
        update = self.update_of(how, twins, reducer, transport, self._made.before_update, after)
        if update.optimizer is not None:
            update.optimizer.register_step_pre_hook(lambda *_: twins.set_gradients())
        return update

    def _clock(self) -> Clock:
        return clock_of(self._device)

    def _open_mailbox(self, program: Program, specs: dict[str, TensorSpec], *, with_marks: bool) -> Mailbox:
        where = self.transport, self._device
        return Mailbox(self.plan, program, self.rank, specs, *where, with_marks=with_marks)

    def _loader(self, model: UserModel, graph: LayerGraph, settings: TrainSettings) -> Loader:
        """Return what loads mini-batches: in the host's memory, where copies bring them on from there."""
        specs = [graph.tensor(name) for name in self.inputs]
        if not self.loads_data:
            return BlankLoader(self.plan, self.rank, specs)
        if self._loaders is not None:
            return LoadedShares(model, self.plan, self.rank, specs, self._loaders, settings.last, self._copies)
        device = self._device if self._copies is None else torch.device("cpu")
        return ShareLoader(model, self.plan, self.rank, specs, device, settings.last)

    def _tally(self, terms: Sequence[Term]) -> LossTally:
        return LossTally(self.rows, self.plan.batch, terms, self._copies, self.batches.look_ahead)

    def _loss_terms(self, graph: LayerGraph, transport: Transport) -> LossTerms | None:
        """Return by what the terms of a loss that has several are multiplied, where this rank makes them."""
        last = self.plan.stages_by_pipeline[self.plan.pipeline_of(self.own.stage)][-1]
        if not is_named(graph.outputs) or last not in self.stages:
            return None
        layer, terms = graph.layers[-1], terms_of(graph.outputs)
        module = counting_module(layer, graph.inputs)
        replicas = self.own.copies
        # Those that take whole mini-batches in turn count each their own.
        adds_up = len(replicas) > 1 and not self.plan.counts_apart

        def count(inputs: Sequence[Mapping[str, torch.Tensor]]) -> list[float]:
            assert module is not None
            counted = [counts_of(module, self.rows, layer, each) for each in inputs if each]
            # Of replicas that take turns, one may have no micro-batch.
            size = sum(term.divisor is not None for term in terms)
            nothing = torch.zeros(size, dtype=torch.float64, device=self._device)
            total = torch.stack([nothing, *counted]).sum(0)
            if adds_up:
                transport.all_reduce(total, replicas).wait()
            found: list[float] = total.tolist()
            return found

        share = self.rows / self.plan.batch
        return LossTerms(terms, share, count if module is not None and self.reads_values else None)


class Feed:
    """Steps a job by what it is given; every rank is given as much."""

    def __init__(self, job: Job, first: int) -> None:
        """Begin with mini-batch ``first``, the pipeline being empty."""
        self._job, self._lead, self._span = job, job.plan.lead, job.plan.span
        self._start = self.batches = first
        """Of ``batches``: how many mini-batches there have been, counted from the run's first."""
        self._next = first - self._lead
        """The repetition that comes next."""
        self._inputs: dict[int, Batch] = {}

    @property
    def under_way(self) -> bool:
        """Whether mini-batches have begun that have not ended."""
        return self._start < self.batches and self._lead > 0

    def step(self, inputs: Batch) -> list[StepRecord]:
        """Take the next mini-batch; return the records of those that have ended: none while the pipeline fills."""
        step = self.batches
        self._inputs[step] = inputs
        self.batches += 1
        ended = self._perform_until(self.batches - self._span)
        return ended + self.drain() if step < self._job.plan.synchronous_steps else ended

    def drain(self) -> list[StepRecord]:
        """End all that have begun; return their records."""
        if not self.under_way:
            return []
        ended = self._perform_until(self.batches + self._lead - 1)
        self._start, self._next = self.batches, self.batches - self._lead
        return ended

    def _perform_until(self, first: int) -> list[StepRecord]:
        """Perform the steps, or repetitions, whose first forward is of mini-batch ``first`` or one before."""
        ended = list[StepRecord]()
        while self._next + self._lead <= first:
            record = self._job.train(self._next, self._inputs, self.batches, self._start)
            for step in range(self._next, self._next + self._span):
                self._inputs.pop(step, None)
            # There is none while the pipeline only fills.
            ended += record.every if self._next >= self._start else ()
            self._next += self._span
        if not self._lead:
            self._start = self.batches
        return ended
