"""Job: one rank's part of a training run, built from a plan, a captured model and its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar

import torch

from autopar.capture.graph import Layer, LayerGraph
from autopar.capture.place import materialize
from autopar.capture.source import UserModel
from autopar.errors import FileError
from autopar.formats.plan import Plan, SharedParameter
from autopar.formats.program import Program
from autopar.runtime.clock import clock_of
from autopar.runtime.data import ShareLoader
from autopar.runtime.execute import Executor, StepRecord
from autopar.runtime.gradients import Reducer
from autopar.runtime.loss import LossTally
from autopar.runtime.mailbox import Mailbox
from autopar.runtime.precision import autocast_of, crossing_specs
from autopar.runtime.scale import LossScale
from autopar.runtime.settings import TrainSettings
from autopar.runtime.stage import Stage
from autopar.runtime.transport import Transport
from autopar.runtime.update import Update
from autopar.schedules.expand import rank_of, stages_of

__all__ = ["DEFAULTS", "Job", "reduction_groups"]

DEFAULTS = TrainSettings()


def reduction_groups(plan: Plan) -> list[tuple[int, ...]]:
    """Return every set of ranks that reduce together, in an order that all ranks share; the last is all ranks."""
    groups = [_ranks(plan, [index]) for index, stage in enumerate(plan.stages)]
    groups += [_ranks(plan, tied.stages) for tied in plan.tied]
    groups = [group for group in groups if len(group) > 1]
    return list(dict.fromkeys([*groups, tuple(range(len(plan.devices)))]))


def _ranks(plan: Plan, stages: Iterable[int]) -> tuple[int, ...]:
    """Return the ranks of stages, each once."""
    return tuple(dict.fromkeys(rank_of(plan, stage, i) for stage in stages for i in range(plan.stages[stage].replicas)))


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
        self.plan, self.actions, self.rank = plan, program.ranks[rank], rank
        indices, self.replica = stages_of(plan, rank)
        layers = {index: [graph.layer(name) for name in plan.stages[index].layers] for index in indices}
        self._place([layer for each in layers.values() for layer in each], weights, device)
        crossing = crossing_specs(plan, graph)
        autocast = autocast_of(plan.precision, device)
        self.stages = {
            index: Stage(each, crossing, graph.inputs, graph.outputs, autocast, plan.stages[index].recompute)
            for index, each in layers.items()
        }
        clock = clock_of(device)
        self._reducer = Reducer(
            {index: [list(layer.module.parameters()) for layer in each] for index, each in layers.items()},
            _ranks(plan, indices),
            {i: (self.parameters[tied.parameter], _ranks(plan, tied.stages)) for i, tied in self._shared()},
            transport,
            clock.mark,
            rank,
        )
        scale = LossScale() if plan.precision == "fp16" else None
        self._update = self._updating(model, graph, transport, device, settings, scale)
        self._load = self._loading(model, graph, device)
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
            self._update,
            scale,
            clock,
            device,
            note,
        )

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the model's inputs that layers of this rank read."""
        return tuple(dict.fromkeys(name for stage in self.stages.values() for name in stage.inputs))

    def step(self, step: int) -> StepRecord:
        """Train one mini-batch; steps count from 0 and choose their samples."""
        return self._executor.run(step, self._load(step))

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""
        self._mailbox.finish()

    def state(self) -> dict[str, torch.Tensor]:
        """Return this rank's parameters and buffers by the model's own names."""
        return {**self.parameters, **self.buffers}

    def _place(
        self, layers: list[Layer], weights: Callable[[Iterable[str]], Mapping[str, torch.Tensor]], device: torch.device
    ) -> None:
        trainable: dict[str, bool] = {}
        wanted: dict[str, None] = {}
        for layer in layers:
            for attribute, name in layer.parameters.items():
                trainable[name] = layer.parameter(attribute).requires_grad
            wanted.update(dict.fromkeys([*layer.parameters.values(), *layer.buffers.values()]))
        values = weights(wanted)
        missing = [name for name in wanted if name not in values]
        if missing:
            raise FileError(f"the initial weights lack {missing[0]!r} and {len(missing) - 1} more; check --weights")
        self.parameters = {
            name: torch.nn.Parameter(values[name].to(device), requires_grad=needed)
            for name, needed in trainable.items()
        }
        self.buffers = {name: values[name].to(device) for name in wanted if name not in trainable}
        for layer in layers:
            materialize(layer, {**self.parameters, **self.buffers}, device)

    def _shared(self) -> list[tuple[int, SharedParameter]]:
        """Return the parameters of this rank's stages that other ranks' stages share, by plan index."""
        return [
            (i, tied)
            for i, tied in enumerate(self.plan.tied)
            if self.stages.keys() & set(tied.stages) and len(_ranks(self.plan, tied.stages)) > 1
        ]

    def _loading(
        self, model: UserModel, graph: LayerGraph, device: torch.device
    ) -> Callable[[int], list[dict[str, torch.Tensor]]]:
        """Return what gives the share's model inputs of every micro-batch of a step."""
        return ShareLoader(model, self.plan, self.rank, self.inputs, device).load

    def _updating(
        self,
        model: UserModel,
        graph: LayerGraph,
        transport: Transport,
        device: torch.device,
        settings: TrainSettings,
        scale: LossScale | None,
    ) -> Callable[[StepRecord], None]:
        """Return what completes the gradients and steps the optimizer."""
        trained = [parameter for parameter in self.parameters.values() if parameter.requires_grad]
        everyone = tuple(range(len(self.plan.devices)))
        counts, clip_norm = graph.loss == "sum_count", settings.clip_norm
        return self.update_of(
            trained,
            model,
            self._reducer,
            transport,
            everyone,
            device,
            counts=counts,
            clip_norm=clip_norm,
            scale=scale,
        )

    def _tally(self) -> LossTally:
        return LossTally(self.plan.stages[min(self.stages)].rows[self.replica], self.plan.batch)
