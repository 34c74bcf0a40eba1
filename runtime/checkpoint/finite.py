"""Finite: what of a checkpoint is not a number, or infinite, that was not so at step 0.

A mask of -inf among the parameters is no fault, nor is a copy of it that the optimizer keeps; losses and gradients may
be finite all the same where weights have become something else that nothing reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import torch

from autopar.formats.checkpoint import NonFiniteTensor, key_of
from autopar.runtime.checkpoint.state import HeldPiece
from autopar.runtime.job import Job
from autopar.runtime.stage.parameters import local

_CHUNK = 2**20
"""Elements that are looked at together: memory for more would be taken beside training's."""


def non_finite_elements(tensor: torch.Tensor) -> int:
    """Return how many elements are not finite.

    >>> non_finite_elements(torch.tensor([1.0, -torch.inf, torch.nan])), non_finite_elements(torch.ones(2).int())
    (2, 0)
    """
    values = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    if not values.is_floating_point():
        return 0
    return sum(map(_count, torch.split(values.detach().reshape(-1), _CHUNK)))


def _count(chunk: torch.Tensor) -> int:
    # Numbers of one byte are stored alone.
    numbers = chunk.float() if chunk.element_size() == 1 else chunk
    if bool(torch.isfinite(torch.linalg.vector_norm(numbers))):
        # As quick as memory is read; squares of finite numbers may overflow, too.
        return 0
    return int(torch.count_nonzero(numbers - numbers))


def non_finite_at_start(job: Job) -> Mapping[str, int]:
    """Return what is not finite of a rank's parameters and of its optimizer's state, by key, before its first step."""
    update = job.update
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in update.optimizer_parameters.items()}
    held: dict[str, torch.Tensor] = {key_of("parameter", name, None): each for name, each in job.parameters.items()}
    for parameter, state in ({} if update.optimizer is None else update.optimizer.state).items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                held[key_of("optimizer", names.get(parameter, ""), str(name))] = value
    counts = {key: non_finite_elements(local(tensor)) for key, tensor in held.items()}
    return {key: count for key, count in counts.items() if count}


def non_finite_tensors(pieces: Iterable[HeldPiece], at_start: Mapping[str, int]) -> tuple[NonFiniteTensor, ...]:
    """Return the parameters, and what the optimizer keeps for them, of which more is not finite than at step 0."""
    counts, allowed = Counter[str](), dict[str, int]()
    for piece in pieces:
        if piece.kind in ("parameter", "optimizer"):
            key, own = key_of(piece.kind, piece.name, piece.state), key_of("parameter", piece.name, None)
            counts[key] += non_finite_elements(piece.tensor)
            allowed[key] = max(at_start.get(key, 0), at_start.get(own, 0))
    more = {key: count - allowed[key] for key, count in counts.items()}
    return tuple(NonFiniteTensor(key=key, elements=count) for key, count in more.items() if count > 0)
