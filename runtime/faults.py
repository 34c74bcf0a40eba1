"""Faults: drills, in which a rank has something go wrong as it begins an action.

In come the faults that a user asks for, and what notes a rank's actions. Out comes what notes them and has the faults
happen. In virtual time none does: a rank notes when one would befall it, and goes on; a slow one takes as much longer.
Of every fault that ends a run it is then found how much is trained again, by how often checkpoints are saved.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import resource
import signal
import socket
import stat
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from autopar.errors import UsageError
from autopar.formats.program import FORWARD, SLOWER_S, Fault, RankProgram
from autopar.runtime.job import Job
from autopar.runtime.stage.parameters import local

_OF_FILES = ("disk-full", "fail-write", "fail-fsync", "fail-rename")


def check_faults(faults: Sequence[Fault], ranks: int, virtual_steps: int | None = None) -> None:
    """Refuse faults that cannot happen.

    Args:
        faults: what is to go wrong.
        ranks: how many there are.
        virtual_steps: how many steps there are in virtual time; None: they are those of a run.

    Raises:
        UsageError: one is of a rank that there is not; or, in virtual time, of files, or of a step behind the last.
    """
    for fault in faults:
        if virtual_steps is not None and fault.kind in _OF_FILES:
            raise UsageError(f"`inject_fault='{fault}'`: in virtual time no files are written; `autopar run` takes it")
        if fault.rank >= ranks:
            raise UsageError(f"`inject_fault='{fault}'`: the plan has {ranks} ranks, which count from 0")
        if virtual_steps is not None and fault.step >= virtual_steps:
            steps = f"`steps={virtual_steps}`"
            raise UsageError(f"`inject_fault='{fault}'`: {steps} has none of that number: they count from 0")


class Drill:
    """The faults of one rank."""

    def __init__(
        self,
        faults: Sequence[Fault],
        rank: int,
        actions: RankProgram,
        happen: Callable[[Fault, int], None],
        spend: Callable[[float], None] = time.sleep,
    ) -> None:
        """Find where they are.

        Args:
            faults: of all ranks.
            rank: which rank this is.
            actions: its program.
            happen: has a fault happen, in a step, but for ``slow``.
            spend: lets seconds pass.
        """
        own = [fault for fault in faults if fault.rank == rank]
        every = list(actions) if own else []
        self._due = {(fault.step, fault.position(every)): fault for fault in own}
        self._happen, self._spend, self._slow = happen, spend, False

    def noting(self, note: Callable[[int, int], None]) -> Callable[[int, int], None]:
        """Return what notes actions, and has faults happen as they begin."""

        def act(step: int, position: int) -> None:
            note(step, position)
            fault = self._due.get((step, position))
            if fault is not None and fault.kind == "slow":
                self._slow = True
            elif fault is not None:
                self._happen(fault, step)
            if self._slow:
                self._spend(SLOWER_S)

        return act if self._due else note


class Injection:
    """Has faults happen in this process."""

    job: Job
    """The rank's, given once it is built."""

    def __call__(self, fault: Fault, step: int) -> None:
        """Have one happen."""
        kind = fault.kind
        if kind in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[kind])
        elif kind == "segfault":
            ctypes.string_at(0)
        elif kind == "exit":
            os._exit(3)
        elif kind == "exception":
            raise RuntimeError(f"injected: {fault}")
        elif kind == "out-of-memory":
            raise torch.OutOfMemoryError(f"injected: {fault}")
        elif kind == "disconnect":
            _disconnect()
        elif kind == "nan":
            self._poison(fault)
        elif kind == "fail-write":
            _forbid_writing()
        else:
            _fail_next(*_CALLS[kind])

    def _poison(self, fault: Fault) -> None:
        """Have not-a-numbers come out of a forward, else stand in the gradients that are there."""
        if fault.action == FORWARD:
            module = next(iter(self.job.stages.values())).layers[-1].module

            def spoil(_: object, __: object, outputs: Any) -> tuple[torch.Tensor, ...]:  # noqa: ANN401
                handle.remove()
                return tuple(each * math.nan if each.is_floating_point() else each for each in outputs)

            handle = module.register_forward_hook(spoil)
            return
        for parameter in self.job.parameters.values():
            if parameter.grad is not None:
                local(parameter.grad).fill_(math.nan)


_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_CALLS = {
    "disk-full": ("fsync", errno.ENOSPC),
    "fail-fsync": ("fsync", errno.EIO),
    "fail-rename": ("replace", errno.EIO),
}


def _fail_next(name: str, code: int) -> None:
    """Have the next call of a function of ``os`` fail; of a folder, nobody depends on its outcome."""
    real = getattr(os, name)

    def fail(first: Any, *others: Any, **options: Any) -> Any:  # noqa: ANN401
        if name == "fsync" and not stat.S_ISREG(os.fstat(first).st_mode):
            return real(first, *others, **options)
        setattr(os, name, real)
        raise OSError(code, os.strerror(code))

    setattr(os, name, fail)


def _forbid_writing() -> None:
    """Have the system refuse to let this process' files grow, until what one has failed at is removed."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before, unlink, truncate = resource.getrlimit(resource.RLIMIT_FSIZE), os.unlink, os.ftruncate
    none = 0, before[1]

    def allow(*arguments: Any, **options: Any) -> None:  # noqa: ANN401
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        os.unlink, os.ftruncate = unlink, truncate
        unlink(*arguments, **options)

    def grow(memory: int, size: int) -> None:
        """Grow what ranks share, which has a file's limit and is none."""
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        truncate(memory, size)
        if os.unlink is allow:
            resource.setrlimit(resource.RLIMIT_FSIZE, none)

    os.unlink, os.ftruncate = allow, grow
    resource.setrlimit(resource.RLIMIT_FSIZE, none)


def _disconnect() -> None:
    """Shut this process' connections, as a network that is gone does, and nothing that listens: Gloo would abort."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as found:
                    if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue


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
