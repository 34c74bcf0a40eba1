"""Faults: what is to go wrong in a run, where and when, as data; for tests, and for users' drills."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from autopar.errors import UsageError
from autopar.formats.program import BACKWARDS, FORWARD, KINDS, SENDS, UPDATE, Action

FaultKind = Literal[
    "kill", "stop", "segfault", "exception", "exit", "slow", "nan", "out-of-memory", "disconnect", "disk-full",
    "fail-write", "fail-fsync", "fail-rename",
]  # fmt: skip
_TEXT = re.compile(
    r"(?P<kind>[a-z-]+)@(?P<rank>\d{1,6}):(?P<step>\d{1,12})(?::(?P<action>[A-Z]{1,2})(?P<micro>\d{1,9})?)?"
)
SLOWER_S = 0.05
"""By which a slow rank's actions are longer."""
GRAMMAR = "KIND@RANK:STEP[:ACTION[MICRO-BATCH]], such as kill@1:7:B0"


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
        found = _TEXT.fullmatch(text)
        if found is None:
            raise UsageError(f"a fault is {GRAMMAR}; found {text!r}")
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


def parse_faults(texts: str | Sequence[str]) -> tuple[Fault, ...]:
    """Return the faults of a text, or of several.

    Raises:
        UsageError: one is none; says what one is.
    """
    return tuple(map(Fault.parse, [texts] if isinstance(texts, str) else texts))
