"""Program: for every rank, the ordered list of actions it performs in one step.

    {"format": "autopar.program", "version": 1, "ranks": ["F0@0 S0@0>1@1 RG0@0<1@1 B0@0 U@0", "R0@1<0@0 F0@1 ..."]}

An action is written as kind, micro-batch and stage, and for a message the other rank and its stage. ``F3@1`` is the
forward of micro-batch 3 on stage 1, ``B3@1`` its backward, or ``I3@1`` and ``W3@1`` its halves (the gradients of what
the stage received, and those of its parameters). ``S3@0>2@1`` and ``R3@1<0@0`` are the sending and receiving of
activations, ``SG`` and ``RG`` those of gradients, ``A@1`` the reduction among a stage's replicas, ``T0@1`` that of a
parameter shared between stages, ``U@1`` the optimizer's update, ``PS3@1`` and ``PL3@1`` the push and the pull of a
wave where a plan has several pipelines. ``shift`` is there for a pipeline that is never flushed: the micro-batches by
which each repetition is ahead of the one before.

Prices say how long every action takes by itself, and what layers hold, to perform a program without its devices. Who
predicts makes them; who performs a program in virtual time is told them, and knows nothing of how they were found.
Faults say what is to go wrong in a run, where and when: for tests, and for users' drills.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from autopar.errors import FileError, UsageError
from autopar.formats.document import Document, Index, read_text, write_text

FORWARD = "F"
BACKWARD = "B"
SEND = "S"
RECEIVE = "R"
SEND_GRADIENT = "SG"
RECEIVE_GRADIENT = "RG"
REDUCE = "A"
REDUCE_TIED = "T"
UPDATE = "U"
INPUT_BACKWARD = "I"
"""The half of a backward that others wait for: the gradients of what the stage received."""
WEIGHT_BACKWARD = "W"
"""The other half: the gradients of the stage's parameters."""
PREDICT = "P"
"""What the forwards of a mini-batch see, made of the newest weights (:class:`autopar.policies.Predict`)."""
CORRECT = "C"
"""What backwards see until the next update, made of the newest weights (:class:`autopar.policies.PipeMare`, and
``xpipe`` of :class:`autopar.policies.Predict`)."""
BEGIN_SUM = "N"
"""Where a pipeline that is never flushed begins the sum over all ranks, of losses, counts and norms, that the update of
the micro-batch's mini-batch waits for."""
PUSH = "PS"
"""Where the sum over all pipelines of what a wave has changed of a stage's weights begins; nobody waits there."""
PULL = "PL"
"""Where the next of these sums is waited for, and what others have changed is added to the stage's weights."""
WORDS = {
    FORWARD: "forward",
    BACKWARD: "backward",
    SEND: "message forth",
    RECEIVE: "receipt of a message forth",
    SEND_GRADIENT: "message back",
    RECEIVE_GRADIENT: "receipt of a message back",
    REDUCE: "reduction",
    REDUCE_TIED: "reduction of a shared parameter",
    UPDATE: "update",
    INPUT_BACKWARD: "backward, input half",
    WEIGHT_BACKWARD: "backward, weight half",
    PREDICT: "prediction of weights",
    CORRECT: "correction of weights",
    BEGIN_SUM: "sum over all ranks",
    PUSH: "push of a wave",
    PULL: "pull of a wave",
}
"""What kinds of actions are called."""
KINDS = tuple(WORDS)
BACKWARDS = (BACKWARD, INPUT_BACKWARD, WEIGHT_BACKWARD)
SENDS, RECEIVES, REDUCTIONS = (SEND, SEND_GRADIENT), (RECEIVE, RECEIVE_GRADIENT), (REDUCE, REDUCE_TIED)
UPDATES = (UPDATE, PREDICT, CORRECT, BEGIN_SUM, PUSH)
"""An update, and what stands beside one."""

