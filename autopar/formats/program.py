"""Program: for every rank, the ordered list of actions it performs in one step.

    {"format": "autopar.program", "version": 1, "ranks": ["F0@0 S0@0>1@1 RG0@0<1@1 B0@0 U@0", "R0@1<0@0 F0@1 ..."]}

An action is written as kind, micro-batch and stage, and for a message the other rank and its stage. ``F3@1`` is the
forward of micro-batch 3 on stage 1, ``B3@1`` its backward, or ``I3@1`` and ``W3@1`` its halves (the gradients of what
the stage received, and those of its parameters). ``S3@0>2@1`` and ``R3@1<0@0`` are the sending and receiving of
activations, ``SG`` and ``RG`` those of gradients, ``A@1`` the reduction among a stage's replicas, ``T0@1`` that of a
parameter shared between stages, ``U@1`` the optimizer's update. ``shift`` is there for a pipeline that is never
flushed: the micro-batches by which each repetition is ahead of the one before.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from autopar.errors import FileError
from autopar.formats.document import SHOWN, parse_json, read_text, write_text

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
"""What the forwards of a mini-batch see, made of the newest weights (:mod:`autopar.policies.predict`)."""
CORRECT = "C"
"""What backwards see until the next update, made of the newest weights (:mod:`autopar.policies.pipemare`, and
``xpipe`` in :mod:`autopar.policies.predict`)."""
BEGIN_SUM = "N"
"""Where a pipeline that is never flushed begins the sum over all ranks, of losses, counts and norms, that the update of
the micro-batch's mini-batch waits for."""
KINDS = (
    FORWARD,
    BACKWARD,
    SEND,
    RECEIVE,
    SEND_GRADIENT,
    RECEIVE_GRADIENT,
    REDUCE,
    REDUCE_TIED,
    UPDATE,
    INPUT_BACKWARD,
    WEIGHT_BACKWARD,
    PREDICT,
    CORRECT,
    BEGIN_SUM,
)
BACKWARDS = (BACKWARD, INPUT_BACKWARD, WEIGHT_BACKWARD)
SENDS, RECEIVES, REDUCTIONS = (SEND, SEND_GRADIENT), (RECEIVE, RECEIVE_GRADIENT), (REDUCE, REDUCE_TIED)

_CODES = {kind: code for code, kind in enumerate(KINDS)}
_TEXT = re.compile(
    r"(?P<kind>SG|RG|[FBIWSRATUPCN])(?P<index>\d*)@(?P<stage>\d+)"
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
    """The micro-batch; of a ``P``, the first of its mini-batch, and of an ``N`` the last; of a ``T``, the index of the
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
        content = parse_json(text, path)
        if not isinstance(content, dict) or content.get("format") != "autopar.program" or content.get("version") != 1:
            raise FileError(f'{path}: $.format: expected "autopar.program" of version 1')
        unknown = sorted(content.keys() - {"format", "version", "shift", "ranks"})
        if unknown:
            raise FileError(f"{path}: $.{unknown[0][:SHOWN]}: unknown key")
        rows = content.get("ranks")
        if not isinstance(rows, list) or not all(isinstance(row, str) for row in rows):
            raise FileError(f"{path}: $.ranks: expected a list of texts")
        shift = content.get("shift", 0)
        if type(shift) is not int or not 0 <= shift < 2**31:
            raise FileError(f"{path}: $.shift: expected a number of micro-batches, found {str(shift)[:SHOWN]!r}")
        ranks = tuple(RankProgram.of(_actions(row, f"{path}: $.ranks[{i}]")) for i, row in enumerate(rows))
        return cls(ranks, shift)


def _actions(row: str, at: str) -> Iterator[Action]:
    for position, text in enumerate(row.split()):
        try:
            yield Action.parse(text)
        except ValueError as error:
            raise FileError(f"{at}, position {position}: {error}") from error
