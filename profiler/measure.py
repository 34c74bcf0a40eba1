"""Time layers: in rounds over all of them and all sizes, so that the machine's drift spreads evenly.

In a round a size runs several times in a row, the first time unrecorded: a step after one of another size, or of
another kind, meets memory that the allocator has given back (a tenth of a forward of GPT-2, half of a split backward),
which in training it does not.
Of identical layers (equal fingerprints) up to sixteen are run and their times pooled, so that weights are as cold in
the caches as in a real step; of those on a GPU, whose caches are small beside them, four. An affine function of the
micro-batch size is fitted to a layer's times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.capture import Layer
from autopar.formats.profile import Cost, Line, PartSum, SavedStorage
from autopar.profiler.device import Time
from autopar.profiler.layer_runs import LayerChain, LayerInputs
from autopar.progress import Progress

REPRESENTATIVES, ON_GPU = 16, 4
MAX_ROUNDS = 20
IN_A_ROW, EXTRA_IN_A_ROW = 3, 2
# Of what is spent on rounds: first, unrecorded ones, in which clocks, caches and the allocator settle; and, after the
# plain ones, those of split backwards and of recomputation.
WARM_UP, EXTRA = 0.1, 0.15
LONG = 2.0
"""Times the budget: single rounds that take longer are shortened on a GPU, whose times spread little."""

_Step = Callable[[LayerInputs], Sequence[tuple[Layer, Time] | tuple[Layer, Time, Time]]]
"""Runs all layers; returns what of each was timed."""


@dataclass
class Timing:
    """Times of one kind of layer at one micro-batch size."""

    forward: list[Time] = field(default_factory=list)
    backward: list[Time] = field(default_factory=list)
    backward_input: list[Time] = field(default_factory=list)
    backward_weight: list[Time] = field(default_factory=list)
    recompute: list[Time] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Of forward and backward."""
        return _seconds(self.forward) + _seconds(self.backward)

    def take_shares_of(self, other: Timing) -> None:
        """Take halves and recomputation in proportion to another size's backward and forward."""
        backward, forward = _ratio(self.backward, other.backward), _ratio(self.forward, other.forward)
        self.backward_input = [Time(backward * each.seconds) for each in other.backward_input]
        self.backward_weight = [Time(backward * each.seconds) for each in other.backward_weight]
        self.recompute = [Time(forward * each.seconds) for each in other.recompute]

    def cost(
        self,
        size: int,
        saved_bytes: Mapping[str, int],
        peak_bytes: int,
        output_bytes: int,
        pending_bytes: int | None,
        sums: tuple[PartSum, ...] = (),
    ) -> Cost:
        """Return the record of a layer, or of a part of one, at a micro-batch size."""
        return Cost(
            micro_batch=size,
            forward_s=_seconds(self.forward),
            backward_s=_seconds(self.backward),
            saved=tuple(SavedStorage(storage=name, bytes=count) for name, count in saved_bytes.items()),
            peak_bytes=peak_bytes,
            output_bytes=output_bytes,
            backward_input_s=_seconds(self.backward_input) if self.backward_input else None,
            backward_weight_s=_seconds(self.backward_weight) if self.backward_weight else None,
            weight_saved_bytes=pending_bytes,
            recompute_s=_seconds(self.recompute),
            forward_launch_s=_launch_s(self.forward),
            backward_launch_s=_launch_s(self.backward),
            forward_spread=spread([time.seconds for time in self.forward]),
            backward_spread=spread([time.seconds for time in self.backward]),
            repeats=len(self.forward),
            sums=sums,
        )


def _seconds(times: Sequence[Time]) -> float:
    return statistics.median(time.seconds for time in times)


def _ratio(times: Sequence[Time], others: Sequence[Time]) -> float:
    """Return the ratio of two medians; 1 where the second is 0, of a layer without a backward."""
    return _seconds(times) / _seconds(others) if _seconds(others) else 1.0


def _launch_s(times: Sequence[Time]) -> float | None:
    known = [time.launch_s for time in times if time.launch_s is not None]
    return statistics.median(known) if known else None


def representatives(layers: Sequence[Layer], most: int = REPRESENTATIVES) -> list[Layer]:
    """Return the layers to run, in order: the first of each kind, up to ``most``, so that neighbours stay together."""
    found: dict[str, int] = {}
    chosen = []
    for layer in layers:
        found[layer.fingerprint] = found.get(layer.fingerprint, 0) + 1
        if found[layer.fingerprint] <= most:
            chosen.append(layer)
    return chosen


