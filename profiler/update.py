"""The optimizer's step over layers' parameters: its time, and that of the adding up before it."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import nn

from autopar.capture import UserModel
from autopar.capture.source import NamedParameters

WARM_UP, REPEATS = 2, 7
Kind = TypeVar("Kind", bound=Hashable)
# Copies of the weights, their gradients, the terms added to these, and two moments.
COPIES = 5


@dataclass(frozen=True)
class Update:
    """What training costs a layer once a step, and once a micro-batch but the first."""

    seconds: float
    accumulate_s: float
    """Adding a micro-batch's gradients to those that are there."""


def measure_updates(
    user: UserModel, layers: Sequence[tuple[Kind, NamedParameters]], device: torch.device
) -> dict[Kind, Update]:
    """Return, by kind, the optimizer's step over copies of parameters.

    ``layers`` gives a kind and the parameters of every layer to measure. Where memory has room, copies of all are
    there at once and take turns, so that none finds its own in the caches that would not find them in a real step.
    """
    room = _free_bytes(device) // 2 // COPIES
    groups = [list(layers)]
    if sum(each.nbytes for _, parameters in layers for _, each in parameters) > room:
        groups = [[first] for first in dict(reversed(list(layers))).items()]
    times: dict[Kind, _Times] = {}
    for group in groups:
        turns = [_Turn(user, times.setdefault(kind, _Times()), parameters, device, room) for kind, parameters in group]
        for number in range(WARM_UP + REPEATS):
            for turn in turns:
                turn.take(recorded=number >= WARM_UP)
    return {kind: Update(*map(statistics.median, (found.update, found.add))) for kind, found in times.items()}


@dataclass
class _Times:
    update: list[float] = field(default_factory=list)
    add: list[float] = field(default_factory=list)


class _Turn:
    """One layer's copies and their optimizer."""

    def __init__(
        self, user: UserModel, times: _Times, parameters: NamedParameters, device: torch.device, room: int
    ) -> None:
        self._times, self._device = times, device
        self._copies, self._scale = _copies([each for _, each in parameters], room)
        named = [(name, copy) for (name, _), copy in zip(parameters, self._copies, strict=True)]
        self._step: Callable[[], object] = user.make_optimizer(named).step if named else _nothing

    def take(self, recorded: bool) -> None:
        terms = [torch.zeros_like(copy) for copy in self._copies]
        add_s, update_s = self._seconds(lambda: self._add(terms)), self._seconds(self._step)
        if recorded:
            self._times.add.append(self._scale * add_s)
            self._times.update.append(self._scale * update_s)

    def _add(self, terms: Sequence[torch.Tensor]) -> None:
        for copy, term in zip(self._copies, terms, strict=True):
            if copy.grad is not None:
                copy.grad.add_(term)

    def _seconds(self, work: Callable[[], object]) -> float:
        _wait(self._device)
        started = time.perf_counter()
        work()
        _wait(self._device)
        return time.perf_counter() - started


def _copies(parameters: Sequence[nn.Parameter], room: int) -> tuple[list[nn.Parameter], float]:
    """Return copies with gradients; of parameters larger than the room, of their first rows, and how much more all is.

    An optimizer's step takes as long for a number as for any other.
    """
    part = min(1.0, room / max(1, _bytes(parameters)))
    parts = [each.detach()[: max(1, int(part * len(each)))] if part < 1 and each.dim() else each for each in parameters]
    copies = [nn.Parameter(each.detach().clone()) for each in parts]
    for copy in copies:
        copy.grad = torch.full_like(copy, 1e-3)
    return copies, _bytes(parameters) / max(1, _bytes(copies))


def _bytes(parameters: Sequence[nn.Parameter]) -> int:
    return sum(parameter.nbytes for parameter in parameters)


def _nothing() -> None:
    pass


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
