"""Faults: what is to go wrong in a run, where and when, as data; for tests, and for users' drills."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from autopar.errors import UsageError
from autopar.formats.program import KINDS

FaultKind = Literal[
    "kill", "stop", "segfault", "exception", "exit", "slow", "nan", "out-of-memory", "disconnect", "disk-full",
    "fail-write", "fail-fsync", "fail-rename",
]  # fmt: skip
_TEXT = re.compile(
    r"(?P<kind>[a-z-]+)@(?P<rank>\d{1,6}):(?P<step>\d{1,12})(?::(?P<action>[A-Z]{1,2})(?P<micro>\d{1,9})?)?"
)
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
