"""Differences between what ranks have kept of a run and what the plain loop made, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from autopar.capture.plain import PlainRun
from autopar.formats.plan import Plan
from autopar.formats.verified import Difference
from autopar.runtime import weights
from autopar.runtime.kept import BUFFERS, GRADIENTS, PARAMETERS, UNREAD, kept_folder
from autopar.schedules.expand import stages_of

__all__ = ["PROMISED", "Allowed", "Holder", "compare", "holders_of"]


Allowed = Mapping[str, float]
"""Kind -> the largest difference: of gradients, over the model's largest; of others, over their largest element + 1."""
PROMISED: Allowed = {"losses": 1e-10, "gradients": 1e-12, "parameters": 1e-10, "buffers": 1e-10}
"""Of float64: docs/promises.md."""

Tensors = Mapping[str, torch.Tensor]


class Holder(NamedTuple):
    """What one rank holds in the end, or what a whole run in one process gives."""

    where: str
    """Which rank, in words that follow a tensor's name."""
    gradients: Mapping[str, torch.Tensor | None]
    parameters: Tensors
    buffers: Tensors


class _Kept(Mapping[str, torch.Tensor]):
    """The tensors of a folder, each read when it is asked for."""

    def __init__(self, folder: Path, *of: Mapping[str, object]) -> None:
        """Take the folder, and, where not all of its tensors count, in which names those are that do."""
        self._folder = folder
        names = weights.names(folder)
        self._names = sorted(names.intersection(*(each.keys() for each in of)))

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return weights.read(self._folder, {name})[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def holders_of(plan: Plan, folder: Path, truth: PlainRun) -> list[Holder]:
    """Return what the ranks of a run have kept in a folder; buffers are those of first replicas."""
    found = []
    for rank in range(len(plan.devices)):
        gradients, parameters, buffers = (
            _Kept(kept_folder(folder, rank, what)) for what in (GRADIENTS, PARAMETERS, BUFFERS)
        )
        first = stages_of(plan, rank)[1] == 0
        found.append(Holder(f" on rank {rank}", gradients, parameters, buffers if first else {}))
    unread = kept_folder(folder, 0, UNREAD)
    parameters, buffers = _Kept(unread, truth.parameters), _Kept(unread, truth.buffers)
    return [*found, Holder(", which no layer reads", {}, parameters, buffers)]


def compare(
    losses: Sequence[float], holders: Sequence[Holder], truth: PlainRun, allowed: Allowed
) -> tuple[Difference, ...]:
    """Return the largest difference of every kind; what one side alone has differs without end."""
    found = {what: _Worst() for what in PROMISED}
    loss_size = 1 + max(map(abs, truth.losses), default=0.0)
    for step, (loss, expected) in enumerate(zip(losses, truth.losses, strict=True)):
        found["losses"].take(abs(loss - expected) / loss_size, f"step {step}")
    largest = max((_largest(each) for each in truth.gradients.values() if each is not None), default=0.0)
    for holder in holders:
        for name in holder.parameters:
            mine, theirs = holder.gradients.get(name), truth.gradients.get(name)
            found["gradients"].take(*_of_gradients(mine, theirs, largest, f"{name}{holder.where}"))
    for what in ("parameters", "buffers"):
        expected_values: Tensors = getattr(truth, what)
        for holder in holders:
            values: Tensors = getattr(holder, what)
            for name, value in values.items():
                place = f"{name}{holder.where}"
                known = expected_values.get(name)
                found[what].take(math.inf if known is None else _relative(value, known), place)
        for name in expected_values.keys() - {name for holder in holders for name in getattr(holder, what)}:
            found[what].take(math.inf, f"{name}, which no rank holds")
    units = {"losses": "the largest loss + 1", "gradients": "the model's largest gradient"}
    return tuple(
        each.told(what, allowed[what], units.get(what, "their largest element + 1")) for what, each in found.items()
    )


def _of_gradients(
    mine: torch.Tensor | None, theirs: torch.Tensor | None, largest: float, place: str
) -> tuple[float, str]:
    """Return how two gradients differ, and where; one that is none differs from one that is zero."""
    if mine is None or theirs is None:
        if mine is theirs:
            return 0.0, place
        side = "none, where plain training has one" if mine is None else "one, where plain training has none"
        return math.inf, f"{place}: {side}"
    difference = _distance(mine, theirs)
    return (difference / largest if largest else math.inf if difference else 0.0), place


def _relative(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    return _distance(mine, theirs) / (1 + _largest(theirs))


def _distance(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest difference of two tensors; without end where they are of different shapes or types."""
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return math.inf
    if mine.is_sparse or theirs.is_sparse:
        mine, theirs = mine.to_dense(), theirs.to_dense()
    differ = ~((mine == theirs) | (mine.isnan() & theirs.isnan()))
    if not differ.any():
        return 0.0
    wide = torch.complex128 if mine.is_complex() else torch.float64
    found = float((mine[differ].to(wide) - theirs[differ].to(wide)).abs().max())
    return math.inf if math.isnan(found) else found


def _largest(tensor: torch.Tensor) -> float:
    """Return the largest absolute value that is finite."""
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    values = dense.abs().double() if not dense.dtype.is_floating_point or dense.is_complex() else dense.double().abs()
    finite = values[values.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


@dataclass
class _Worst:
    """The largest difference so far."""

    largest: float = -1.0
    where: str = ""
    compared: int = 0

    def take(self, difference: float, where: str) -> None:
        self.compared += 1
        if difference > self.largest or math.isnan(difference):
            self.largest, self.where = (math.inf if math.isnan(difference) else difference), where

    def told(self, what: str, allowed: float, unit: str) -> Difference:
        largest = None if math.isinf(self.largest) else max(0.0, self.largest)
        return Difference(what, self.compared, largest, self.where, allowed, unit)
