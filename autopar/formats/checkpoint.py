"""Checkpoints: a run's state at the end of a step, as its manifest says it.

The numbers lie in files beside the manifest, in pieces: each is some of a tensor, the index ranges of some dimensions.
Pieces cover every tensor, and no two overlap, so that any plan reads what any other saved. Where replicas or teams
divide a tensor, each rank's file has its own pieces of it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property, reduce
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, JsonValue, model_validator

from autopar.errors import FileError
from autopar.formats.document import (
    Bytes,
    Count,
    Digest,
    Document,
    Index,
    Name,
    Record,
    SparseRecord,
    Text,
    each_once,
    fault,
)
from autopar.formats.plan import Plan, UsedWeights
from autopar.formats.profile import Precision

Kind = Literal["parameter", "buffer", "optimizer", "generator", "difference", "average"]
_FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")]
"""Of a file in the checkpoint's own folder."""
_UNSIGNED = "0" * 64


class IndexRange(Record):
    """Indices ``start`` to ``stop - 1`` of one dimension."""

    dim: Index
    start: Index
    """The first index."""
    stop: Count
    """One more than the last."""


class Piece(SparseRecord):
    """Where some of a tensor is: in which file, and of the dimensions that are not whole, which indices."""

    LEFT_OUT: ClassVar[tuple[str, ...]] = ("key",)

    file: _FileName
    ranges: tuple[IndexRange, ...] = ()
    key: Name | None = None
    """Its name within the file, where that is not the tensor's: a file may hold several pieces of a tensor."""

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Return the piece's shape, given that of the whole tensor."""
        return tuple(stop - start for start, stop in sides_of(self.ranges, whole))


