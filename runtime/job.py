"""Job: one rank's part of a training run, built from a plan, a captured model and its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar, cast

import torch

from autopar.capture.graph import Layer, LayerGraph, TensorSpec
from autopar.capture.place import materialize
from autopar.capture.source import UserModel
from autopar.errors import FileError, UsageError
from autopar.formats.plan import Plan, SharedParameter
from autopar.formats.program import Program
from autopar.runtime.batch_norm import normalizes, rewritable
from autopar.runtime.clock import clock_of
from autopar.runtime.compiled import compiled, warm_up
from autopar.runtime.copies import copies_of
from autopar.runtime.data import ShareLoader
from autopar.runtime.deferred import DeferredBatchNorms
from autopar.runtime.execute import Executor, StepRecord
from autopar.runtime.gradients import Reducer
from autopar.runtime.groups import replica_ranks, synced_groups
from autopar.runtime.loss import BroughtLossTally, LossTally
from autopar.runtime.mailbox import Mailbox
from autopar.runtime.precision import autocast_of, crossing_specs
from autopar.runtime.prefetch import Prefetch
from autopar.runtime.scale import LossScale
from autopar.runtime.scope import check_compiling
from autopar.runtime.seeds import seed_generator
from autopar.runtime.settings import TrainSettings
from autopar.runtime.stage import Stage
from autopar.runtime.synced import SyncedBatchNorm, synchronize
from autopar.runtime.transport import Transport
from autopar.runtime.update import Update
from autopar.schedules.expand import stages_of

if TYPE_CHECKING:
    # What shards takes most of a second to import.
    from autopar.runtime.sharded import ShardedStage

__all__ = ["DEFAULTS", "Job"]

DEFAULTS = TrainSettings()


class Job:
    """One rank: its stage, optimizer and data, stepped together with the other ranks' jobs."""

    update_of: ClassVar[type[Update]] = Update

    def __init__(
        self,
        plan: Plan,
        program: Program,
        rank: int,
        graph: LayerGraph,
        model: UserModel,
        weights: Callable[[Iterable[str]], Mapping[str, torch.Tensor]],
        transport: Transport,
        device: torch.device,
        note: Callable[[int, int], None],
        settings: TrainSettings = DEFAULTS,
    ) -> None:
        """Build the rank's stage, holding only its own parameters.

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
        """
        self.plan, self.actions, self.rank, self._device = plan, program.ranks[rank], rank, device
        self._specs = {tensor.name: tensor for tensor in graph.tensors}
        indices, self.replica = stages_of(plan, rank)
        layers = {index: [graph.layer(name) for name in plan.stages[index].layers] for index in indices}
        self._place(layers, weights, device)
        layers = self._normalizing(graph, layers, transport, settings)
        if settings.compile:
            check_compiling(plan, program)
            layers = compiled(layers)
        crossing = crossing_specs(plan, graph)
        sharding = [index for index in indices if plan.stages[index].shard != "none"]
        self._mesh = transport.mesh(replica_ranks(plan, indices)) if sharding else None
        self.stages = {
            index: self._stage(index, each, crossing, graph, device, settings.cpu_offload)
            for index, each in layers.items()
        }
        clock = clock_of(device)
        self._reducer = self._reducing(layers, transport, clock.mark)
        scale = LossScale() if plan.precision == "fp16" else None
        self._update = self._updating(model, graph, transport, settings, scale)
        self.samples = 0
        """In the dataset; 0 where this rank does not read it."""
        self._copies = copies_of(device)
        self._prefetch: Prefetch | None = None
        self._next: int | None = None
        """The step after this one, if there is one."""
        self._load = self._loading(model, graph, device, settings)
        specs = {tensor.name: tensor for tensor in crossing}
        self._mailbox = Mailbox(plan, program, rank, specs, transport, device)
        self._executor = Executor(
            plan,
            self.actions,
            rank,
            self.stages,
            self._mailbox,
            self._reducer,
            self._tally(),
            self._complete,
            scale,
            clock,
            device,
            note,
        )

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the model's inputs that layers of this rank read."""
        return tuple(dict.fromkeys(name for stage in self.stages.values() for name in stage.inputs))

    def step(self, step: int, *, more: bool = False) -> StepRecord:
        """Train one mini-batch; steps count from 0 and choose their samples.

        If there are to be ``more``, a GPU's next mini-batch is loaded while it computes.
        """
        self._next = step + 1 if more else None
        return self.train(step, self._load(step))

    def train(self, step: int, inputs: list[dict[str, torch.Tensor]]) -> StepRecord:
        """Train one mini-batch, given this rank's rows of the model's inputs in every micro-batch."""
        return self._executor.run(step, inputs)

    def warm_up(self) -> list[str]:
        """Compile the layers, before the first step; return warnings of those that do not compile."""
        placed, autocast = self.plan.stages[min(self.stages)], autocast_of(self.plan.precision, self._device)
        rows, warnings = placed.rows[self.replica], list[str]()
        for stage in self.stages.values():
            specs = [*stage.received, *(self._specs[name] for name in stage.inputs)]
            values = {
                spec.name: torch.zeros(spec.shape(rows), dtype=spec.dtype, device=self._device).requires_grad_(
                    spec.gradient
                )
                for spec in specs
            }
            warnings += warm_up(stage.layers, rows, values, lambda layer: seed_generator(self._device, 0), autocast)
        return warnings

    def finish(self) -> None:
        """Wait until everything that was sent has arrived, and all work of the device is done."""
        self._mailbox.finish()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def state(self) -> dict[str, torch.Tensor]:
        """Return this rank's parameters and buffers by the model's own names."""
        return {**self.parameters, **self.buffers}

    def whole(self, name: str) -> torch.Tensor:
        """Return all of a parameter or buffer; replicas that divide parameters ask for it together."""
        tensor = self.state()[name].detach()
        if self._mesh is None:
            return tensor
        from autopar.runtime.sharded import whole

        return whole(tensor)

    def _place(
        self,
        stages: Mapping[int, list[Layer]],
        weights: Callable[[Iterable[str]], Mapping[str, torch.Tensor]],
        device: torch.device,
    ) -> None:
        layers = [layer for each in stages.values() for layer in each]
        trainable: dict[str, bool] = {}
        wanted: dict[str, None] = {}
        for layer in layers:
            for attribute, name in layer.parameters.items():
                trainable[name] = layer.parameter(attribute).requires_grad
            wanted.update(dict.fromkeys([*layer.parameters.values(), *layer.buffers.values()]))
        values = weights(wanted)
        divided = self._divided(stages)
        missing = [name for name in wanted if name not in values]
        if missing:
            raise FileError(f"the initial weights lack {missing[0]!r} and {len(missing) - 1} more; check --weights")
        self.parameters = {
            # What is divided need not fit the device as a whole.
            name: torch.nn.Parameter(values[name].to("cpu" if name in divided else device), requires_grad=needed)
            for name, needed in trainable.items()
        }
        self.buffers = {name: values[name].to(device) for name in wanted if name not in trainable}
        for layer in layers:
            materialize(layer, {**self.parameters, **self.buffers}, device)

    def _divided(self, stages: Mapping[int, list[Layer]]) -> set[str]:
        """Return the names of the parameters of which every replica is to keep a part."""
        sharded = [layer for index, each in stages.items() if self.plan.stages[index].shard != "none" for layer in each]
        names = {name for layer in sharded for name in layer.parameters.values()}
        return names - {tied.parameter for tied in self.plan.tied}

    def _stage(
        self,
        index: int,
        layers: list[Layer],
        crossing: list[TensorSpec],
        graph: LayerGraph,
        device: torch.device,
        offload: bool,
    ) -> Stage:
        placed = self.plan.stages[index]
        autocast = autocast_of(self.plan.precision, device)
        if self._mesh is None or placed.shard == "none":
            return Stage(layers, crossing, graph.inputs, graph.outputs, autocast, placed.recompute)
        from autopar.runtime.sharded import ShardedStage, Sharding

        divided = self._divided({index: layers})
        apart = frozenset(parameter for name, parameter in self.parameters.items() if name not in divided)
        sharding = Sharding(placed.shard, self._mesh, apart, offload, placed.division == "round-robin")
        order = list(self.parameters)
        for name in divided:
            # As soon as a layer's are divided, nothing else may hold them as a whole.
            del self.parameters[name]
        stage = ShardedStage(sharding, layers, crossing, graph.inputs, graph.outputs, autocast, placed.recompute)
        held = {name: layer.parameter(attribute) for layer in layers for attribute, name in layer.parameters.items()}
        self.parameters = {name: held[name] if name in held else self.parameters[name] for name in order}
        return stage

    def _stepped(self, trained: list[torch.nn.Parameter]) -> tuple[list[torch.nn.Parameter], Callable[[], None]]:
        """Return what the optimizer steps, and what gives it the gradients.

        Beside divided parameters all are of their kind, or torch's kernels for many at once would refuse them.
        """
        mesh = self._mesh
        if mesh is None:
            return trained, lambda: None
        from torch.distributed.tensor import DTensor

        from autopar.runtime.sharded import replicated

        whole = [parameter for parameter in trained if not isinstance(parameter, DTensor)]
        twins = {parameter: torch.nn.Parameter(replicated(parameter.detach(), mesh)) for parameter in whole}

        def lend() -> None:
            for parameter, twin in twins.items():
                twin.grad = None if parameter.grad is None else replicated(parameter.grad, mesh)

        return [twins.get(parameter, parameter) for parameter in trained], lend

    def _normalizing(
        self, graph: LayerGraph, layers: dict[int, list[Layer]], transport: Transport, settings: TrainSettings
    ) -> dict[int, list[Layer]]:
        """Return the rank's layers by stage, with batch normalisation as it was asked for.

        Raises:
            UsageError: the model has none.
        """
        self._deferred: DeferredBatchNorms | None = None
        asked = [f"--{name}-batch-norm" for name in ("deferred", "sync") if getattr(settings, f"{name}_batch_norm")]
        if not asked:
            return layers
        if not any(map(normalizes, graph.layers)):
            raise UsageError(f"{asked[0]}: the model has no batch normalisation; leave the option out")
        layers = {index: [rewritable(layer) for layer in each] for index, each in layers.items()}
        mine, ranks = [layer for each in layers.values() for layer in each], replica_ranks(self.plan, layers)
        if settings.deferred_batch_norm:
            self._deferred = DeferredBatchNorms(mine, transport, ranks, self.rank)
        elif ranks in synced_groups(self.plan):
            synchronize(mine, SyncedBatchNorm(transport, ranks, self.rank))
        return layers

    def _complete(self, record: StepRecord) -> None:
        """End a step: losses and gradients are there."""
        if self._deferred is not None:
            self._deferred.settle()
        self._update(record)

    def _shared(self) -> list[tuple[int, SharedParameter]]:
        """Return the parameters of this rank's stages that other ranks' stages share, by plan index."""
        return [
            (i, tied)
            for i, tied in enumerate(self.plan.tied)
            if self.stages.keys() & set(tied.stages) and len(replica_ranks(self.plan, tied.stages)) > 1
        ]

    def _reducing(self, layers: Mapping[int, list[Layer]], transport: Transport, mark: Callable[[], object]) -> Reducer:
        shards = (index for index in self.stages if self.plan.stages[index].shard != "none")
        sharded = {index: cast("ShardedStage", self.stages[index]) for index in shards}
        others = layers.keys() - sharded.keys()
        shared = {
            i: (self.parameters[tied.parameter], replica_ranks(self.plan, tied.stages)) for i, tied in self._shared()
        }
        return Reducer(
            {index: [list(layer.module.parameters()) for layer in layers[index]] for index in sorted(others)},
            sharded,
            replica_ranks(self.plan, self.stages),
            shared,
            transport,
            mark,
            self.rank,
        )

    def _loading(
        self, model: UserModel, graph: LayerGraph, device: torch.device, settings: TrainSettings
    ) -> Callable[[int], list[dict[str, torch.Tensor]]]:
        """Return what gives the share's model inputs of every micro-batch of a step."""
        specs = [graph.tensor(name) for name in self.inputs]
        first = device if self._copies is None else torch.device("cpu")
        loader = ShareLoader(model, self.plan, self.rank, specs, first, settings.last)
        self.samples = loader.samples
        if self._copies is None:
            return loader.load
        self._prefetch = Prefetch(loader.load, self._copies)
        return self._prefetch.load

    def _look_ahead(self) -> None:
        if self._prefetch is not None and self._next is not None:
            self._prefetch.look_ahead(self._next)

    def _updating(
        self,
        model: UserModel,
        graph: LayerGraph,
        transport: Transport,
        settings: TrainSettings,
        scale: LossScale | None,
    ) -> Callable[[StepRecord], None]:
        """Return what completes the gradients and steps the optimizer."""
        trained = [parameter for parameter in self.parameters.values() if parameter.requires_grad]
        stepped, lend = self._stepped(trained)
        everyone = tuple(range(len(self.plan.devices)))
        counts, clip_norm = graph.loss == "sum_count", settings.clip_norm
        update = self.update_of(
            stepped,
            model,
            self._reducer,
            transport,
            everyone,
            counts=counts,
            clip_norm=clip_norm,
            scale=scale,
        )
        if update.optimizer is not None:
            update.optimizer.register_step_pre_hook(lambda *_: lend())
        return update

    def _tally(self) -> LossTally:
        rows, batch = self.plan.stages[min(self.stages)].rows[self.replica], self.plan.batch
        if self._copies is None:
            return LossTally(rows, batch)
        return BroughtLossTally(rows, batch, self._copies, self._look_ahead)
