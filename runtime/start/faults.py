"""FaultInjector: has a rank's faults happen, as it begins the actions that they name."""

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
from typing import Any

import torch

from autopar.formats.program import FORWARD, SLOWER_S, Fault, RankProgram
from autopar.runtime.stage.parameters import local
from autopar.runtime.start.job import Job


class FaultInjector:
    """Stands in the way of what notes a rank's actions."""

    def __init__(self, faults: Sequence[Fault], rank: int, actions: RankProgram) -> None:
        """Find where the faults of a rank are; the job is given once there is one."""
        self.job: Job | None = None
        self._due: dict[tuple[int, int], Fault] = {}
        self._slow_from: tuple[int, int] | None = None
        every = list(actions)
        for fault in faults:
            if fault.rank == rank:
                self._due[fault.step, fault.position(every)] = fault

    def noting(self, note: Callable[[int, int], None]) -> Callable[[int, int], None]:
        """Return what notes actions and has faults happen as they begin."""

        def act(step: int, position: int) -> None:
            note(step, position)
            fault = self._due.pop((step, position), None)
            if fault is not None:
                self._happen(fault, (step, position))
            if self._slow_from is not None and (step, position) >= self._slow_from:
                time.sleep(SLOWER_S)

        return act

    def _happen(self, fault: Fault, at: tuple[int, int]) -> None:
        kind = fault.kind
        if kind == "slow":
            self._slow_from = at
        elif kind in _SIGNALS:
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
        assert self.job is not None
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
    before, real = resource.getrlimit(resource.RLIMIT_FSIZE), os.unlink
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))

    def allow(*arguments: Any, **options: Any) -> None:  # noqa: ANN401
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        os.unlink = real
        real(*arguments, **options)

    os.unlink = allow


def _disconnect() -> None:
    """Shut this process' connections, as a network that is gone does."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as found:
                    found.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue
