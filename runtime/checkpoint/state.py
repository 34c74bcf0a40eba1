"""State: what of a rank's job a checkpoint keeps, and putting it back.

In comes a job between two steps. Out come its tensors, as pieces of the model's own, with those that this rank writes:
of what replicas hold alike the first writes, of what they divide each its part, of a tied parameter the first stage.
Of a team, each rank writes what it is the first to have. A part of a fused weight has several ranges of one dimension,
and so several pieces. Settings of optimizers and schedulers come out as JSON, from which they come back exactly.

Why: docs/design/decisions.md, "Checkpoints: Pieces, agreed on through the folder".
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from pydantic import JsonValue
from torch.optim.lr_scheduler import ReduceLROnPlateau

from autopar.capture.model.optimizer import group_settings
from autopar.capture.model.source import is_of_model_file
from autopar.capture.model.state import generator_states
from autopar.errors import TrainingError
from autopar.formats.checkpoint import (
    Checkpoint,
    IndexRange,
    Kind,
    LossScaleState,
    OptimizerState,
    ParameterGroup,
    RankPart,
    SchedulerState,
    StateNumber,
    StoredTensor,
    key_of,
)
from autopar.runtime.checkpoint.folder import CheckpointReader
from autopar.runtime.job import Job
from autopar.runtime.stage.parameters import Team, cut_views, local, sharded_bounds, sharded_ranges
from autopar.runtime.update import Update


class HeldPiece(NamedTuple):
    """What a rank holds of a tensor, or one of several pieces of that."""

    kind: Kind
    name: str
    state: str | None
    shape: tuple[int, ...]
    """Of the whole."""
    ranges: tuple[IndexRange, ...]
    """Of the dimensions that are not whole here."""
    tensor: torch.Tensor
    """This rank's."""
    is_sharded: bool = False
    """Whether replicas divide it."""
    answers: bool = True
    """Whether this rank is the first of its team that has it."""
    number: int = 0
    """Among several pieces."""
    pipeline: int = 0
    """Whose optimizer keeps it."""

    @property
    def key(self) -> str:
        """Its name within a file."""
        name = key_of(self.kind, self.name, self.state, self.pipeline)
        return f"{self.number}:{name}" if self.number else name


def held_pieces(
    kind: Kind, name: str, tensor: torch.Tensor, state: str | None = None, team: Team | None = None
) -> list[HeldPiece]:
    """Return what this rank holds of a tensor.

    Args:
        kind: what it is.
        name: of the parameter or buffer that it is, or belongs to.
        tensor: this rank's.
        state: what it is to the optimizer.
        team: with whom the rank divides the tensor; None: it is alike on all of a team.
    """
    # What has no rows here has no such range, and nobody writes it.
    sides, own = sharded_ranges(tensor), local(tensor.detach())
    ranges = [IndexRange.model_construct(dim=dim, start=start, stop=stop) for dim, start, stop in sides]
    cut = None if team is None else team.cuts.get(name)
    if team is None or cut is None:
        first = team is None or team.part == 0
        return [HeldPiece(kind, name, state, tuple(tensor.shape), tuple(ranges), own, bool(ranges), first)]
    whole, others = team.shape(name, tensor.shape), [each for each in ranges if each.dim != cut.dim]
    found = []
    for at, (piece, view) in enumerate(cut_views(cut, team.part, sharded_bounds(tensor, cut.dim), own)):
        mine = IndexRange.model_construct(dim=cut.dim, start=piece.start, stop=piece.start + piece.size)
        answers = piece.parts[0] == team.part
        found.append(HeldPiece(kind, name, state, whole, (*others, mine), view, bool(ranges), answers, at))
    return found


def fill(pieces: Sequence[HeldPiece], read: Callable[[Sequence[IndexRange]], torch.Tensor]) -> None:
    """Put stored values where pieces have theirs; ``read`` gives those of ranges of the whole."""
    for piece in pieces:
        if piece.tensor.numel():
            piece.tensor.copy_(read(piece.ranges))


def own_values(
    name: str, parameter: torch.Tensor, team: Team, read: Callable[[Sequence[IndexRange]], torch.Tensor]
) -> torch.Tensor:
    """Return what a rank has of something stored that is divided as its parameter is; see :func:`fill`."""
    own = local(parameter)
    if not own.numel() and own is not parameter:
        return torch.empty_like(own)
    found = [read(piece.ranges) for piece in held_pieces("parameter", name, parameter, None, team)]
    return found[0] if len(found) == 1 else torch.cat(found, dim=team.cuts[name].dim)


