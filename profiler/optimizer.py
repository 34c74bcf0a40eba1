"""The optimizer's step over layers' parameters: its time, that of the adding up before it, its bytes and its memory.

Times are measured on the device; of a GPU, those of kernels, which add up over a rank's layers as launches of its one
step over all of them do not. How long it waits for the first of these is measured of a step over all layers. What a
step moves is found by stepping tiny parameters; what the optimizer keeps, and what its step holds for a while, on
tensors without data.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.capture import Layer, UserModel
from autopar.capture.model.effects import StorageTracker, storage_of
from autopar.capture.model.source import NamedParameters, user_code
from autopar.profiler.device import CallClock, time_calls
from autopar.profiler.kernels import KernelLog

WARM_UP, REPEATS = 2, 7
Kind = TypeVar("Kind", bound=Hashable)
# Copies of the weights, their gradients, the terms added to these, and two moments.
COPIES = 5


@dataclass(frozen=True)
class UpdateCosts:
    """What training costs a layer once a step, and once a micro-batch but the first."""

    seconds: float
    accumulate_s: float
    """Adding a micro-batch's gradients to those that are there."""

    def later(self, seconds: float) -> UpdateCosts:
        """Return them where the device waits so long for the host before the optimizer's step."""
        return replace(self, seconds=self.seconds + seconds)


def parameters_at(layer: Layer, places: Sequence[int]) -> NamedParameters:
    """Return those of a layer's parameters that are at some places among them, with their names in the model."""
    named = tuple(layer.parameters.items())
    return [(named[place][1], layer.parameter(named[place][0])) for place in places]


def measure_updates(
    user: UserModel, layers: Sequence[tuple[Kind, NamedParameters]], device: torch.device
) -> dict[Kind, UpdateCosts]:
    """Return, by kind, the optimizer's step over copies of parameters.

    ``layers`` gives a kind and the parameters of every layer to measure. Where memory has room, copies of all are
    there at once and take turns, so that none finds its own in the caches that would not find them in a real step.
    """
    most_bytes = _free_bytes(device) // 2 // COPIES
    groups = [list(layers)]
    if sum(each.nbytes for _, parameters in layers for _, each in parameters) > most_bytes:
        groups = [[first] for first in dict(reversed(list(layers))).items()]
    times: dict[Kind, list[tuple[float, float]]] = {kind: [] for kind, _ in layers}
    for group in groups:
        turns = [(kind, _LayerOptimizer(user, parameters, device, most_bytes)) for kind, parameters in group]

        def run(clock: CallClock, turns: Sequence[tuple[Kind, _LayerOptimizer]] = turns) -> None:
            for _ in range(WARM_UP + REPEATS):
                for _, turn in turns:
                    turn.take(clock)

        with user_code(user.path, "the optimizer's step()"):
            found = [each.seconds for each in time_calls(device, run)]
        # Of a take, first the adding up, then the step.
        pairs = list(zip(found[::2], found[1::2], strict=True))[WARM_UP * len(turns) :]
        for number, (add_s, update_s) in enumerate(pairs):
            kind, turn = turns[number % len(turns)]
            times[kind].append((turn.scale * update_s, turn.scale * add_s))
    columns = {kind: zip(*found, strict=True) for kind, found in times.items()}
    return {kind: UpdateCosts(*map(statistics.median, pair)) for kind, pair in columns.items()}


def measure_step(user: UserModel, parameters: NamedParameters, device: torch.device) -> float | None:
    """Return the seconds of one step over copies of parameters, of a host that waits for a GPU before and after it.

    As in a run: the host looks whether all gradients are finite, and only then launches the step. None where memory has
    no room for the copies.
    """
    most_bytes = _free_bytes(device) // 2 // COPIES
    if sum(each.nbytes for _, each in parameters) > most_bytes:
        return None
    copies, _ = _copies([each for _, each in parameters], most_bytes)
    named = [(name, copy) for (name, _), copy in zip(parameters, copies, strict=True)]
    gradients = [copy.grad for copy in copies if copy.grad is not None]
    with user_code(user.path, "the optimizer's step()"):
        optimizer, times = user.make_optimizer(named), list[float]()
        for _ in range(WARM_UP + REPEATS):
            torch.cuda.synchronize(device)
            started_s = time.perf_counter()
            float(torch.stack(torch._foreach_norm(gradients)).sum())
            optimizer.step()
            torch.cuda.synchronize(device)
            times.append(time.perf_counter() - started_s)
    return statistics.median(times[WARM_UP:])


class _LayerOptimizer:
    """One layer's copies and their optimizer."""

    def __init__(self, user: UserModel, parameters: NamedParameters, device: torch.device, most_bytes: int) -> None:
        self._copies, self.scale = _copies([each for _, each in parameters], most_bytes)
        named = [(name, copy) for (name, _), copy in zip(parameters, self._copies, strict=True)]
        self._step: Callable[[], object] = user.make_optimizer(named).step if named else lambda: None

    def take(self, clock: CallClock) -> None:
        """Time adding gradients up, and then a step."""
        terms = [torch.zeros_like(copy) for copy in self._copies]
        clock.time(lambda: self._add(terms))
        clock.time(self._step)

    def _add(self, terms: Sequence[torch.Tensor]) -> None:
        for copy, term in zip(self._copies, terms, strict=True):
            if copy.grad is not None:
                copy.grad.add_(term)