_CODES = {kind: code for code, kind in enumerate(KINDS)}
_TEXT = re.compile(
    r"(?P<kind>SG|RG|PS|PL|[FBIWSRATUPCN])(?P<index>\d*)@(?P<stage>\d+)"
    r"(?:[<>](?P<peer>\d+)@(?P<peer_stage>\d+))?(?:v(?P<version>\d+))?"
)


class Action(NamedTuple):
    """One entry of a rank's program.

    Its text names kind, micro-batch and stage, then for a message the peer's rank and stage, then a weight version
    other than 0:

    >>> str(Action("F", 1, 3)), str(Action("S", 0, 3, peer=2, peer_stage=1)), str(Action("RG", 0, 3, 2, 1))
    ('F3@1', 'S3@0>2@1', 'RG3@0<2@1')
    >>> Action.parse("S3@0>2@1") == Action("S", 0, 3, 2, 1)
    True
    """

    kind: str
    stage: int
    micro_batch: int = -1
    """The micro-batch; of a ``P``, the first of its mini-batch, and of an ``N`` the last; of a ``PS``, the last of its
    wave, and of a ``PL`` the one whose forward follows; of a ``T``, the index of the
    shared parameter in the plan; of a ``U`` and its ``A``, where a repetition has several, the first that it is of; -1
    where none applies."""
    peer: int = -1
    """Rank at the other end of a message."""
    peer_stage: int = -1
    version: int = 0
    """Weight version that the action sees; 0 is the newest."""

    def __str__(self) -> str:
        text = f"{self.kind}{self.micro_batch if self.micro_batch >= 0 else ''}@{self.stage}"
        if self.peer >= 0:
            arrow = ">" if self.kind in SENDS else "<"
            text += f"{arrow}{self.peer}@{self.peer_stage}"
        return text if self.version == 0 else f"{text}v{self.version}"

    @property
    def reduction(self) -> tuple[str, int]:
        """What all ranks of one reduction have in common: its kind, and its stage or shared parameter."""
        return self.kind, self.micro_batch if self.kind == REDUCE_TIED else self.stage

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read the canonical text form back; anything else is a ``ValueError``."""
        match = _TEXT.fullmatch(text)
        if match:
            numbers = (int(text or -1) for text in match.group("stage", "index", "peer", "peer_stage"))
            stage, index, peer, peer_stage = numbers
            action = cls(match["kind"], stage, index, peer, peer_stage, int(match["version"] or 0))
            if action._is_sound() and str(action) == text:
                return action
        raise ValueError(f"not an action: {text[:80]!r}")

    def _is_sound(self) -> bool:
        """Whether it has a micro-batch and a peer where its kind asks for them, and numbers that columns hold."""
        counted = self.kind in (REDUCE, UPDATE) or (self.kind != CORRECT) == (self.micro_batch >= 0)
        carried = self.kind in (*SENDS, *RECEIVES)
        return counted and carried == (self.peer >= 0) and max(self[1:]) < 2**31


@dataclass(frozen=True, eq=True)
class RankProgram:
    """One rank's actions as columns, so that a million of them stay small."""

    kinds: array[int]
    stages: array[int]
    micro_batches: array[int]
    peers: array[int]
    peer_stages: array[int]
    versions: array[int]

    @classmethod
    def of(cls, actions: Iterable[Action]) -> RankProgram:
        # Column by column: a program may hold millions of actions.
        kinds, *numbers = list(zip(*actions, strict=True)) or [()] * 6
        return cls(array("b", map(_CODES.__getitem__, kinds)), *(array("i", column) for column in numbers))

    def __len__(self) -> int:
        return len(self.kinds)

    def __iter__(self) -> Iterator[Action]:
        kinds = map(KINDS.__getitem__, self.kinds)
        return map(Action, kinds, self.stages, self.micro_batches, self.peers, self.peer_stages, self.versions)

    def __getitem__(self, index: int) -> Action:
        return Action(
            KINDS[self.kinds[index]],
            self.stages[index],
            self.micro_batches[index],
            self.peers[index],
            self.peer_stages[index],
            self.versions[index],
        )