SCHEDULED = {"lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "momentum", "base_momentum", "max_momentum", "betas"}
"""Settings that torch's schedulers change."""
_WATCHED = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch", "_last_lr")
"""Where a scheduler that watches the loss is, in torch's names."""


class _Look(NamedTuple):
    """What a rank writes, as it was when it was last looked at."""

    pieces: list[HeldPiece]
    numbers: list[StateNumber]
    tensors: list[torch.Tensor] | None
    """All that were there, where they are enough to know whether it is still so."""
    addresses: list[int]

    def is_of(self, present: Sequence[object]) -> bool:
        """Whether just the same tensors are there, in the same memory; quick, since training waits for it."""
        tensors = self.tensors
        if tensors is None or len(tensors) != len(present) or not all(map(operator.is_, tensors, present)):
            return False
        return list(map(torch.Tensor.data_ptr, tensors)) == self.addresses


def class_name(value: object) -> str:
    """Return the name under which an object's class is compared: of one of a model file, wherever the file lies."""
    kind = type(value)
    return kind.__qualname__ if is_of_model_file(kind) else f"{kind.__module__}.{kind.__qualname__}"


class JobState:
    """The state of a rank's job, by the model's own names."""

    def __init__(self, job: Job, first_stages: Mapping[str, int]) -> None:
        """Look at a job; ``first_stages`` says which stage is the first to hold each parameter and buffer."""
        self._job, self._first_stages = job, first_stages
        self._names, self._pipeline = _names(job.update), job.plan.pipeline_of(job.own.stage)
        self._latest: _Look | None = None

    def look(self) -> tuple[list[HeldPiece], RankPart]:
        """Return what this rank writes of the model and of its optimizer's state, and what there is beside tensors.

        The pieces are the same objects as last time, where the tensors are the same.

        Raises:
            TrainingError: the optimizer keeps what no checkpoint can.
        """
        job, optimizer = self._job, self._job.update.optimizer
        kept = [] if optimizer is None else optimizer.state.values()
        own = (job.parameters, job.buffers, job.versions.differences, averages(job), *kept)
        present = [each for held in own for each in held.values()]
        if self._latest is None or not self._latest.is_of(present):
            self._latest = self._look_anew(present)
        scale = self._job.update.scale
        part = RankPart(
            optimizer=self._optimizer(self._latest.numbers),
            scheduler=self._scheduler(),
            loss_scale=None if scale is None else LossScaleState(value=scale.value, sound_steps=scale.sound_steps),
        )
        return self._latest.pieces, part

    def _look_anew(self, present: list[object]) -> _Look:
        job, differences = self._job, self._job.versions.differences
        apart = {name: differences[each] for name, each in job.parameters.items() if each in differences}
        held: tuple[tuple[Kind, Mapping[str, torch.Tensor]], ...] = (
            ("parameter", job.parameters),
            ("buffer", job.buffers),
            ("difference", apart),
            ("average", averages(job)),
        )
        every: list[tuple[Kind, str, str | None, torch.Tensor]] = []
        for kind, own in held:
            every += ((kind, name, None, tensor) for name, tensor in own.items())
        numbers = []
        for name, state, value in self._optimizer_values():
            if isinstance(value, torch.Tensor):
                every.append(("optimizer", name, state, value))
            else:
                number = StateNumber(parameter=name, pipeline=self._pipeline, state=state, value=value)
                numbers.append(number)
        found = (self._pieces(kind, name, tensor, state) for kind, name, state, tensor in every)
        pieces = [piece for each in found for piece in each if self._writes(piece)]
        # Numbers are other objects each time, and what replicas divide has no address.
        lasting = not numbers and not any(hasattr(each, "to_local") for each in present)
        tensors = cast(list[torch.Tensor], present) if lasting else None
        return _Look(pieces, numbers, tensors, list(map(torch.Tensor.data_ptr, tensors or ())))

    def _pieces(self, kind: Kind, name: str, tensor: torch.Tensor, state: str | None) -> list[HeldPiece]:
        """Return what this rank holds; a team cuts of the optimizer's state what has its parameter's shape."""
        team = self._job.team
        is_cut = kind != "optimizer" or tensor.shape == self._job.parameters[name].shape
        found = held_pieces(kind, name, tensor, state, team if is_cut else None)
        if kind == "optimizer":
            found = [piece._replace(pipeline=self._pipeline) for piece in found]
        return found if is_cut else [piece._replace(answers=team.part == 0) for piece in found]

    def _writes(self, piece: HeldPiece) -> bool:
        """Whether this rank writes a piece, of all that hold it."""
        writing = piece.tensor.numel() > 0 if piece.is_sharded else self._job.own.replica == 0
        # Weights are the first pipeline's, which all have; of several, a parameter is in one stage of each.
        own = piece.pipeline > 0 or self._first_stages[piece.name] in self._job.stages
        return piece.answers and writing and own

    def _optimizer(self, numbers: Sequence[StateNumber]) -> OptimizerState | None:
        """Return what the optimizer is, with what it keeps beside tensors; None where this rank has none."""
        update = self._job.update
        if update.optimizer is None:
            return None
        names = self._names
        if self._pipeline:
            self._check_settings()
            # They are those of the first pipeline.
            return OptimizerState(kind=class_name(update.optimizer), groups=(), numbers=tuple(numbers))
        groups = tuple(
            ParameterGroup(
                parameters=tuple(names[each] for each in group["params"] if each in names),
                settings=plain_items(fresh),
                current=plain_items(group_settings(group)),
            )
            for fresh, group in zip(update.fresh_groups, update.optimizer.param_groups, strict=True)
        )
        return OptimizerState(kind=class_name(update.optimizer), groups=groups, numbers=tuple(numbers))

    def _check_settings(self) -> None:
        """Refuse an optimizer that changes its settings by itself, each pipeline's in its own way."""
        update = self._job.update
        assert update.optimizer is not None
        scheduled = SCHEDULED if update.scheduler is not None else ()
        for fresh, group in zip(update.fresh_groups, update.optimizer.param_groups, strict=True):
            before, now = plain_items(fresh), plain_items(group_settings(group))
            changed = next((key for key in now if key not in scheduled and before.get(key) != now[key]), None)
            if changed is not None:
                raise TrainingError(
                    f"{class_name(update.optimizer)} changes its {changed} by itself, in every pipeline in another "
                    "way, of which checkpoints hold one; use another optimizer, or train without `checkpoint`"
                )

    def _scheduler(self) -> SchedulerState | None:
        """Return where the scheduler is; None where this rank has none."""
        scheduler = self._job.update.scheduler
        if scheduler is None:
            return None
        state = None
        if isinstance(scheduler, ReduceLROnPlateau):
            state = {name: to_plain(getattr(scheduler, name)) for name in _WATCHED if hasattr(scheduler, name)}
        return SchedulerState(kind=class_name(scheduler), state=state)

    def _optimizer_values(self) -> Iterator[tuple[str, str, torch.Tensor | JsonValue]]:
        """Yield (parameter, its name to the optimizer, tensor or JSON) of all that the optimizer keeps."""
        update = self._job.update
        if update.optimizer is None:
            return
        for parameter, kept in update.optimizer.state.items():
            name = self._names.get(parameter)
            if name is None:
                raise TrainingError(f"{class_name(update.optimizer)} keeps state of no parameter, which is not saved")
            for state, value in kept.items():
                try:
                    yield name, str(state), value if isinstance(value, torch.Tensor) else to_plain(value)
                except NotPlainError as error:
                    raise TrainingError(
                        f"{class_name(update.optimizer)} keeps {state!r} of {name}, a {type(value).__name__}; "
                        "checkpoints hold tensors and numbers: use another optimizer, or train without `checkpoint`"
                    ) from error


def _names(update: Update) -> dict[torch.Tensor, str]:
    return {parameter: name for name, parameter in update.optimizer_parameters.items()}


def averages(job: Job) -> Mapping[str, torch.Tensor]:
    """Return the average of every parameter that has one, by name."""
    return {} if job.average is None else job.average.tensors


def restore_tensors(job: Job, source: CheckpointReader) -> None:
    """Put stored values into those of a job's parameters and buffers that there are any of, in their shape."""
    held: tuple[tuple[Kind, Mapping[str, torch.Tensor]], ...] = ("parameter", job.parameters), ("buffer", job.buffers)
    with torch.no_grad():
        for kind, name, tensor in ((kind, name, each) for kind, every in held for name, each in every.items()):
            record = _record_of(kind, name, tensor, job.team, source)
            if record is not None:
                fill(held_pieces(kind, name, tensor, None, job.team), partial(source.read, record))
        for name, tensor in averages(job).items():
            # What the checkpoint has no average of begins with its weights.
            record = _record_of("average", name, tensor, job.team, source)
            record = record or _record_of("parameter", name, tensor, job.team, source)
            if record is not None:
                fill(held_pieces("average", name, tensor, None, job.team), partial(source.read, record))
    if job.average is not None:
        job.average.has_begun = source.checkpoint.plan.ema_decay is not None
    names = {parameter: name for name, parameter in job.parameters.items()}

    def difference(parameter: torch.nn.Parameter) -> torch.Tensor | None:
        name = names[parameter]
        record = _record_of("difference", name, parameter, job.team, source)
        return None if record is None else own_values(name, parameter, job.team, partial(source.read, record))

    job.versions.resume(difference)


def _record_of(
    kind: Kind, name: str, tensor: torch.Tensor, team: Team, source: CheckpointReader
) -> StoredTensor | None:
    """Return what a checkpoint has of a tensor; None where that has another shape now, or is not there."""
    record = source.checkpoint.tensor(kind, name)
    return None if record is None or record.shape != team.shape(name, tensor.shape) else record


def restore_optimizer(job: Job, source: CheckpointReader) -> None:
    """Give a job's optimizer, scheduler and loss scale what they had.

    The scheduler is stepped as often as it had been: its settings are the model file's. Other settings are the
    checkpoint's where the optimizer had changed them by itself.

    Args:
        job: a rank's, before its first step.
        source: what it goes on from.
    """
    update, checkpoint = job.update, source.checkpoint
    if update.scale is not None and checkpoint.loss_scale is not None:
        update.scale.value = checkpoint.loss_scale.value
        update.scale.sound_steps = checkpoint.loss_scale.sound_steps
    if update.optimizer is None:
        return
    _step_scheduler(update, checkpoint)
    if checkpoint.optimizer is None or checkpoint.optimizer.kind != class_name(update.optimizer):
        return
    _restore_settings(update, checkpoint.optimizer)
    numbers: dict[str, dict[str, object]] = {}
    pipeline = saved_pipeline(job, checkpoint)
    for number in (each for each in checkpoint.optimizer.numbers if each.pipeline == pipeline):
        numbers.setdefault(number.parameter, {})[number.state] = from_plain(number.value)
    _restore_state(job, source, numbers)


def saved_pipeline(job: Job, checkpoint: Checkpoint) -> int:
    """Return whose optimizer's state a job takes: that of the pipeline of its number, or the first one's."""
    own = job.plan.pipeline_of(job.own.stage)
    return own if own < checkpoint.plan.pipelines else 0


def _restore_state(job: Job, source: CheckpointReader, numbers: Mapping[str, dict[str, object]]) -> None:
    """Give an optimizer what it had kept of every parameter; ``numbers`` are what of it is no tensor, by parameter."""
    update = job.update
    assert update.optimizer is not None
    by_name: dict[str, list[StoredTensor]] = {}
    pipeline = saved_pipeline(job, source.checkpoint)
    for each in source.checkpoint.tensors:
        if (each.kind, each.pipeline) == ("optimizer", pipeline):
            by_name.setdefault(each.name, []).append(each)
    names = _names(update)
    for group in update.optimizer.param_groups:
        for parameter in group["params"]:
            name = names[parameter]
            if _record_of("parameter", name, parameter, job.team, source) is None:
                continue
            state = numbers.get(name, {})
            for each in by_name.get(name, ()):
                state[str(each.state)] = _state_value(job.team, parameter, group, each, source)
            if state:
                update.optimizer.state[parameter] = state


def _state_value(
    team: Team, parameter: torch.Tensor, group: Mapping[str, object], record: StoredTensor, source: CheckpointReader
) -> torch.Tensor:
    """Return what an optimizer had kept of a parameter, where it would keep it, divided as the parameter is."""
    if record.state == "step" and not (group.get("capturable") or group.get("fused")):
        # Torch's optimizers count steps in the host's memory, unless their kernels read them.
        return source.read(record)
    device = local(parameter).device
    if record.shape != team.shape(record.name, parameter.shape):
        return source.read(record).to(device)
    value = own_values(record.name, parameter, team, partial(source.read, record)).to(device)
    if not hasattr(parameter, "to_local"):
        return value
    from torch.distributed.tensor import DTensor

    placed: Any = parameter
    return DTensor.from_local(
        value,
        placed.device_mesh,
        placed.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _step_scheduler(update: Update, checkpoint: Checkpoint) -> None:
    """Bring a fresh scheduler to where it was, and with it the settings that it changes."""
    scheduler = update.scheduler
    if isinstance(scheduler, ReduceLROnPlateau):
        saved = None if checkpoint.scheduler is None else checkpoint.scheduler.state
        for name, value in (saved or {}).items():
            setattr(scheduler, name, from_plain(value))
    elif scheduler is not None:
        with warnings.catch_warnings():
            # Torch expects the optimizer's steps between its scheduler's.
            warnings.simplefilter("ignore")
            for _ in range(checkpoint.step):
                scheduler.step()


def _restore_settings(update: Update, state: OptimizerState) -> None:
    """Set what the optimizer had changed of its settings by itself, or a scheduler by what it had watched."""
    assert update.optimizer is not None
    group_of = {name: group for group in state.groups for name in group.parameters}
    names = _names(update)
    follows = update.scheduler is not None and not isinstance(update.scheduler, ReduceLROnPlateau)
    for group in update.optimizer.param_groups:
        before = next((group_of[names[each]] for each in group["params"] if names.get(each) in group_of), None)
        if before is None:
            continue
        for key, value in before.current.items():
            scheduled = follows and key in SCHEDULED
            if key in group and not scheduled and value != before.settings.get(key):
                _set(group, key, value)


def _set(group: dict[str, Any], key: str, value: JsonValue) -> None:
    found = from_plain(value)
    if isinstance(group[key], torch.Tensor) and isinstance(found, torch.Tensor):
        # Others may hold it, too.
        group[key].copy_(found)
    else:
        group[key] = found


def generators(device: torch.device, rank: int) -> Iterator[HeldPiece]:
    """Yield the state of the generators that a script's own code may draw from."""
    for state, tensor in generator_states(device).items():
        if tensor.numel():
            yield from held_pieces("generator", f"rank {rank}", tensor, state)


_MOST_NUMBERS = 1024
"""Of a tensor among settings; a larger one is no setting."""


class NotPlainError(Exception):
    """A value is not made of numbers, texts, lists, dicts and small tensors."""


def to_plain(value: object) -> JsonValue:
    """Return a value as JSON.

    >>> to_plain({"lr": 0.1, "betas": (0.9, math.inf)})
    {'lr': 0.1, 'betas': {'tuple': [0.9, {'float': 'inf'}]}}

    Raises:
        NotPlainError: it has none.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, torch.Tensor) and value.numel() <= _MOST_NUMBERS and not value.is_complex():
        return {"tensor": to_plain(value.tolist()), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, tuple) and type(value) is tuple:
        return {"tuple": [to_plain(each) for each in value]}
    if isinstance(value, list):
        return [to_plain(each) for each in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {str(key): to_plain(each) for key, each in value.items()}
    raise NotPlainError(f"{type(value).__name__} is no plain value")


def from_plain(value: JsonValue) -> object:
    """Return what :func:`to_plain` was given.

    >>> from_plain(to_plain({"betas": (0.9, -math.inf), "lr": torch.tensor(0.5)}))
    {'betas': (0.9, -inf), 'lr': tensor(0.5000)}

    Raises:
        NotPlainError: it is not such a value.
    """
    if isinstance(value, list):
        return [from_plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"float"}:
        return float(str(value["float"]))
    if value.keys() == {"tuple"}:
        if not isinstance(value["tuple"], list):
            raise NotPlainError("a tuple is not given as a list")
        return tuple(map(from_plain, value["tuple"]))
    if value.keys() == {"tensor", "dtype"}:
        dtype = getattr(torch, str(value["dtype"]), None)
        if not isinstance(dtype, torch.dtype):
            raise NotPlainError(f"torch has no type {value['dtype']!r}")
        return torch.tensor(from_plain(value["tensor"]), dtype=dtype)
    return {key: from_plain(each) for key, each in value.items()}


def plain_items(values: Mapping[str, object]) -> dict[str, JsonValue]:
    """Return those of some named values that have a JSON; the others are code, and stay where they are."""
    found: dict[str, JsonValue] = {}
    for name, value in values.items():
        try:
            found[str(name)] = to_plain(value)
        except NotPlainError:
            continue
    return found
