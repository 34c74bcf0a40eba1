"""Executor: interprets a rank's program, the way the simulator does, but for real."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from autopar.errors import AutoparError, TrainingError
from autopar.formats.plan import Plan
from autopar.formats.program import (
    BACKWARD,
    FORWARD,
    RECEIVE,
    RECEIVE_GRADIENT,
    REDUCE,
    REDUCE_TIED,
    SEND,
    SEND_GRADIENT,
    UPDATE,
    Action,
    RankProgram,
)
from autopar.runtime.clock import Clock
from autopar.runtime.gradients import Reducer
from autopar.runtime.loss import LossTally
from autopar.runtime.mailbox import Mailbox
from autopar.runtime.seeds import seed_generator, seed_of
from autopar.runtime.stage import Stage
from autopar.schedules.expand import rank_of

__all__ = ["Executor", "StepRecord"]


@dataclass
class StepRecord:
    """What one step of one rank gave."""

    loss: float = 0.0
    """This rank's part of the mini-batch's mean loss, or the plain sum that goes with ``count``."""
    count: float = 0.0
    """What the loss counted, where it returns a sum and a count."""
    times_s: list[tuple[float, float]] = field(default_factory=list)
    """Start and end of every action of the program."""


@dataclass
class _InFlight:
    received: dict[str, torch.Tensor]
    roots: list[torch.Tensor]
    """Tensors whose gradients start the backward."""
    names: list[str]


class Executor:
    """Runs the steps of one rank."""

    def __init__(
        self,
        plan: Plan,
        actions: RankProgram,
        place: tuple[int, int],
        stage: Stage,
        mailbox: Mailbox,
        reducer: Reducer,
        tally: LossTally,
        update: Callable[[StepRecord], None],
        clock: Clock,
        device: torch.device,
        note: Callable[[int, int], None],
    ) -> None:
        """Prepare to run.

        Args:
            plan: what is carried out.
            actions: this rank's program.
            place: (stage, replica) of this rank.
            stage: its layers.
            mailbox: its messages.
            reducer: its gradients.
            tally: its losses.
            update: steps the optimizer, gradients being complete.
            clock: times the actions.
            device: where tensors live.
            note: called with (step, position in the program) before every action.
        """
        self._plan, self._actions = plan, list(actions)
        self._stage_index, self._replica = place
        self._stage, self._mailbox, self._reducer = stage, mailbox, reducer
        self._tally = tally
        self._update, self._clock, self._device, self._note = update, clock, device, note
        self._rank = rank_of(plan, *place)
        stage_plan = plan.stages[self._stage_index]
        self._rows = stage_plan.rows[self._replica]
        self._share = self._replica if stage_plan.division == "split" else 0
        self._last = max(i for i, action in enumerate(self._actions) if action.kind == BACKWARD)
        self._producer = {tensor.name: tensor.producer for tensor in plan.tensors}
        self._consumers = {tensor.name: tensor.consumers for tensor in plan.tensors}
        self._flight: dict[int, _InFlight] = {}
        self._outgoing: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
        self._inputs: list[dict[str, torch.Tensor]] = []
        self._step, self._record = 0, StepRecord()

    def run(self, step: int, inputs: list[dict[str, torch.Tensor]]) -> StepRecord:
        """Perform one step.

        Args:
            step: counts from 0; random layers are seeded with it.
            inputs: the share's model inputs of every micro-batch.

        Raises:
            TrainingError: an action failed; names it.
        """
        self._step, self._inputs, self._record = step, inputs, StepRecord()
        self._tally.begin_step()
        self._clock.start()
        self._reducer.begin_step()
        self._mailbox.begin_step()
        marks: list[object] = []
        for position, action in enumerate(self._actions):
            self._note(step, position)
            self._mailbox.post(position)
            marks.append(self._clock.mark())
            try:
                if action.kind == REDUCE:
                    # It began while the last backward ran.
                    marks[-1] = self._reducer.finish() or marks[-1]
                else:
                    self._perform(position, action)
            except Exception as error:
                raise self._placed(error, action) from error
            marks.append(self._clock.mark())
        times = self._clock.resolve(marks)
        self._record.times_s = list(zip(times[::2], times[1::2], strict=True))
        return self._record

    def _placed(self, error: Exception, action: Action) -> AutoparError:
        """Say of an error where it happened."""
        place = f"rank {self._rank} (stage {self._stage_index}, step {self._step}, {action})"
        if isinstance(error, AutoparError):
            return type(error)(f"{place}: {error}")
        if isinstance(error, torch.OutOfMemoryError):
            return TrainingError(f"{place}: out of memory; plan with a smaller --memory")
        return TrainingError(f"{place}: {type(error).__name__}: {error}")

    def _perform(self, position: int, action: Action) -> None:
        if action.kind == FORWARD:
            self._forward(action.micro_batch)
        elif action.kind == BACKWARD:
            if position == self._last:
                self._reducer.begin_last_backward()
            self._backward(action.micro_batch)
        elif action.kind in (RECEIVE, RECEIVE_GRADIENT):
            self._mailbox.receive(position)
        elif action.kind in (SEND, SEND_GRADIENT):
            self._mailbox.send(position, self._outgoing[action.kind, action.micro_batch])
            self._forget(position, action)
        elif action.kind == REDUCE_TIED:
            self._reducer.reduce_shared(action.micro_batch)
        elif action.kind == UPDATE:
            self._close()

    def _forward(self, micro_batch: int) -> None:
        received = {}
        for spec in self._stage.received:
            value = self._mailbox.take(RECEIVE, micro_batch, self._producer[spec.name], spec.name)
            received[spec.name] = value.requires_grad_(spec.gradient)

        def seed(layer: str) -> None:
            number = seed_of(self._plan.seed, layer, self._step, micro_batch, self._share)
            seed_generator(self._device, number)

        outputs = self._stage.forward(self._rows, {**self._inputs[micro_batch], **received}, seed)
        # The receiver expects the planned type; under autocast, a device may have made another than was profiled.
        sent = {spec.name: outputs[spec.name].to(spec.dtype) for spec in self._stage.sent}
        if sent:
            self._outgoing[SEND, micro_batch] = sent
        names = [spec.name for spec in self._stage.sent if spec.gradient and sent[spec.name].requires_grad]
        roots = [sent[name] for name in names]
        if self._stage.loss:
            roots.append(outputs[self._stage.loss[0]])
            self._tally.add([outputs[name] for name in self._stage.loss])
        self._flight[micro_batch] = _InFlight(received, roots, names)

    def _backward(self, micro_batch: int) -> None:
        flight = self._flight.pop(micro_batch)
        gradients = [self._joined_gradient(name, micro_batch) for name in flight.names]
        if self._stage.loss:
            # A mean over the share counts for as much as the share's part of the mini-batch.
            weight = self._rows / self._plan.batch if len(self._stage.loss) == 1 else 1.0
            gradients.append(torch.full_like(flight.roots[-1], weight))
        if flight.roots:
            torch.autograd.backward(flight.roots, gradients)
        outgoing = {}
        for spec in self._stage.received:
            if spec.gradient:
                leaf = flight.received[spec.name]
                outgoing[spec.name] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        if outgoing:
            self._outgoing[SEND_GRADIENT, micro_batch] = outgoing

    def _joined_gradient(self, name: str, micro_batch: int) -> torch.Tensor:
        """Return a sent tensor's gradient: the sum of what its consumer stages give back, in their order."""
        stages = self._consumers[name]
        total = self._mailbox.take(RECEIVE_GRADIENT, micro_batch, stages[0], name)
        for stage in stages[1:]:
            total = total + self._mailbox.take(RECEIVE_GRADIENT, micro_batch, stage, name)
        return total

    def _forget(self, position: int, action: Action) -> None:
        """Let go of a tensor after its last send."""
        following = self._actions[position + 1] if position + 1 < len(self._actions) else None
        if following is None or (following.kind, following.micro_batch) != (action.kind, action.micro_batch):
            del self._outgoing[action.kind, action.micro_batch]

    def _close(self) -> None:
        """Settle the loss, and step the optimizer unless the loss is not a number."""
        self._record.loss, self._record.count = self._tally.settle()
        self._update(self._record)