@dataclass(frozen=True, eq=True)
class Program:
    """Every rank's actions for one step, in rank order; or for one repetition of a pipeline that is never flushed."""

    ranks: tuple[RankProgram, ...]
    shift: int = 0
    """Micro-batches by which each repetition is ahead of the one before; 0 where every step ends with a flush."""

    def text_of(self, action: Action) -> str:
        """Return the text of one of its actions, with the micro-batch's number within the step or repetition."""
        if self.shift and action.micro_batch >= 0 and action.kind != REDUCE_TIED:
            action = action._replace(micro_batch=action.micro_batch % self.shift)
        return str(action)

    def dumps(self) -> str:
        """Return the program as JSON, one line of action texts per rank."""
        rows = [json.dumps(" ".join(map(str, rank))) for rank in self.ranks]
        shift = f'"shift": {self.shift}, ' if self.shift else ""
        return f'{{"format": "autopar.program", "version": 1, {shift}"ranks": [\n ' + ",\n ".join(rows) + "\n]}\n"

    def save(self, path: str | Path) -> None:
        write_text(path, self.dumps())

    @classmethod
    def load(cls, path: Path) -> Program:
        """Read a program file.

        Raises:
            FileError: the file is missing or malformed; names the rank and the action.
        """
        return cls.parse(read_text(path, "program"), path)

    @classmethod
    def parse(cls, text: str, path: Path) -> Program:
        """Read a program file's text; ``path`` says where it is from.

        Raises:
            FileError: the text is malformed; names the rank and the action.
        """
        file = _ProgramFile.parse(text, path)
        ranks = tuple(RankProgram.of(_actions(row, f"{path}: $.ranks[{i}]")) for i, row in enumerate(file.ranks))
        return cls(ranks, file.shift)


class _ProgramFile(Document):
    format: Literal["autopar.program"] = "autopar.program"
    version: Literal[1] = 1
    ranks: tuple[str, ...]
    shift: Index = 0


def _actions(row: str, at: str) -> Iterator[Action]:
    for position, text in enumerate(row.split()):
        try:
            yield Action.parse(text)
        except ValueError as error:
            raise FileError(f"{at}, position {position}: {error}") from error


@dataclass(frozen=True)
class RankPrices:
    """Seconds of one rank's actions, by :func:`price_key`."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    """Of forwards, backwards and their halves, updates, and messages, which occupy their queue and not the rank; of a
    reduction of gradients, how far apart the ends of two at least are. What is not listed takes no time."""
    exposed_s: Mapping[str, float] = field(default_factory=dict)
    """Of reductions of gradients: from the end of this rank's last backward of the stage to that of its part."""
    waves_s: tuple[float, ...] = ()
    """Of the sums of a wave that it takes part in, in the plan's order: from the last push to the end."""


@dataclass(frozen=True)
class LayerBytes:
    """What a layer holds of one micro-batch of its rank's rows."""

    saved: int
    """Kept for its backward, beside tensors that other layers make or read."""
    saved_tensors: tuple[str, ...]
    """Those of them that are kept, too."""
    transient: int
    """Held for a while in its forward, or its backward, beside that."""
    pending: int
    """Between the halves of its backward."""
    gradients: int
    """Of its parameters, where no reduction holds them throughout."""


@dataclass(frozen=True)
class RankBytes:
    """What one rank holds."""

    state: int
    """Throughout a step: parameters, buffers, the optimizer's state, model inputs, and what gradients stay."""
    update: int
    """While the optimizer steps."""
    layers: Mapping[str, LayerBytes] = field(default_factory=dict)
    """By the rank's layers."""
    limit: int | None = None
    """What its device has for all this; none: no limit."""


@dataclass(frozen=True)
class ActionPrices:
    """Seconds of the actions of all ranks."""

    overhead_s: float
    """Before a step's first action."""
    ranks: tuple[RankPrices, ...]
    holds: tuple[RankBytes, ...] = ()
    """By rank; empty where nobody asked."""
    slowed: bool = False
    """Whether actions may take longer beside others, which no price says: devices share links, or computing and
    communicating slow each other."""


