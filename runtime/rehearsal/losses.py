"""Losses: what faults cost in virtual time.

In come faults, and how often checkpoints are saved. Ranks note when in a step a fault would befall them, and go on; a
slow one takes as much longer. Out comes, for every fault that ends a run, how much of it is trained again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from autopar.errors import UsageError
from autopar.formats.faults import SLOWER_S, Fault
from autopar.formats.program import RankProgram
from autopar.runtime.device import PricedClock

_OF_FILES = ("disk-full", "fail-write", "fail-fsync", "fail-rename")


class Moment(NamedTuple):
    """When a fault befalls a rank."""

    fault: str
    step: int
    after_s: float
    """From the step's begin on that rank."""


class Loss(NamedTuple):
    """What a fault costs that ends a run: what has been trained since the checkpoint that it goes on from."""

    fault: str
    step: int
    """In which it happens."""
    checkpoint: int
    """The step of the checkpoint; 0 where there is none yet."""
    lost_s: float
    """Seconds of training that are done again; noticing the fault and starting anew come on top."""


def check_faults(faults: Sequence[Fault], ranks: int, steps: int) -> None:
    """Refuse faults that cannot happen in virtual time.

    Raises:
        UsageError: one is of files, of a rank that there is not, or of a step behind the last.
    """
    for fault in faults:
        if fault.kind in _OF_FILES:
            raise UsageError(f"`inject_fault='{fault}'`: in virtual time no files are written; `autopar run` takes it")
        if fault.rank >= ranks:
            raise UsageError(f"`inject_fault='{fault}'`: the plan has {ranks} ranks, which count from 0")
        if fault.step >= steps:
            raise UsageError(f"`inject_fault='{fault}'`: `steps={steps}` has none of that number: they count from 0")


class FaultMoments:
    """Notes when a rank's faults would befall it, and has it be slow."""

    def __init__(self, faults: Sequence[Fault], rank: int, actions: RankProgram, clock: PricedClock) -> None:
        """Find where they are."""
        self.moments: list[Moment] = []
        self._clock, self._slow = clock, False
        every = list(actions) if any(fault.rank == rank for fault in faults) else []
        self._due = {(fault.step, fault.position(every)): fault for fault in faults if fault.rank == rank}

    def noting(self, note: Callable[[int, int], None]) -> Callable[[int, int], None]:
        """Return what notes actions, and what befalls the rank as they begin."""
        return self._act(note) if self._due else note

    def _act(self, note: Callable[[int, int], None]) -> Callable[[int, int], None]:
        def act(step: int, position: int) -> None:
            note(step, position)
            fault = self._due.get((step, position))
            if fault is not None and fault.kind == "slow":
                self._slow = True
            elif fault is not None:
                self.moments.append(Moment(str(fault), step, self._clock.now_s))
            if self._slow:
                self._clock.spend(SLOWER_S)

        return act


def losses_of(moments: Sequence[Moment], steps_s: Sequence[float], every: int | None) -> tuple[Loss, ...]:
    """Return what faults cost, where every step's seconds are known and a checkpoint is saved every so many steps.

    >>> losses_of([Moment("kill@1:5", 5, 0.25)], [1.0] * 8, 2)
    (Loss(fault='kill@1:5', step=5, checkpoint=4, lost_s=1.25),)
    """
    found = []
    for fault, step, after_s in sorted(moments, key=lambda each: (each.step, each.after_s)):
        checkpoint = 0 if every is None else step // every * every
        found.append(Loss(fault, step, checkpoint, sum(steps_s[checkpoint:step]) + after_s))
    return tuple(found)