def _copies(parameters: Sequence[nn.Parameter], most_bytes: int) -> tuple[list[nn.Parameter], float]:
    """Return copies with gradients; of larger parameters, of their first rows, and how much more all is.

    An optimizer's step takes as long for a number as for any other.
    """
    part = min(1.0, most_bytes / max(1, _bytes(parameters)))
    parts = [each.detach()[: max(1, int(part * len(each)))] if part < 1 and each.dim() else each for each in parameters]
    copies = [nn.Parameter(each.detach().clone()) for each in parts]
    for copy in copies:
        copy.grad = torch.full_like(copy, 1e-3)
    return copies, _bytes(parameters) / max(1, _bytes(copies))


def _bytes(parameters: Sequence[nn.Parameter]) -> int:
    return sum(parameter.nbytes for parameter in parameters)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


@dataclass(frozen=True)
class OptimizerMemory:
    """Bytes of an optimizer, by kind of layer."""

    state: Mapping[str, int]
    workspace: Mapping[str, int]
    """Beside parameters, gradients and state, while the optimizer steps."""
    at_once: bool
    """Whether it works on all parameters at once, so that layers' workspaces add up."""


def optimizer_memory(user: UserModel, layers: Mapping[str, NamedParameters], device: torch.device) -> OptimizerMemory:
    """Return the bytes of the user's optimizer for every layer's trained parameters, whose shapes alone matter.

    On CUDA, optimizers of torch work on many parameters at once unless told otherwise; here they are told so, because
    tensors without data lie on no device. An optimizer that reads values is stepped on real ones, layer by layer.
    """
    found = {kind: memory_of(user, parameters, device) for kind, parameters in layers.items()}
    some = [kind for kind, parameters in layers.items() if parameters]
    # Of a single kind there can be several layers, too.
    several = some if len(some) > 1 else 2 * some
    total = memory_of(user, [each for kind in several for each in layers[kind]], device)[1]
    each = [found[kind][1] for kind in several]
    return OptimizerMemory(
        state={kind: state for kind, (state, _) in found.items()},
        workspace={kind: workspace for kind, (_, workspace) in found.items()},
        at_once=2 * total > max(each, default=0) + sum(each),
    )


def work_at_once(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer of torch work on many parameters at once unless told otherwise, as it would on CUDA."""
    for group in optimizer.param_groups:
        if group.get("foreach", True) is None and not group.get("fused"):
            group["foreach"] = True


def memory_of(user: UserModel, named: NamedParameters, device: torch.device) -> tuple[int, int]:
    """Return the bytes of an optimizer's state for trained ones of parameters, and of what its step holds for a while.

    It makes the state in its first step.
    """
    parameters = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    if not parameters:
        return 0, 0
    try:
        return _step_twice(user, parameters, device, FakeTensorMode())
    except Exception:
        # Fake tensors have no values that the optimizer could read; whatever it does wrong, it does with real ones too.
        with user_code(user.path, "the optimizer's step()"):
            return _step_twice(user, parameters, device, nullcontext())


def _step_twice(
    user: UserModel, parameters: NamedParameters, device: torch.device, mode: AbstractContextManager[object]
) -> tuple[int, int]:
    with mode:
        # Not zeros: an optimizer may divide by a norm.
        copies = [(name, nn.Parameter(torch.full(each.shape, 0.5, dtype=each.dtype))) for name, each in parameters]
        for _, copy in copies:
            copy.grad = torch.full_like(copy, 1e-3)
        with StorageTracker() as tracker:
            optimizer = user.make_optimizer(copies)
            if device.type == "cuda":
                work_at_once(optimizer)
            optimizer.step()
            tracker.peak_bytes = tracker.alive_bytes
            optimizer.step()
        sizes: dict[int, int] = {}
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    sizes[storage_of(value)] = value.untyped_storage().nbytes()
        return sum(sizes.values()), int(tracker.peak_bytes - tracker.alive_bytes)


_NUMBERS = 4096
# Kernels that move less than this are over a count of steps, which does not grow with the parameters.
_COUNT_BYTES = 64


def moved_per_number(user: UserModel, parameters: NamedParameters) -> float:
    """Return the bytes that the user's optimizer reads and writes per number in the trained ones of parameters.

    Counted over the kernels of its second step, on parameters with as many dimensions; as on CUDA, torch's own
    optimizers work on many of them at once unless told otherwise.
    """
    trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    if not trained:
        return 0.0
    small = [nn.Parameter(torch.full(_shape(each.dim()), 0.5, dtype=each.dtype)) for _, each in trained]
    optimizer = user.make_optimizer([(name, each) for (name, _), each in zip(trained, small, strict=True)])
    work_at_once(optimizer)
    for parameter in small:
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    with KernelLog() as log:
        optimizer.step()
    moved = [kernel.read_bytes + kernel.written_bytes for kernel in log.kernels]
    numbers = sum(parameter.numel() for parameter in small)
    return float(sum(size for size in moved if size > _COUNT_BYTES) / numbers)


def _shape(dimensions: int) -> tuple[int, ...]:
    """Return a shape of about as many numbers whatever its dimensions.

    >>> _shape(1), _shape(2), _shape(4)
    ((4096,), (64, 64), (8, 8, 8, 8))
    """
    return (round(_NUMBERS ** (1 / dimensions)),) * dimensions if dimensions else ()
