"""Time layers: in rounds over all of them and all sizes, so that the machine's drift spreads evenly.

In a round a size runs several times in a row, the first time unrecorded: a step after one of another size, or of
another kind, meets memory that the allocator has given back (a tenth of a forward of GPT-2, half of a split backward),
which in training it does not.
Of identical layers (equal fingerprints) up to sixteen are run and their times pooled, so that weights are as cold in
the caches as in a real step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from autopar.capture import Layer
from autopar.profiler.chained import Chained
from autopar.profiler.clock import Time
from autopar.profiler.passes import Inputs
from autopar.progress import Progress

REPRESENTATIVES = 16
MAX_ROUNDS = 20
IN_A_ROW, EXTRA_IN_A_ROW = 3, 2
# Of what is spent on rounds: first, unrecorded ones, in which clocks, caches and the allocator settle; and, after the
# plain ones, those of split backwards and of recomputation.
WARM_UP, EXTRA = 0.1, 0.15

_Timed = TypeVar("_Timed")


@dataclass
class Timing:
    """Times of one kind of layer at one micro-batch size."""

    forward: list[Time] = field(default_factory=list)
    backward: list[Time] = field(default_factory=list)
    backward_input: list[Time] = field(default_factory=list)
    backward_weight: list[Time] = field(default_factory=list)
    recompute: list[Time] = field(default_factory=list)


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
    chain: Chained, given: Mapping[int, Inputs], budget_s: float, progress: Progress, split: bool = True
) -> dict[tuple[str, int], Timing]:
    """Return times by fingerprint and micro-batch size.

    ``given`` holds, by size, what the chain's layers read and none of them makes. Rounds warm up for a tenth of the
    budget; then they go on until it is used up, of three recorded steps each; a round of split backwards and one of
    recomputation follow at least, of two. Without ``split`` none is split.
    """
    sizes = tuple(given)
    timings = {(layer.fingerprint, size): Timing() for layer in chain.layers for size in given}

    def plain(size: int) -> None:
        for layer, forward, backward in _in_a_row(partial(chain.step, given[size]), IN_A_ROW):
            timings[layer.fingerprint, size].forward.append(forward)
            timings[layer.fingerprint, size].backward.append(backward)

    def halves(size: int) -> None:
        for layer, first, second in _in_a_row(partial(chain.split, given[size]), EXTRA_IN_A_ROW):
            timings[layer.fingerprint, size].backward_input.append(first)
            timings[layer.fingerprint, size].backward_weight.append(second)

    def recomputed(size: int) -> None:
        for layer, again in _in_a_row(partial(chain.recomputed, given[size]), EXTRA_IN_A_ROW):
            timings[layer.fingerprint, size].recompute.append(again)

    _rounds(lambda size: chain.step(given[size]), sizes[:1], WARM_UP * budget_s, partial(progress, "warming up"))
    _rounds(plain, sizes, budget_s, partial(progress, "timing layers"))
    if split:
        _rounds(halves, sizes, EXTRA * budget_s, partial(progress, "timing split backwards"))
    _rounds(recomputed, sizes, EXTRA * budget_s, partial(progress, "timing recomputation"))
    return timings


def _in_a_row(step: Callable[[], Sequence[_Timed]], times: int) -> list[_Timed]:
    """Run a step once unrecorded, and then so many times; return what was timed."""
    step()
    return [each for _ in range(times) for each in step()]


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