def sides_of(ranges: Sequence[IndexRange], whole: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return where a part of a tensor of the shape ``whole`` begins and ends in every dimension."""
    sides = [(0, size) for size in whole]
    for each in ranges:
        sides[each.dim] = each.start, each.stop
    return tuple(sides)


def key_of(kind: Kind, name: str, state: str | None, pipeline: int = 0) -> str:
    """Return the name of a tensor within files."""
    return "/".join((f"{kind}@{pipeline}" if pipeline else kind, name, *([] if state is None else [state])))


class StoredTensor(SparseRecord):
    """A parameter, a buffer, something that the optimizer keeps for a parameter, or the state of a generator."""

    LEFT_OUT: ClassVar[tuple[str, ...]] = ("pipeline",)

    kind: Kind
    pipeline: Index = 0
    """Whose optimizer keeps it, where several pipelines have one each."""
    name: Name
    """The parameter's or buffer's, as the model has it; of a generator, whose it is."""
    state: Name | None = None
    """What it is to the optimizer (``exp_avg``), or which generator."""
    shape: tuple[Index, ...]
    """Of the whole tensor."""
    dtype: Name
    """As torch calls it: ``float32``."""
    pieces: tuple[Piece, ...] = Field(min_length=1)

    @property
    def key(self) -> str:
        """Its name within files."""
        return key_of(self.kind, self.name, self.state, self.pipeline)


class PieceFile(Record):
    """A safetensors file of pieces."""

    name: _FileName
    bytes: Bytes
    sha256: Digest


class ParameterGroup(Record):
    """Parameters for which the optimizer has the same settings."""

    parameters: tuple[Name, ...]
    settings: dict[str, JsonValue]
    """As the optimizer was made, before any scheduler."""
    current: dict[str, JsonValue]
    """At the end of the step."""


class StateNumber(SparseRecord):
    """Something that the optimizer keeps for a parameter which is no tensor."""

    LEFT_OUT: ClassVar[tuple[str, ...]] = ("pipeline",)

    parameter: Name
    pipeline: Index = 0
    """As of a tensor."""
    state: Name
    """By the optimizer's own name for it."""
    value: JsonValue


class OptimizerState(Record):
    """The optimizer of the whole model, whose parts the ranks have."""

    kind: Name
    """Its class."""
    groups: tuple[ParameterGroup, ...]
    numbers: tuple[StateNumber, ...] = ()


class SchedulerState(Record):
    """Where a scheduler of the learning rate is; its settings are the model file's."""

    kind: Name
    state: dict[str, JsonValue] | None = None
    """Of one that watches the loss; any other is where so many steps bring it."""


class LossScaleState(Record):
    """The scale of float16's losses."""

    value: float = Field(gt=0)
    sound_steps: Index
    """Since it was last changed."""


class SavedRun(Record):
    """What a run goes on with, if it is resumed."""

    model: Name
    """MODEL, or the class of a script's model."""
    batch: Count
    seed: int = Field(ge=0, lt=2**63)
    samples: Index | None = None
    """In the dataset; none of a script, whose data are its own."""
    last: Literal["drop", "pad"] = "drop"
    """What becomes of samples that do not fill an epoch's last mini-batch."""


class SavedPlan(SparseRecord):
    """How the run was carried out, which another plan may do otherwise."""

    LEFT_OUT: ClassVar[tuple[str, ...]] = ("tensor_parallel", "drained_every", "ema_decay", "used_weights", "pipelines")

    sha256: Digest
    ranks: Count
    stages: Count
    schedule: Name
    micro_batches: Count
    division: tuple[tuple[Index, ...], ...]
    """Of every stage, the rows of a micro-batch that each of its replicas takes."""
    sharded: bool
    """Whether replicas divided anything."""
    precision: Precision
    torch: Name
    tensor_parallel: tuple[Count, ...] = ()
    """Of every stage, the ranks that run a replica together; none where each replica is one rank's."""
    drained_every: Count | None = None
    """Steps after which a pipeline that is never flushed was drained; null: as a script asked, or flushed."""

    pipelines: Count = 1
    """Each had mini-batches, and an optimizer, of its own."""
    ema_decay: float | None = None
    """Of the average of weights, where one was kept."""
    used_weights: UsedWeights = "trained"
    """Which weights the checkpoint is exported with."""

    @classmethod
    def of(cls, plan: Plan, torch_version: str, drained_every: int | None = None) -> Self:
        """Return what a checkpoint says of a plan."""
        sizes = tuple(stage.tensor_parallel for stage in plan.stages)
        return cls(
            sha256=sha256(plan.dumps().encode()).hexdigest(),
            ranks=len(plan.devices),
            stages=len(plan.stages),
            schedule=plan.schedule,
            micro_batches=plan.micro_batches,
            division=tuple(tuple(stage.rows) for stage in plan.stages),
            sharded=any(stage.shard != "none" for stage in plan.stages),
            precision=plan.precision,
            torch=torch_version,
            tensor_parallel=sizes if any(size > 1 for size in sizes) else (),
            drained_every=drained_every,
            pipelines=len(plan.stages_by_pipeline),
            ema_decay=plan.ema_decay,
            used_weights=plan.used_weights,
        )


class NonFiniteTensor(Record):
    """A parameter, or something that the optimizer keeps for one, of which more is not finite than at step 0."""

    key: Text
    """Its name within files."""
    elements: Count
    """How many more."""


class RankPart(Record):
    """What one rank has written of a checkpoint, or why it could not."""

    tensors: tuple[StoredTensor, ...] = ()
    files: tuple[PieceFile, ...] = ()
    optimizer: OptimizerState | None = None
    scheduler: SchedulerState | None = None
    loss_scale: LossScaleState | None = None
    non_finite: tuple[NonFiniteTensor, ...] = ()
    failure: str | None = None


class StateKey(Record):
    """A name under which the model's ``state_dict`` has a parameter or buffer."""

    key: Name
    """As a file names it."""
    tensor: Name


class Checkpoint(SparseRecord, Document):
    """The manifest of a checkpoint."""

    LEFT_OUT: ClassVar[tuple[str, ...]] = ("non_finite",)

    format: Literal["autopar.checkpoint"] = "autopar.checkpoint"
    version: Literal[1] = 1
    step: Count
    """Steps that had been trained: the number of the next one, which count from 0."""
    run: SavedRun
    plan: SavedPlan
    state_keys: tuple[StateKey, ...] = ()
    """Of a tied parameter, each of its names."""
    optimizer: OptimizerState | None = None
    """None of a model without trained parameters."""
    scheduler: SchedulerState | None = None
    loss_scale: LossScaleState | None = None
    tensors: tuple[StoredTensor, ...]
    files: tuple[PieceFile, ...]
    non_finite: tuple[NonFiniteTensor, ...] = ()
    """What training has spoilt: a run that is resumed leaves out a checkpoint that has any."""
    sha256: Digest = _UNSIGNED
    """Of this document with zeros in place of it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        each_once((file.name for file in self.files), "files[{}].name", "file")
        each_once((tensor.key for tensor in self.tensors), "tensors[{}]", "tensor")
        names = {file.name for file in self.files}
        for at, tensor in enumerate(self.tensors):
            _check_pieces(f"tensors[{at}].pieces", tensor, names)
        return self

    def with_digest(self) -> Self:
        """Return the document with its own hash."""
        return self.model_copy(update={"sha256": self._digest()})

    def _digest(self) -> str:
        return sha256(self.model_copy(update={"sha256": _UNSIGNED}).dumps().encode()).hexdigest()

    @classmethod
    def read(cls, text: str, path: Path) -> Self:
        """Return a manifest, not a letter of which has changed since it was written.

        Raises:
            FileError: it is no manifest, or another one than was written; names the file.
        """
        found = cls.parse(text, path)
        if found.sha256 != found._digest() or found.dumps() != text:
            raise FileError(f"{path}: its sha256 is not that of its content: it is damaged, or was edited")
        return found

    @property
    def unsound(self) -> str | None:
        """What training has spoilt, in words; None where nothing is."""
        if not self.non_finite:
            return None
        count, others = sum(each.elements for each in self.non_finite), len(self.non_finite) - 1
        more = f" and {others} more" if others else ""
        return f"{count} elements of {self.non_finite[0].key}{more} are not finite, which were at step 0"

    def tensor(self, kind: Kind, name: str, state: str | None = None) -> StoredTensor | None:
        """Return a tensor; None where there is none such."""
        return self._by_key.get(key_of(kind, name, state))

    @cached_property
    def _by_key(self) -> dict[str, StoredTensor]:
        return {each.key: each for each in self.tensors}


class CheckpointView(NamedTuple):
    """A checkpoint of a folder, as far as it can be read."""

    step: int
    folder: Path
    manifest: Checkpoint | None
    problem: str | None
    """What is wrong with it: its files if it has no manifest here, else what training has spoilt."""
    verified: bool = False
    """Whether every file was read and compared."""

    @property
    def bytes(self) -> int:
        """What its tensors take, in files."""
        return 0 if self.manifest is None else sum(file.bytes for file in self.manifest.files)


def _check_pieces(at: str, tensor: StoredTensor, files: set[str]) -> None:
    """Refuse pieces that do not make up a tensor."""
    each_once(((piece.file, piece.key) for piece in tensor.pieces), at + "[{}].key", "piece")
    for index, piece in enumerate(tensor.pieces):
        if piece.file not in files:
            fault(f"{at}[{index}].file", f"{piece.file} is not among the files")
        each_once((each.dim for each in piece.ranges), f"{at}[{index}].ranges[{{}}].dim", "dimension")
        for each in piece.ranges:
            if each.dim >= len(tensor.shape) or not each.start < each.stop <= tensor.shape[each.dim]:
                fault(f"{at}[{index}].ranges", f"{tensor.key} of shape {list(tensor.shape)} has no such indices")
    if 0 not in tensor.shape and not _tiles(tensor):
        fault(at, f"the pieces do not make up {tensor.key} of shape {list(tensor.shape)}")


_PRIME = 2**127 - 1


def _tiles(tensor: StoredTensor) -> bool:
    """Tell whether every element of a tensor is in one of its pieces, and in no other, in time linear in the pieces.

    Pieces that are a tiling have the tensor's volume, however long each index of each dimension is taken to be; others
    have it for next to no lengths (Schwartz, 1980, and Zippel, 1979: both volumes are polynomials of the lengths). So
    indices lie at random places, modulo a prime.
    """
    chance, shares = Random(0), dict[IndexRange, int]()
    place = defaultdict[tuple[int, int], int](lambda: chance.randrange(_PRIME))
    for each in (each for piece in tensor.pieces for each in piece.ranges if each not in shares):
        whole = place[each.dim, tensor.shape[each.dim]] - place[each.dim, 0]
        shares[each] = (place[each.dim, each.stop] - place[each.dim, each.start]) * pow(whole, -1, _PRIME) % _PRIME
    return sum(_product(shares[each] for each in piece.ranges) for piece in tensor.pieces) % _PRIME == 1


def _product(shares: Iterable[int]) -> int:
    return reduce(lambda one, other: one * other % _PRIME, shares, 1)


def merge(parts: Sequence[RankPart], step: int, run: SavedRun, plan: SavedPlan, keys: Sequence[StateKey]) -> Checkpoint:
    """Return the manifest of what all ranks have written.

    Raises:
        pydantic.ValidationError: the parts are not those of one checkpoint.
    """
    tensors: dict[str, StoredTensor] = {}
    for tensor in (tensor for part in parts for tensor in part.tensors):
        known = tensors.get(tensor.key)
        pieces = (*([] if known is None else known.pieces), *tensor.pieces)
        tensors[tensor.key] = tensor.model_copy(update={"pieces": pieces})
    optimizers = [part.optimizer for part in parts if part.optimizer is not None]
    content = {
        "step": step,
        "run": run,
        "plan": plan,
        "state_keys": tuple(keys),
        "optimizer": _join_optimizers(optimizers),
        "scheduler": next((part.scheduler for part in parts if part.scheduler is not None), None),
        "loss_scale": next((part.loss_scale for part in parts if part.loss_scale is not None), None),
        "tensors": tuple(tensors.values()),
        "files": tuple(file for part in parts for file in part.files),
        "non_finite": _join_non_finite(each for part in parts for each in part.non_finite),
    }
    return Checkpoint(**content).with_digest()  # type: ignore[arg-type]


def _join_non_finite(tensors: Iterable[NonFiniteTensor]) -> tuple[NonFiniteTensor, ...]:
    counts = Counter[str]()
    for each in tensors:
        counts[each.key] += each.elements
    return tuple(NonFiniteTensor(key=key, elements=count) for key, count in counts.items())


def _join_optimizers(optimizers: Sequence[OptimizerState]) -> OptimizerState | None:
    """Return the optimizer of all parameters; groups of the same settings are one."""
    if not optimizers:
        return None
    groups: list[ParameterGroup] = []
    known = set[str]()
    for group in (group for optimizer in optimizers for group in optimizer.groups):
        new = tuple(name for name in group.parameters if name not in known)
        known.update(new)
        same = (
            at for at, each in enumerate(groups) if (each.settings, each.current) == (group.settings, group.current)
        )
        at = next(same, None)
        if at is None:
            groups.append(group.model_copy(update={"parameters": new}))
        elif new:
            groups[at] = groups[at].model_copy(update={"parameters": (*groups[at].parameters, *new)})
    every = (each for optimizer in optimizers for each in optimizer.numbers)
    numbers = {(each.parameter, each.pipeline, each.state): each for each in every}
    return OptimizerState(kind=optimizers[0].kind, groups=tuple(groups), numbers=tuple(numbers.values()))