def price_key(action: Action) -> str:
    """Return what tells apart actions of a rank that differ in their price: all but the micro-batch does.

    >>> price_key(Action("F", 2, 5)), price_key(Action("S", 2, 5, 7, 3)), price_key(Action("T", 0, 1))
    ('F@2', 'S@2>7@3', 'T1')
    """
    kind, stage, index, peer, peer_stage, *_ = action
    if kind == REDUCE_TIED:
        return f"{kind}{index}"
    return f"{kind}@{stage}" if peer < 0 else f"{kind}@{stage}>{peer}@{peer_stage}"


FaultKind = Literal[
    "kill", "stop", "segfault", "exception", "exit", "slow", "nan", "out-of-memory", "disconnect", "disk-full",
    "fail-write", "fail-fsync", "fail-rename",
]  # fmt: skip
_FAULT = re.compile(
    r"(?P<kind>[a-z-]+)@(?P<rank>\d{1,6}):(?P<step>\d{1,12})(?::(?P<action>[A-Z]{1,2})(?P<micro>\d{1,9})?)?"
)
SLOWER_S = 0.05
"""By which a slow rank's actions are longer."""
_FAULT_GRAMMAR = "KIND@RANK:STEP[:ACTION[MICRO-BATCH]], such as kill@1:7:B0"


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong on a rank as it begins an action of a step.

    ``kill``, ``stop`` and ``segfault`` are signals, ``exit`` ends the process, ``disconnect`` shuts its connections,
    ``slow`` has every action from there on take 50 ms more. ``nan`` has not-a-numbers come out of a forward (``F``),
    else stand in the gradients before the update. Of ``disk-full`` and the calls that fail, the next one does.
    """

    kind: FaultKind
    rank: int
    step: int
    """From the run's first."""
    action: str | None = None
    """The kind of the action, as in a program; None: the first of the step."""
    micro_batch: int | None = None
    """None: the first such action."""

    def position(self, actions: Sequence[Action]) -> int:
        """Return the position of the action that it is at, of a rank's; the first of the step, where none is such."""
        if self.kind == "nan" and self.action != FORWARD:
            # Gradients are there at last.
            return next(position for position, action in enumerate(actions) if action.kind == UPDATE)
        kinds = BACKWARDS if self.action == "B" else (self.action,)
        matching = (
            position
            for position, action in enumerate(actions)
            if self.action is None or (action.kind in kinds and self.micro_batch in (None, action.micro_batch))
        )
        first = next(matching, 0)
        # Nobody is told of sends on a CPU: there, what follows one is the next that is.
        return next((at for at in range(first, len(actions)) if actions[at].kind not in SENDS), first)

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Return a fault from its text.

        >>> Fault.parse("kill@1:7:B0")
        Fault(kind='kill', rank=1, step=7, action='B', micro_batch=0)

        Raises:
            UsageError: it is not one; says what one is.
        """
        found = _FAULT.fullmatch(text)
        if found is None:
            raise UsageError(f"a fault is {_FAULT_GRAMMAR}; found {text!r}")
        kind, action = found["kind"], found["action"]
        if kind not in get_args(FaultKind):
            raise UsageError(f"a fault is one of {', '.join(get_args(FaultKind))}; found {kind!r}")
        if action is not None and action not in KINDS:
            raise UsageError(f"an action of a program is one of {', '.join(KINDS)}; found {action!r}")
        micro = None if found["micro"] is None else int(found["micro"])
        return cls(kind, int(found["rank"]), int(found["step"]), action, micro)  # type: ignore[arg-type]

    def __str__(self) -> str:
        action = "" if self.action is None else f":{self.action}{'' if self.micro_batch is None else self.micro_batch}"
        return f"{self.kind}@{self.rank}:{self.step}{action}"
