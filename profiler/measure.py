"""Time layers: in rounds over all of them, so that the machine's drift spreads evenly.

Of identical layers (equal fingerprints) up to sixteen are run and their times pooled, so that weights are as cold in
the caches and memory as freshly mapped as in a real step. Within a round all forwards precede all backwards, as in a
real step, and backwards add to gradients that are already there, as all but a step's first micro-batch do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from autopar.capture import Layer
from autopar.profiler.passes import Inputs, LayerPass

__all__ = ["REPRESENTATIVES", "Timing", "measure", "representatives", "spread"]

REPRESENTATIVES = 16
MIN_ROUNDS, MAX_ROUNDS = 3, 40


@dataclass
class Timing:
    """Times of one kind of layer at one micro-batch size, in seconds."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)


def representatives(layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers to run: at most sixteen of each kind, spread evenly, in order."""
    kinds: dict[str, list[Layer]] = {}
    for layer in layers:
        kinds.setdefault(layer.fingerprint, []).append(layer)
    chosen = set()
    for same in kinds.values():
        count = min(REPRESENTATIVES, len(same))
        chosen |= {same[index * len(same) // count].name for index in range(count)}
    return [layer for layer in layers if layer.name in chosen]


def measure(
    layers: Sequence[Layer],
    inputs: Mapping[int, Mapping[str, Inputs]],
    loss: tuple[str, ...],
    device: torch.device,
    budget_s: float,
    progress: Callable[[str, float], None],
) -> dict[tuple[str, int], Timing]:
    """Return times by fingerprint and micro-batch size.

    ``inputs`` holds, by size and layer name, what to run on. One round of every size warms up; rounds go on until the
    budget is used up, at least three.
    """
    timings = {(layer.fingerprint, size): Timing() for layer in layers for size in inputs}
    for size in inputs:
        _round(layers, inputs[size], loss, device)
    started = time.perf_counter()
    for number in range(MAX_ROUNDS):
        for size in inputs:
            for layer, (forward_s, backward_s) in _round(layers, inputs[size], loss, device):
                timing = timings[layer.fingerprint, size]
                timing.forward.append(forward_s)
                timing.backward.append(backward_s)
        used = time.perf_counter() - started
        rounds = number + 1
        progress("timing layers", min(1.0, max(used / budget_s, rounds / MAX_ROUNDS)))
        if rounds >= MIN_ROUNDS and used * (rounds + 1) / rounds > budget_s:
            break
    return timings


def _round(
    layers: Sequence[Layer], inputs: Mapping[str, Inputs], loss: tuple[str, ...], device: torch.device
) -> list[tuple[Layer, tuple[float, float]]]:
    passes = [LayerPass(layer, inputs[layer.name], loss) for layer in layers]
    clock = _CudaClock(device) if device.type == "cuda" else _Clock()
    for work in passes:
        clock.time(work.forward)
        work.prepare_backward()
    for work in reversed(passes):
        clock.time(work.backward)
    times = clock.seconds()
    return list(zip(layers, zip(times, reversed(times), strict=True), strict=False))


class _Clock:
    """Wall-clock times of calls."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def time(self, work: Callable[[], None]) -> None:
        started = time.perf_counter()
        work()
        self._times.append(time.perf_counter() - started)

    def seconds(self) -> list[float]:
        """Return the times of all calls, in order."""
        return self._times


class _CudaClock(_Clock):
    """Times between events of the device: calls follow each other without waiting for the host."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        torch.cuda.synchronize(device)
        self._device = device
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def time(self, work: Callable[[], None]) -> None:
        pair = (_event(), _event())
        pair[0].record()
        work()
        pair[1].record()
        self._events.append(pair)

    def seconds(self) -> list[float]:
        torch.cuda.synchronize(self._device)
        return [first.elapsed_time(second) / 1e3 for first, second in self._events]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def spread(times: Sequence[float]) -> float:
    """Return the interquartile range over the median; 0 for fewer than four times."""
    middle = statistics.median(times)
    if len(times) < 4 or middle == 0:
        return 0.0
    low, _, high = statistics.quantiles(times, n=4)
    return (high - low) / middle
