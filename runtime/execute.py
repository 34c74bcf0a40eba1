"""Executor: performs the actions of a rank's program, one after another, as the simulator does with predicted times.

In come the program, the rank's stages, its mailbox, reducer and update; out comes a record of every step. What actions
tell of each other (which backward is the last, which receive leaves time to recompute) is found once, before the first
step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from autopar.errors import AutoparError, TrainingError
from autopar.formats.plan import Plan
from autopar.formats.program import (
    BACKWARD,
    BACKWARDS,
    BEGIN_SUM,
    CORRECT,
    FORWARD,
    INPUT_BACKWARD,
    PREDICT,
    PULL,
    PUSH,
    RECEIVES,
    REDUCE,
    REDUCE_TIED,
    SEND,
    SEND_GRADIENT,
    SENDS,
    UPDATE,
    WEIGHT_BACKWARD,
    Action,
    RankProgram,
)
from autopar.ranks.failure import NonFiniteBesideError, NonFiniteError, PeerLostError
from autopar.runtime.clocks import Clock
from autopar.runtime.device import value_of
from autopar.runtime.gradients import Reducer
from autopar.runtime.interpret import interpret, located_error
from autopar.runtime.loss import LossScale, LossTally, LossTerms, StepRecord
from autopar.runtime.messages.mailbox import Mailbox
from autopar.runtime.stage.layers import seed_generator, seed_of
from autopar.runtime.stage.stage import InFlightMicroBatch, Stage
from autopar.runtime.stage.versions import NewestWeights, SavedWeights
from autopar.runtime.update import Update
from autopar.schedules.repetition import Repetition, last_backwards


@dataclass(frozen=True)
class _ProgramAnalysis:
    """Positions of actions in the program, and what actions there are."""

    last_backwards: Collection[int]
    """Positions of mini-batches' last backwards, or halves of one."""
    split_backwards: Collection[tuple[int, int]]
    """(stage, micro-batch) of every backward that comes in halves."""
    forwards_first: bool
    """Whether the first computation is a forward."""
    early: Mapping[int, Action]
    """Position of a receive -> the backward behind it, whose micro-batch is recomputed while the rank waits there."""
    sends: Collection[int]
    """Positions of the sends."""
    last_send: Mapping[tuple[str, int, int], int]
    """(kind, stage, micro-batch) of sends to one or several peers -> position of the last one."""
    remote_messages: Collection[tuple[str, int]]
    """(kind, stage) of the messages that go between ranks."""


def _analyze_program(actions: Sequence[Action], recomputing: Collection[int], plan: Plan) -> _ProgramAnalysis:
    """Return what the actions of a rank tell.

    Args:
        actions: of a repetition.
        recomputing: the stages that recompute layers.
        plan: that they carry out.
    """
    sends = {position: action for position, action in enumerate(actions) if action.kind in SENDS}
    return _ProgramAnalysis(
        last_backwards=last_backwards(actions, plan),
        split_backwards={(action.stage, action.micro_batch) for action in actions if action.kind == INPUT_BACKWARD},
        forwards_first=next((each.kind for each in actions if each.kind in (FORWARD, *BACKWARDS)), "") == FORWARD,
        early={
            position: action
            for position, action in _receives_before_backward(actions).items()
            if action.stage in recomputing
        },
        sends=sends.keys(),
        last_send={action[:3]: position for position, action in sends.items()},
        remote_messages={(action.kind, action.stage) for action in actions if action.peer >= 0},
    )


def _receives_before_backward(actions: Sequence[Action]) -> dict[int, Action]:
    """Return backwards by the positions of receives that nothing but they follow.

    While a rank waits there, it may as well recompute; earlier, it would hold more than it does in the backward.
    """
    found: dict[int, Action] = {}
    following: Action | None = None
    for position in reversed(range(len(actions))):
        action = actions[position]
        if action.kind in RECEIVES:
            if following and following.kind in (BACKWARD, INPUT_BACKWARD):
                found[position] = following
        elif action.kind not in SENDS:
            following = action
    return found


