"""Layer times: how long the layers of a stage run forward and backward, inside its actions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median

import torch

from autopar.formats.program import BACKWARD, FORWARD, RankProgram
from autopar.runtime.clock import Clock

__all__ = ["LayerTimes"]


class LayerTimes:
    """Watches a rank's layers for a few steps.

    A forward is timed around the layer. A layer's backward begins when the gradients of its outputs are complete, and
    ends when the next one's begins, or the stage's backward is over.
    """

    def __init__(self, actions: RankProgram, stages: Mapping[int, Sequence[str]], clock: Clock) -> None:
        """Prepare to watch.

        Args:
            actions: the rank's program.
            stages: names of the layers of its stages, in order.
            clock: marks moments.
        """
        self._clock, self._stages = clock, stages
        self._actions = list(actions)
        self._forwards: list[tuple[str, object, object]] = []
        self._reached: dict[tuple[str, int], object] = {}
        """The latest moment at which a gradient of a layer's outputs was complete, by its forwards in order."""
        self._runs: dict[str, int] = defaultdict(int)
        self._again: dict[str, int] = defaultdict(int)
        self._seconds: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))

    def __call__(self, layer: str, run: Callable[[], Sequence[torch.Tensor]]) -> Sequence[torch.Tensor]:
        """Run a layer forward, timed."""
        start = self._clock.mark()
        outputs = run()
        self._forwards.append((layer, start, self._clock.mark()))
        key = layer, self._runs[layer]
        self._runs[layer] += 1
        for tensor in outputs:
            if tensor.requires_grad:
                tensor.register_hook(lambda _, key=key: self._reach(key))  # type: ignore[no-untyped-call]
        return outputs

    def again(self, layer: str) -> None:
        """Note that the gradients of a layer's outputs are there, or awaited, so that it is recomputed."""
        self._reach((layer, self._again[layer]))
        self._again[layer] += 1

    def begin_step(self) -> None:
        """Forget the marks of the step before."""
        self._clock.start()
        self._forwards.clear()
        self._reached.clear()
        self._runs.clear()
        self._again.clear()

    def end_step(self, times_s: Sequence[tuple[float, float]]) -> None:
        """Take in a step, given when its actions ran."""
        marks = [mark for _, start, end in self._forwards for mark in (start, end)]
        moments = self._clock.resolve([*marks, *self._reached.values()])
        for index, (layer, _, _) in enumerate(self._forwards):
            self._seconds[layer][0].append(moments[2 * index + 1] - moments[2 * index])
        reached = dict(zip(self._reached, moments[len(marks) :], strict=True))
        turns: dict[int, list[int]] = defaultdict(list)
        for action in self._actions:
            if action.kind == FORWARD:
                turns[action.stage].append(action.micro_batch)
        for action, (start_s, end_s) in zip(self._actions, times_s, strict=True):
            if action.kind == BACKWARD:
                self._part(action.stage, turns[action.stage].index(action.micro_batch), reached, (start_s, end_s))

    def medians(self) -> dict[str, tuple[float, float]]:
        """Return the median seconds of every layer, forward and backward; 0 backward where none was seen whole."""
        return {
            layer: (median(forward), median(backward) if backward else 0.0)
            for layer, (forward, backward) in self._seconds.items()
        }

    def _reach(self, key: tuple[str, int]) -> None:
        self._reached[key] = self._clock.mark()

    def _part(self, stage: int, turn: int, reached: Mapping[tuple[str, int], float], span: tuple[float, float]) -> None:
        """Divide a stage's backward among its layers."""
        layers = list(reversed(self._stages[stage]))
        moments = [min(max(reached.get((layer, turn), span[0]), span[0]), span[1]) for layer in layers]
        for index in range(1, len(moments)):
            moments[index] = max(moments[index], moments[index - 1])
        for layer, (start_s, end_s) in zip(layers, pairwise([*moments, span[1]]), strict=True):
            self._seconds[layer][1].append(end_s - start_s)
