"""Agree: what all ranks of a script find out together before a batch goes through the pipeline.

A rank that alone refuses its batch would leave the others waiting for its messages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

from autopar.errors import AutoparError, FileError, TrainingError, UsageError
from autopar.runtime.transport import Transport, sendable

__all__ = ["Agreement", "digest_of"]

_KINDS = {kind.exit_code: kind for kind in (UsageError, FileError)}
LONGEST = 1000
"""Of a message, in characters."""


class Agreement:
    """One rank's voice; every rank must ask the same at the same time."""

    def __init__(self, rank: int, ranks: tuple[int, ...], transport: Transport) -> None:
        self._rank, self._ranks, self._transport = rank, ranks, transport

    def sum(self, values: Sequence[float]) -> list[float]:
        """Add up numbers of all ranks."""
        total = torch.tensor(values, dtype=torch.float64)
        self._transport.all_reduce(total, self._ranks).wait()
        return [float(each) for each in total.tolist()]

    def refuse(self, error: AutoparError | None) -> None:
        """Raise on all ranks if one of them has something to refuse.

        Raises:
            AutoparError: what the first of them says.
        """
        refusing = self._of_all([float(error is not None)])
        if any(flag for (flag,) in refusing):
            self._raise(error)

    def rows(self, rows: int | None, digest: float, error: AutoparError | None) -> int:
        """Return the number of samples in the batch that ranks were given.

        Args:
            rows: of the batch that this rank was given; None if it was given none.
            digest: of its content, or 0 not to compare it.
            error: what this rank finds wrong with it.

        Raises:
            AutoparError: what a rank finds wrong.
            UsageError: batches differ, or no rank was given one.
        """
        found = self._of_all([float(error is not None), -1.0 if rows is None else float(rows), digest])
        if any(flag for flag, _, _ in found):
            self._raise(error)
        given = [rank for rank, (_, count, _) in zip(self._ranks, found, strict=True) if count >= 0]
        if not given:
            raise UsageError("no rank was given a batch")
        first = given[0]
        for rank in given:
            if found[rank][1:] != found[first][1:]:
                raise UsageError(
                    f"ranks {first} and {rank} were given different batches; give every rank the same whole "
                    "mini-batch, of which it takes its own samples (no DistributedSampler)"
                )
        return int(found[first][1])

    def texts(self, text: str) -> list[str]:
        """Return what every rank says, in rank order."""
        letters = [float(ord(letter)) for letter in text]
        longest = max(int(length) for (length,) in self._of_all([float(len(letters))]))
        # One more: a backend may not add up nothing.
        found = self._of_all([*letters, *[0.0] * (longest + 1 - len(letters))])
        return ["".join(chr(int(letter)) for letter in row if letter) for row in found]

    def _of_all(self, values: Sequence[float]) -> list[list[float]]:
        """Return the numbers of every rank, in rank order."""
        table = torch.zeros(len(self._ranks), len(values), dtype=torch.float64)
        table[self._rank] = torch.tensor(values, dtype=torch.float64)
        self._transport.all_reduce(table, self._ranks).wait()
        found: list[list[float]] = table.tolist()
        return found

    def _raise(self, error: AutoparError | None) -> None:
        text, code = ("", 0) if error is None else (str(error), error.exit_code)
        codes = self._of_all([float(code)])
        for rank, (kind,), said in zip(self._ranks, codes, self.texts(text[:LONGEST]), strict=True):
            if kind:
                raise _KINDS.get(int(kind), TrainingError)(f"rank {rank}: {said}" if len(self._ranks) > 1 else said)


def digest_of(tensors: Mapping[str, torch.Tensor]) -> float:
    """Return a number, not 0, that differs where names or values do; exact as a float."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(sendable(tensor.detach().cpu()).reshape(-1).view(torch.uint8).numpy().tobytes())
    return float(int.from_bytes(digest.digest()[:6], "big") + 1)
