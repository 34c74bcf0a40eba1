"""Forwards: a rank's part of a program that evaluates, performed once for every round of micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from autopar.capture.graph import TensorSpec
from autopar.errors import AutoparError, TrainingError
from autopar.formats.plan import Plan
from autopar.formats.program import FORWARD, RECEIVE, SEND, Action
from autopar.runtime.mailbox import Mailbox
from autopar.runtime.retire import receives_ahead
from autopar.runtime.seeds import seed_generator, seed_of
from autopar.runtime.stage import Stage
from autopar.runtime.transport import Transport
from autopar.schedules.check import check
from autopar.schedules.expand import stages_of
from autopar.schedules.forwards import FORWARDS, expand_forwards

__all__ = ["Forwards"]

Results = dict[int, list[torch.Tensor]]
"""Micro-batch -> what the last layer gave."""


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
        self._actions, self._due = list(program.ranks[rank]), receives_ahead(program, rank)
        self._mailbox = Mailbox(plan, program, rank, dict(specs), transport, device)
        (first, *_), replica = stages_of(plan, rank)
        self.rows = plan.stages[first].rows[replica]
        """Of every micro-batch that the rank takes part in."""
        self._share = replica if plan.stages[first].division == "split" else 0
        self._producer = {tensor.name: tensor.producer for tensor in plan.tensors}

    def run(self, step: int, inputs: Sequence[Mapping[str, torch.Tensor]]) -> Results:
        """Perform one round, of a step that random layers are seeded with.

        Raises:
            TrainingError: an action failed; names it.
        """
        self._mailbox.begin_step()
        results: Results = {}
        outgoing: dict[str, torch.Tensor] = {}
        for position, action in enumerate(self._actions):
            try:
                if position in self._due:
                    self._mailbox.post(position)
                if action.kind == FORWARD:
                    outgoing = self._forward(step, action, inputs[action.micro_batch], results)
                elif action.kind == RECEIVE:
                    self._mailbox.receive(position)
                else:
                    # The sends of a forward follow it at once.
                    self._mailbox.send(position, outgoing)
            except Exception as error:
                raise self._placed(error, action) from error
        return results

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""
        self._mailbox.finish()

    def _forward(
        self, step: int, action: Action, inputs: Mapping[str, torch.Tensor], results: Results
    ) -> dict[str, torch.Tensor]:
        stage, micro_batch = self._stages[action.stage], action.micro_batch
        received = {
            spec.name: self._mailbox.take(RECEIVE, action.stage, micro_batch, self._producer[spec.name], spec.name)
            for spec in stage.received
        }

        def seed(layer: str) -> None:
            seed_generator(self._device, seed_of(self.plan.seed, layer, step, micro_batch, self._share))

        with torch.no_grad():
            outputs, _ = stage.forward(self.rows, {**inputs, **received}, seed)
        if stage.loss:
            results[micro_batch] = [outputs[name] for name in stage.loss]
        sent = stage.sendable(self.rows, outputs)
        self._mailbox.pass_on(SEND, action.stage, micro_batch, sent)
        return sent

    def _placed(self, error: Exception, action: Action) -> AutoparError:
        """Say of an error where it happened."""
        place = f"rank {self._rank} (stage {action.stage}, evaluation, {action})"
        if isinstance(error, AutoparError):
            return type(error)(f"{place}: {error}")
        return TrainingError(f"{place}: {type(error).__name__}: {error}")
