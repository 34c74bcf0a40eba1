"""Compare: what ranks end with, against the plain loop and by what docs/howto/verify.md allows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from autopar.capture.plain.mini_batch import PlainRun
from fuzzing.ranks import Kept

__all__ = ["Difference", "worst"]

FIRST, LATER = 1e-12, 1e-10

Difference = tuple[str, float]
"""What differs, and by how many times what is allowed; infinite where one is there and the other not."""


def worst(truth: PlainRun, ranks: Sequence[Kept]) -> Difference:
    """Return what differs most, and on which rank."""
    return max(_differences(truth, ranks), key=lambda each: each[1] if each[1] == each[1] else math.inf)


def _differences(truth: PlainRun, ranks: Sequence[Kept]) -> list[Difference]:
    found = [*_of_losses(truth, ranks)]
    largest = max((_largest(each) for each in truth.gradients.values() if each is not None), default=0.0)
    for rank, kept in enumerate(ranks):
        for name, gradient in kept.gradients.items():
            found.append((f"gradient of {name}, rank {rank}", _gradient(gradient, truth.gradients[name], largest)))
        states = [("parameter", kept.parameters, truth.parameters)]
        states += [("buffer", kept.buffers, truth.buffers)] if kept.replica == 0 else []
        for kind, mine, theirs in states:
            for name, value in mine.items():
                found.append((f"{kind} {name}, rank {rank}", _over(value, theirs[name])))
    missing = truth.parameters.keys() - {name for kept in ranks for name in kept.parameters}
    trained = [name for name in missing if truth.gradients[name] is not None]
    return found + [(f"parameter {name} is on no rank", math.inf) for name in trained]


def _of_losses(truth: PlainRun, ranks: Sequence[Kept]) -> list[Difference]:
    found = []
    for step, expected in enumerate(truth.losses):
        parts = [kept.losses[step] for kept in ranks]
        total, count = sum(part for part, _ in parts), sum(count for _, count in parts)
        loss = total / count if count else total
        found.append((f"loss of step {step}", abs(loss - expected) / (LATER * (1 + abs(expected)))))
    return found


def _gradient(mine: torch.Tensor | None, theirs: torch.Tensor | None, largest: float) -> float:
    if mine is None or theirs is None:
        return 0.0 if mine is theirs else math.inf
    return float((mine - theirs).abs().max()) / (FIRST * largest or FIRST) if mine.numel() else 0.0


def _over(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    if mine.shape != theirs.shape:
        return math.inf
    if theirs.is_sparse:
        mine, theirs = mine.to_dense(), theirs.to_dense()
    if not theirs.numel():
        return 0.0
    if not (theirs.is_floating_point() or theirs.is_complex()):
        return 0.0 if torch.equal(mine, theirs) else math.inf
    return float((mine - theirs).abs().max()) / (LATER * _largest(theirs) + LATER)


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
