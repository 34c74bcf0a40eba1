"""Agreement: what all ranks of a script's job find out together before any of them acts.

In comes what a rank was given, or finds wrong; out comes on all ranks the same: that all was sound and alike, or what
is raised. A rank that alone refused its batch would leave the others waiting for its messages.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar, cast

import torch

from autopar.errors import AutoparError, UsageError
from autopar.ranks.context import RankContext
from autopar.ranks.failure import Failure
from autopar.runtime.messages.transport import Transport, sendable

_Result = TypeVar("_Result")


class Agreement:
    """Lets the ranks of a job agree; every rank must ask the same at the same time."""

    def __init__(self, context: RankContext, transport: Transport) -> None:
        self._context, self._ranks, self._transport = context, tuple(range(context.size)), transport

    def sum(self, values: Sequence[float]) -> list[float]:
        """Add up numbers of all ranks."""
        total = torch.tensor(values, dtype=torch.float64)
        self._transport.all_reduce(total, self._ranks).wait()
        return [float(each) for each in total.tolist()]

    def perform(self, act: Callable[[], _Result]) -> _Result:
        """Return what a function gives, once every rank's has given something.

        Raises:
            AutoparError: what the first rank says whose function refuses.
        """
        result, error = None, None
        try:
            result = act()
        except AutoparError as caught:
            error = caught
        self._raise_first(error)
        return cast(_Result, result)

    def rows(
        self, rows: int | None, digest: float, error: AutoparError | None, *, changed: bool = False
    ) -> tuple[int, bool]:
        """Return the number of samples in the batch that ranks were given, and whether some rank's model has changed.

        Args:
            rows: of the batch that this rank was given; None if it was given none.
            digest: of its content; 0 if it was given none.
            error: what this rank finds wrong with it.
            changed: whether this rank's script has changed its model.

        Raises:
            AutoparError: what a rank finds wrong.
            UsageError: batches differ, or no rank was given one.
        """
        own = [float(error is not None), float(changed), -1.0 if rows is None else float(rows), digest]
        found = self._of_all(own)
        if any(flag for flag, *_ in found):
            self._raise_first(error)
        given = [rank for rank, (_, _, count, _) in zip(self._ranks, found, strict=True) if count >= 0]
        if not given:
            raise UsageError("no rank was given a batch")
        first = given[0]
        for rank in given:
            if found[rank][2:] != found[first][2:]:
                raise UsageError(
                    f"ranks {first} and {rank} were given different batches; give every rank the same whole "
                    "mini-batch, of which it takes its own samples (no DistributedSampler)"
                )
        return int(found[first][2]), any(moved for _, moved, *_ in found)

    def any(self, flag: bool) -> bool:
        """Tell whether some rank says so."""
        return any(said for (said,) in self._of_all([float(flag)]))

    def texts(self, text: str) -> list[str]:
        """Return what every rank says, in rank order."""
        return self._context.gather(text)

    def _of_all(self, values: Sequence[float]) -> list[list[float]]:
        """Return the numbers of every rank, in rank order."""
        table = torch.zeros(len(self._ranks), len(values), dtype=torch.float64)
        table[self._context.rank] = torch.tensor(values, dtype=torch.float64)
        self._transport.all_reduce(table, self._ranks).wait()
        found: list[list[float]] = table.tolist()
        return found

    def _raise_first(self, error: AutoparError | None) -> None:
        """Raise what the first rank says that has an error, if one has."""
        # Without a traceback: what is refused is the script's own mistake, which no place in autopar explains.
        own = None if error is None else replace(Failure.of(error), trace="").as_dict()
        for rank, said in enumerate(map(json.loads, self._context.gather(json.dumps(own)))):
            if said is not None:
                raise Failure(**said).as_error(f"rank {rank}: " if len(self._ranks) > 1 else "")


_WORDS = 2**15
"""Numbers of eight bytes that are summed at a time: as many as a processor keeps at hand, and their weights."""
_MIX = 0x9E3779B97F4A7C15
"""An odd number, the golden ratio in 64 bits."""


def digest_of(tensors: Mapping[str, torch.Tensor]) -> float:
    """Return a number, not 0, that differs where names or values do; exact as a float.

    Values are summed up where they lie, each with a weight of its place.
    """
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {_weighted_sum(tensor.detach())} ".encode())
    return float(int.from_bytes(digest.digest()[:6], "big") + 1)


def _weighted_sum(tensor: torch.Tensor) -> int:
    """Return the sum of a tensor's bits, as numbers of eight bytes with weights, modulo 2 ** 64."""
    data = sendable(tensor).reshape(-1).view(torch.uint8)
    whole = len(data) // (8 * _WORDS) * 8 * _WORDS
    rest = torch.zeros(8 * _WORDS, dtype=torch.uint8, device=data.device)
    rest[: len(data) - whole] = data[whole:]
    words = (data if data.storage_offset() % 8 == 0 else data.clone())[:whole].view(torch.int64).view(-1, _WORDS)
    weights, at_once = _weights(data.device), 1 if data.device.type == "cpu" else 256
    parts = [*torch.split(words, at_once), rest.view(torch.int64)[None]]
    total = 0
    for each in torch.cat([(part * weights).sum(1) for part in parts]).tolist():
        total = (total * _MIX + each) % 2**64
    return total


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(_WORDS)
    return (2 * torch.randint(-(2**62), 2**62, (_WORDS,), generator=generator) + 1).to(device)