@dataclass(frozen=True)
class ExecutorSettings:
    """Where an executor runs, and what."""

    plan: Plan
    """What is carried out."""
    actions: RankProgram
    """This rank's program."""
    rank: int
    """Which rank this is."""
    device: torch.device
    """Where tensors live."""
    clock: Clock
    """Times the actions."""
    note: Callable[[int, int], None]
    """Called with (step, position in the program) before every action that may take a while."""
    scale: LossScale | None
    """What losses are multiplied by before their backward."""
    notes_sends: bool = False
    """Whether sends are noted, too, where they take no while."""


class Executor:
    """Runs the steps of one rank."""

    def __init__(
        self,
        settings: ExecutorSettings,
        stages: Mapping[int, Stage],
        mailbox: Mailbox,
        reducer: Reducer,
        tally: LossTally,
        update: Update,
        versions: NewestWeights,
        terms: LossTerms | None = None,
    ) -> None:
        """Prepare to run.

        Args:
            settings: what is run, and where.
            stages: the rank's, by index.
            mailbox: its messages.
            reducer: its gradients.
            tally: its losses.
            update: steps the optimizer.
            versions: of its weights.
            terms: of a loss that has several; None of others, and on ranks that make none.
        """
        self._terms = terms
        plan, device = settings.plan, settings.device
        self._settings, self.actions, self.mark = settings, list(settings.actions), settings.clock.mark
        self._stages, self._mailbox, self._reducer = stages, mailbox, reducer
        self._tally, self._update, self._versions, self._clock = tally, update, versions, settings.clock
        self._own = own = plan.ownership.ranks[settings.rank]
        crossing = plan.tensors_of(own.stage)
        self._producer = {tensor.name: tensor.producer for tensor in crossing}
        self._consumers = {tensor.name: tensor.consumers for tensor in crossing}
        self._tells_losses = own.part == 0
        """Whether its losses count: all ranks of a team have them."""
        recomputing = {index for index in own.stages if plan.stages[index].recompute}
        self._analysis = _analyze_program(self.actions, recomputing, plan)
        # On gloo, a rank cannot hang in a send, and notes nothing of it.
        passing = device.type == "cpu" and not settings.notes_sends
        self._passing = self._analysis.sends if passing else frozenset()
        self._flights: dict[tuple[int, int, int], tuple[InFlightMicroBatch, SavedWeights]] = {}
        """By stage, mini-batch, and micro-batch within it."""
        self._outgoing: dict[tuple[str, int, int], Mapping[str, torch.Tensor | None]] = {}
        self._inputs: Mapping[int, list[dict[str, torch.Tensor]]] = {}
        self._began: dict[int, object] = {}
        self._repetition = Repetition(0, plan.micro_batches, 1)
        self._records: dict[int, StepRecord] = {}
        """By mini-batch, of those that have begun and not ended."""
        self._sums: dict[tuple[int, int, int], list[torch.Tensor]] = {}
        """By mini-batch, micro-batch and stage, of what it gave: they are looked at where something is not finite."""
        self._ahead = [self._repetition.step_of(each) for each in self.actions]
        """By position, how many mini-batches ahead of the repetition's own its action is."""
        self._reach = range(min(self._ahead, default=0), max(self._ahead, default=0) + 1)
        self.acts = [self._bind(position, action) for position, action in enumerate(self.actions)]

    def run(self, repetition: Repetition, inputs: Mapping[int, list[dict[str, torch.Tensor]]]) -> StepRecord:
        """Perform one step; without flushes, one repetition, whose record is that of the first that ends in it.

        Args:
            repetition: its number, and which mini-batches there are; random layers are seeded with theirs.
            inputs: by mini-batch, the share's model inputs of every micro-batch, of all stages of the rank.

        Raises:
            TrainingError: an action failed; names it.
        """
        step = repetition.number
        self._repetition, self._inputs = repetition, inputs
        self._tally.begin_step(step)
        if self._terms is not None:
            self._terms.begin_step(step)
            # Replicas that take turns count together, also one that has no micro-batch.
            for mini_batch in inputs:
                self._terms.weights(mini_batch, inputs[mini_batch])
        self._clock.start()
        if self._analysis.forwards_first:
            # What backwards clear would be held until then.
            self._reducer.clear_ended()
        self._mailbox.begin_step(repetition)
        self._began.clear()
        self._sums = {key: sums for key, sums in self._sums.items() if key[0] >= step + self._reach.start}
        marks = interpret(self, repetition)
        ended = [self._record_of(each) for each in repetition.ending] or [StepRecord(step)]
        for each in ended:
            self._records.pop(each.step, None)
        record = ended[0]
        record.others = tuple(ended[1:])
        record.pending_times = partial(self._times_s, dict(self._began), marks)
        if not self._clock.lags:
            _ = record.times_s
        return record

    def absent(self, repetition: Repetition) -> frozenset[int]:
        """See :class:`.interpret.Machine`: while a pipeline fills or drains, some actions have no micro-batch."""
        return frozenset() if repetition.is_full(self._reach) else repetition.absent(self.actions)

    def post(self, position: int) -> None:
        """See :class:`.interpret.Machine`."""
        if position in self._mailbox.due:
            self._mailbox.post(position)

    def note(self, position: int) -> None:
        """See :class:`.interpret.Machine`."""
        if position not in self._passing:
            self._settings.note(self._ahead[position] + self._repetition.number, position)

    def _times_s(self, own: Mapping[int, object], marks: list[object]) -> list[tuple[float, float]]:
        """Return when every action began and ended: it began when the one before ended, or at a mark of its ``own``."""
        began = self._clock.resolve([*own.values(), *marks])
        ends_s = began[len(own) :]
        starts_s = ends_s[:-1]
        for position, start_s in zip(own, began, strict=False):
            starts_s[position] = start_s
        return list(zip(starts_s, ends_s[1:], strict=True))

    def error_at(self, error: Exception, action: Action) -> AutoparError:
        """See :class:`.interpret.Machine`."""
        step, own = self._repetition.step_of(action), self._settings
        if action.kind in (FORWARD, *BACKWARDS):
            # Within its mini-batch.
            action = action._replace(micro_batch=self._repetition.place(action.micro_batch)[1])
        place = f"rank {own.rank} ({own.plan.place_of(action.stage)}, step {step}, {action})"
        if isinstance(error, NonFiniteError | PeerLostError):
            found = [key for key, sums in self._sums.items() if not all(map(bool, map(torch.isfinite, sums)))]
            if found:
                return self._spoilt(isinstance(error, NonFiniteError), *min(found))
        return located_error(error, place, own.plan, self.actions, own.device)

    def _spoilt(self, found: bool, step: int, micro_batch: int, stage: int) -> NonFiniteError:
        """Return what is said of a forward that gave something that is not finite; ``found``: as a loss shows."""
        own = self._settings
        place = f"rank {own.rank} ({own.plan.place_of(stage)}, step {step}, F{micro_batch}@{stage})"
        said = f"what the stage gives is not finite in micro-batch {micro_batch}; nothing was updated on this rank"
        return (NonFiniteError if found else NonFiniteBesideError)(f"{place}: {said}", stage, forward=True)

    def _bind(self, position: int, action: Action) -> Callable[[], None]:
        """Return what performs an action; a step only calls it."""
        kind, stage, micro_batch = action.kind, action.stage, action.micro_batch
        if kind == FORWARD:
            return partial(self._forward, stage, micro_batch, action.version)
        if kind in BACKWARDS:
            return self._bind_backward(position, action)
        if position in self._analysis.early:
            return partial(self._recompute_and_receive, position, self._analysis.early[position])
        if kind in RECEIVES:
            return partial(self._mailbox.receive, position)
        if kind in SENDS:
            return partial(self._send, position, action[:3], position == self._analysis.last_send[action[:3]])
        if kind == REDUCE:
            return partial(self._finish_reduction, position, action)
        if kind == REDUCE_TIED:
            return lambda: self._reducer.finish_shared(micro_batch, self._repetition.number)
        if kind == BEGIN_SUM:
            return partial(self._begin_sum, micro_batch)
        if kind == UPDATE:
            return partial(self._close, action)
        versions = self._versions
        return {PREDICT: versions.predict, CORRECT: versions.correct, PUSH: versions.push, PULL: versions.pull}[kind]

    def _bind_backward(self, position: int, action: Action) -> Callable[[], None]:
        run = self._last_backward if position in self._analysis.last_backwards else self._backward
        return partial(run, action.kind, action.stage, action.micro_batch, action.version)

    def _forward(self, index: int, micro_batch: int, distance: int) -> None:
        """Run a forward, which sees the weights so many updates before the newest."""
        stage, received = self._stages[index], {}
        for spec in stage.received_specs:
            value = self._mailbox.take(index, micro_batch, self._producer[spec.name], spec.name)
            received[spec.name] = value.requires_grad_(spec.gradient)

        split = (index, micro_batch) in self._analysis.split_backwards
        step, number = self._repetition.place(micro_batch)
        values, seed = {**self._inputs[step][number], **received}, partial(self._seed, step, number)
        with self._versions.forward(distance) as saved:
            outputs, passes = stage.forward(len(self._own.rows), values, seed, split=split)
        if self._mailbox.with_marks:
            _check_gradients(stage, outputs)
            self._versions.check_kept(node for each in passes for node in each.nodes)
        sent = stage.sendable(len(self._own.rows), outputs)
        passing = (outputs[spec.name] for spec in stage.sent_specs if spec.gradient)
        self._sums[step, number, index] = [each.detach().sum() for each in passing]
        self._hand_out(SEND, index, micro_batch, sent)
        weights = self._weights(stage, step, outputs) if stage.loss else {}
        scale = self._settings.scale
        if scale is not None:
            record = self._record_of(step)
            record.scale = scale.value
            weights = {name: weight * record.scale for name, weight in weights.items()}
        flight = InFlightMicroBatch(stage, passes, received, outputs, weights)
        self._flights[index, step, number] = flight, saved

    def _weights(self, stage: Stage, step: int, outputs: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Take note of a micro-batch's losses; return what each is multiplied by before its backward."""
        if self._terms is None:
            losses = [outputs[name] for name in stage.loss]
            self._tally.add(step, losses)
            return {stage.loss[0]: self._weight(losses)}
        weights = self._terms.weights(step, self._inputs[step])
        self._tally.add(step, [outputs[term.value] * weights[term.value] for term in self._terms.terms])
        return {term.value: weights[term.value] for term in self._terms.terms if not term.logged}

    def _weight(self, losses: Sequence[torch.Tensor]) -> float:
        """Return what a micro-batch's losses are multiplied by before their backward."""
        plan = self._settings.plan
        if len(losses) != 2:
            # A mean over the share counts for as much as the share's part of the mini-batch.
            return len(self._own.rows) / plan.batch
        if not plan.counts_apart:
            # Gradients of a sum are divided by the count of all ranks when that is known.
            return 1.0
        # Ranks of other stages add up gradients of several mini-batches, each of which has a count of its own.
        count = value_of(losses[1])
        if not count:
            raise TrainingError("loss() returned a count of 0 for the whole mini-batch; nothing was updated")
        return 1.0 / count

    def _seed(self, step: int, micro_batch: int, layer: str) -> None:
        plan = self._settings.plan
        number = seed_of(plan.seed, layer, plan.number_of(step, self._own.stage), micro_batch, self._own.place)
        seed_generator(self._settings.device, number)

    def _backward(self, kind: str, index: int, micro_batch: int, distance: int) -> None:
        """Run a backward, or a half of one; the flight ends with the second half."""
        place = index, *self._repetition.place(micro_batch)
        self._reducer.begin(place[1])
        flight, saved = self._flights[place] if kind == INPUT_BACKWARD else self._flights.pop(place)
        if kind == WEIGHT_BACKWARD:
            with self._reducer.weight_backward(index):
                flight.backward_weight()
            return
        with self._versions.backward(saved, distance):
            # Ranks of a team meet in both, some of which have recomputed while they waited for rows.
            flight.recompute()
            gradients = [self._joined_gradient(name, index, micro_batch) for name in flight.awaited_names]
            given = flight.backward(gradients, half=kind == INPUT_BACKWARD)
        self._hand_out(SEND_GRADIENT, index, micro_batch, given)

    def _last_backward(self, kind: str, index: int, micro_batch: int, distance: int) -> None:
        self._reducer.begin_last_backward(index)
        self._backward(kind, index, micro_batch, distance)
        if self._settings.plan.policy.reduces_at_backward:
            # Others' gradients come between this and the end of the reductions.
            self._reducer.begin_reductions(index)

    def _send(self, position: int, key: tuple[str, int, int], last: bool) -> None:
        """Send one peer's part of some tensors, and let go of them after the last peer's."""
        tensors = self._outgoing.pop(key) if last else self._outgoing[key]
        self._mailbox.send(position, tensors)

    def _recompute_and_receive(self, position: int, backward: Action) -> None:
        """Recompute, while its gradient is on its way, what the backward behind this receive needs first."""
        flight, saved = self._flights[backward.stage, *self._repetition.place(backward.micro_batch)]
        with self._versions.backward(saved, backward.version):
            flight.recompute()
        self._began[position] = self._clock.mark()
        self._mailbox.receive(position)

    def _finish_reduction(self, position: int, reduction: Action) -> None:
        step = self._repetition.step_of(reduction)
        # Of replicas that take turns, one may have had no micro-batch.
        self._reducer.begin(step + self._own.turn)
        # It began while the last backward ran.
        began = self._reducer.finish(reduction.stage, step)
        if began is not None:
            self._began[position] = began

    def _hand_out(self, kind: str, index: int, micro_batch: int, tensors: Mapping[str, torch.Tensor | None]) -> None:
        """Give tensors to the other stages of this rank, and keep them for those of others."""
        if len(self._stages) > 1:
            self._mailbox.pass_on(kind, index, micro_batch, tensors)
        if tensors and (kind, index) in self._analysis.remote_messages:
            self._outgoing[kind, index, micro_batch] = tensors

    def _joined_gradient(self, name: str, index: int, micro_batch: int) -> torch.Tensor | None:
        """Return a sent tensor's gradient: the sum of what its consumer stages give back, in their order, if any do."""
        total: torch.Tensor | None = None
        for stage in self._consumers[name]:
            gradient = self._mailbox.take_gradient(index, micro_batch, stage, name)
            if gradient is not None:
                total = gradient if total is None else total + gradient
        return total

    def _record_of(self, step: int) -> StepRecord:
        """Return the record of a mini-batch that has begun."""
        return self._records.setdefault(step, StepRecord(step))

    def _begin_sum(self, micro_batch: int) -> None:
        if not self._update.adds_up:
            # A loss need not be waited for yet.
            return
        record = self._record_of(self._repetition.place(micro_batch)[0])
        self._note_loss(record)
        self._update.begin(record)

    def _note_loss(self, record: StepRecord) -> None:
        """Note a mini-batch's loss, which has to be a number.

        Of scaled losses, one that is not is an overflow like those of gradients, which the update makes out.
        """
        finite = self._settings.scale is None
        loss, count = self._tally.total(record.step, finite=finite)
        record.loss, record.count = (loss, count) if self._tells_losses else (0.0, 0.0)
        record.terms = dict(self._tally.terms) if self._tells_losses else {}
        record.has_loss = True

    def _close(self, update: Action) -> None:
        """Note the losses, and step the optimizer unless one is not a number."""
        mini_batches = self._repetition.mini_batches_of(update, self._own.turns)
        for record in map(self._record_of, mini_batches):
            if not record.has_loss:
                self._note_loss(record)
        first = self._record_of(mini_batches[0])
        with self._versions.updating(first.step), self._reducer.gradients_of(first.step):
            self._update(first, len(mini_batches))
        self._reducer.end(first.step)


def _check_gradients(stage: Stage, outputs: Mapping[str, torch.Tensor]) -> None:
    """Refuse a tensor over which no gradient was to flow back, and now one would; modules may decide as they run.

    Raises:
        TrainingError: names it.
    """
    for spec in stage.sent_specs:
        if outputs[spec.name].requires_grad and not spec.gradient:
            raise TrainingError(
                f"tensor {spec.name} requires a gradient, which it did not when the layers were listed; make layers "
                "one module where values decide what is detached"
            )