def measure(
    chain: LayerChain,
    inputs_by_size: Mapping[int, LayerInputs],
    budget_s: float,
    progress: Progress,
    split: bool = True,
    seldom: bool = False,
) -> dict[tuple[str, int], Timing]:
    """Return times by fingerprint and micro-batch size.

    ``inputs_by_size`` holds, by size, what the chain's layers read and none of them makes. Rounds warm up for a tenth
    of the budget; then they go on until it is used up, of several recorded steps in a row each; a round of split
    backwards and one of recomputation follow at least. Without ``split`` none is split. What is measured ``seldom``,
    parts of layers, of which there are many, and on a GPU a model whose steps would take much longer than the budget,
    takes one step in a row, and its split backwards and recomputation run at the largest size alone: at others they
    take the same share of a backward and a forward.
    """
    seldom = seldom or (chain.on_gpu and _single_round_s(chain, inputs_by_size) > LONG * budget_s)
    sizes, plain_times, times = tuple(inputs_by_size), *((1, 1) if seldom else (IN_A_ROW, EXTRA_IN_A_ROW))
    some = sizes[-1:] if seldom else sizes
    timings = {(layer.fingerprint, size): Timing() for layer in chain.layers for size in inputs_by_size}

    def recording(step: _Step, times: int, *names: str, ready: bool = False) -> Callable[[int], None]:
        def take(size: int) -> None:
            if not ready:
                step(inputs_by_size[size])
            for layer, *seconds in [each for _ in range(times) for each in step(inputs_by_size[size])]:
                for name, second in zip(names, seconds, strict=True):
                    getattr(timings[layer.fingerprint, size], name).append(second)

        return take

    warm_up = recording(chain.step, 0)
    plain = recording(chain.step, plain_times, "forward", "backward")
    # Kernels of a GPU are timed when they have run once, for their launches.
    ready = seldom and chain.on_gpu
    halves = recording(chain.split, times, "backward_input", "backward_weight", ready=ready)
    again = recording(chain.recompute, times, "recompute", ready=ready)
    parts = [("warming up", warm_up, sizes[:1], WARM_UP), ("forwards and backwards", plain, sizes, 1.0)]
    parts += [("split backwards", halves, some, EXTRA)] if split else []
    _measure_parts([*parts, ("recomputation", again, some, EXTRA)], budget_s, progress)
    for (kind, size), timing in timings.items():
        if size not in some:
            timing.take_shares_of(timings[kind, some[0]])
    return timings


def _single_round_s(chain: LayerChain, inputs_by_size: Mapping[int, LayerInputs]) -> float:
    """Return about how long single rounds of all kinds of steps take, judging by the first size's second step."""
    first = next(iter(inputs_by_size.values()))
    chain.step(first)
    began_s = time.perf_counter()
    chain.step(first)
    steps = IN_A_ROW + 2 * EXTRA_IN_A_ROW + 3
    return (time.perf_counter() - began_s) * steps * len(inputs_by_size)


def _measure_parts(
    parts: Sequence[tuple[str, Callable[[int], None], Sequence[int], float]], budget_s: float, progress: Progress
) -> None:
    """Take rounds of steps of one kind after the other: by name, step, sizes and share of the budget."""
    whole, before = sum(share for *_, share in parts), 0.0
    for name, run, some, share in parts:

        def tell(done: float, name: str = name, before: float = before, share: float = share) -> None:
            progress(f"timing layers: {name}", (before + done * share) / whole)

        tell(0.0)
        _rounds(run, some, share * budget_s, tell)
        before += share


def _rounds(
    run: Callable[[int], object], sizes: Sequence[int], budget_s: float, progress: Callable[[float], None]
) -> None:
    """Run every size in turn, once and then again until the next round would go beyond the budget."""
    started = time.perf_counter()
    for number in range(1, MAX_ROUNDS + 1):
        for size in sizes:
            run(size)
        used = time.perf_counter() - started
        progress(min(1.0, max(used / budget_s, number / MAX_ROUNDS)))
        if used * (number + 1) / number > budget_s:
            break


def spread(times: Sequence[float]) -> float:
    """Return the interquartile range over the median; of three times, their whole range, and 0 of fewer."""
    middle = statistics.median(times)
    if len(times) < 3 or middle == 0:
        return 0.0
    low, _, high = statistics.quantiles(times, n=4)
    return (high - low) / middle


def fit_line(sizes: Sequence[int], seconds: Sequence[float]) -> Line | None:
    """Fit ``fixed_s + per_sample_s * rows``, neither part negative, with the least squares of relative errors.

    Returns none for a single size, which no line follows from.

    >>> line = fit_line((1, 4, 8), (3.0, 6.0, 10.0))
    >>> round(line.fixed_s, 9), round(line.per_sample_s, 9), round(line.residual, 9)
    (2.0, 1.0, 0.0)
    >>> fit_line((1, 4), (1.0, 0.5)).per_sample_s, fit_line((1, 4), (0.0, 0.0)).at(8), fit_line((4,), (1.0,))
    (0.0, 0.0, None)
    """
    if len(sizes) < 2:
        return None
    rows, values = np.asarray(sizes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    # A layer without a backward takes nothing at any size.
    weights = 1 / np.where(values > 0, values, 1.0)
    ones = np.ones_like(rows)
    candidates = [np.linalg.lstsq(np.stack((ones, rows), 1) * weights[:, None], values * weights, rcond=None)[0]]
    candidates += [_one_column(ones, values, weights, 0), _one_column(rows, values, weights, 1)]
    # The least error without a negative part lies where no part is negative, or on an edge where one is 0.
    fixed, per_sample = min(
        (each for each in candidates if min(each) >= 0),
        key=lambda each: float(np.sum(((each[0] + each[1] * rows - values) * weights) ** 2)),
    )
    differences = np.abs(fixed + per_sample * rows - values) * weights
    return Line(fixed_s=float(fixed), per_sample_s=float(per_sample), residual=float(differences.max()))


def _one_column(column: np.ndarray, values: np.ndarray, weights: np.ndarray, place: int) -> np.ndarray:
    result = np.zeros(2)
    result[place] = np.sum(column * values * weights**2) / np.sum((column * weights) ** 2)
    return result
