"""Failure: what went wrong in a rank, told apart as cause or consequence."""

from __future__ import annotations

import traceback
from dataclasses import asdict, dataclass, replace

from autopar.errors import (
    AutoparError,
    FileError,
    InfeasibleError,
    OutOfMemoryError,
    TrainingError,
    UsageError,
    cause_of,
    shorten,
    text_of,
)


class PeerLostError(TrainingError):
    """A message or reduction did not come about: a consequence of a peer's failure, unless nothing else failed."""


class PeerFailedError(PeerLostError):
    """Another rank has found what this one only follows from, and says so itself."""


_BACKWARDS = 2**32
"""Of an order: no forward comes behind it."""


class NonFiniteError(TrainingError):
    """A loss, a gradient or what a stage gives is not finite; of several that say so, the least ``order`` is the cause.

    What appears in a forward spreads to later stages, and in a backward to earlier ones.
    """

    def __init__(self, message: str, stage: int, *, forward: bool) -> None:
        super().__init__(message)
        self.stage, self.forward = stage, forward

    @property
    def order(self) -> int:
        """By which what came first is told."""
        return self.stage if self.forward else _BACKWARDS - self.stage

    def at(self, place: str) -> NonFiniteError:
        """Return the error with its place."""
        return type(self)(f"{place}: {self}", self.stage, forward=self.forward)


class NonFiniteBesideError(NonFiniteError, PeerFailedError):
    """A rank that has lost others finds that what its stage gave was not finite: a cause, if others say the like."""


def is_of_connection(error: BaseException) -> bool:
    """Tell whether a library's error says that what connects ranks has failed, and not what it carried.

    >>> is_of_connection(RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    True
    """
    named = type(error).__name__ in ("DistBackendError", "DistNetworkError")
    return named or (isinstance(error, RuntimeError) and "/gloo/transport/" in text_of(error))


class SaidElsewhereError(AutoparError):
    """All ranks fail of the same, and rank 0 says of what."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Failure:
    """An error of one rank, as plain data."""

    message: str
    """What and where, one line."""
    exit_code: int
    consequence: bool
    """Whether another rank's failure is the likely cause."""
    has_location: bool
    """Whether the message says where by itself."""
    trace: str
    """The traceback, for ``--debug``; empty where none is to be shown."""
    memory_bytes: int | None = None
    """Of a rank that ran out of memory: what to plan with."""
    connection: bool = False
    """Whether what connects the rank with another has failed, as far as it knows."""
    order: int | None = None
    """Of numbers that are not finite: see :class:`NonFiniteError`."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe an error raised in this process."""
        trace = shorten("".join(traceback.format_exception(error)))
        if isinstance(error, AutoparError):
            memory_bytes = error.memory_bytes if isinstance(error, OutOfMemoryError) else None
            lost = isinstance(error, PeerLostError)
            connection = lost and not isinstance(error, PeerFailedError)
            order = error.order if isinstance(error, NonFiniteError) else None
            return cls(str(error), error.exit_code, lost, True, trace, memory_bytes, connection, order)
        frames = traceback.extract_tb(error.__traceback__)
        where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        # A collective that fails, fails because of a peer.
        consequence = bool(frames) and "/torch/distributed/" in frames[-1].filename
        found = cls(f"{cause_of(error)}{where}", TrainingError.exit_code, consequence, False, trace)
        return replace(found, connection=is_of_connection(error))

    def as_error(self, where: str = "") -> AutoparError:
        """Return an error of the kind that was raised, its traceback in a note; ``where`` precedes the message."""
        message = f"{where}{self.message}"
        kinds = {kind.exit_code: kind for kind in (UsageError, InfeasibleError, FileError)}
        error: AutoparError = kinds.get(self.exit_code, TrainingError)(message)
        if self.order is not None:
            error = NonFiniteError(message, self.order, forward=True)
        if self.memory_bytes is not None:
            error = OutOfMemoryError(message, self.memory_bytes)
        if self.trace:
            error.add_note(self.trace)
        return error

    def as_common_error(self, rank: int) -> AutoparError:
        """Return the error that a rank raises where all ranks know of the failure: only rank 0's speaks."""
        return self.as_error() if rank == 0 else SaidElsewhereError(self.message, self.exit_code)

    def as_dict(self) -> dict[str, object]:
        return asdict(self)
