"""Segment: layers of a stage that are run backward together; one that is recomputed is a segment of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from autopar.capture.graph import Layer
from autopar.errors import AutoparError, TrainingError
from autopar.runtime.recompute import Before, called, called_again, kept

__all__ = ["Segment", "Watch", "segments_of"]

Watch = Callable[[str, Callable[[], Sequence[torch.Tensor]], bool], Sequence[torch.Tensor]]
"""Called with a layer's name, what runs it forward, and whether that is once more; returns what running returns."""


class Segment:
    """Consecutive layers, and the names of the tensors that enter and leave them."""

    def __init__(
        self,
        layers: Sequence[Layer],
        wanted: Collection[str],
        autocast: Callable[[], AbstractContextManager[object]],
        *,
        recomputed: bool,
    ) -> None:
        """Work out what flows.

        Args:
            layers: in order.
            wanted: names that later segments, other stages or the loss need.
            autocast: makes the context that a forward runs in.
            recomputed: whether they keep their inputs only.
        """
        self.recomputed = recomputed
        self._layers, self._autocast = list(layers), autocast
        if autocast is nullcontext:
            nothing = nullcontext()
            self._autocast = lambda: nothing
        made = [name for layer in layers for name in layer.outputs]
        read = [name for layer in layers for name in layer.inputs]
        self.inputs = tuple(dict.fromkeys(name for name in read if name not in made))
        self.outputs = tuple(name for name in made if name in wanted)
        self.done = tuple(name for name in self.inputs if name not in wanted)
        """Names of the inputs that nobody needs after it."""
        self._drop = self._last_uses()
        self.watch: Watch | None = None

    def before(self, values: Mapping[str, torch.Tensor]) -> Before:
        """Return copies of what the one layer of a recomputed segment will write, for its second run."""
        assert self.recomputed
        return kept(self._layers[0], values)

    def run(
        self,
        rows: int,
        values: Mapping[str, torch.Tensor],
        seed: Callable[[str], None],
        again: Before | None = None,
    ) -> dict[str, torch.Tensor]:
        """Run forward, the first time or once more, on what was kept ``before``; return the outputs.

        Raises:
            TrainingError: a layer failed; names it.
        """
        known = dict(values)
        for layer, drop in zip(self._layers, self._drop, strict=True):
            if layer.random:
                seed(layer.name)
            inputs = [known[name] for name in layer.inputs]
            try:
                outputs = self._run(layer, rows, inputs, again)
            except (AutoparError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                raise TrainingError(f"layer {layer.name}: {type(error).__name__}: {error}") from error
            known.update(zip(layer.outputs, outputs, strict=True))
            del inputs, outputs
            for name in drop:
                del known[name]
        return {name: known[name] for name in self.outputs}

    def _run(
        self, layer: Layer, rows: int, inputs: Sequence[torch.Tensor], again: Before | None
    ) -> Sequence[torch.Tensor]:
        def run() -> Sequence[torch.Tensor]:
            with self._autocast():
                return called(layer, rows, inputs) if again is None else called_again(layer, rows, inputs, again)

        return run() if self.watch is None else self.watch(layer.name, run, again is not None)

    def _last_uses(self) -> list[list[str]]:
        """For every layer, the names that no later layer reads and nobody else wants: they are let go after it."""
        drops: list[list[str]] = []
        alive = set(self.inputs)
        for index, layer in enumerate(self._layers):
            alive |= set(layer.outputs)
            later = {name for after in self._layers[index + 1 :] for name in after.inputs}
            gone = sorted(alive - later - set(self.outputs))
            drops.append(gone)
            alive -= set(gone)
        return drops


def segments_of(
    layers: Sequence[Layer],
    wanted: Collection[str],
    autocast: Callable[[], AbstractContextManager[object]],
    recompute: Collection[str],
) -> list[Segment]:
    """Divide a stage's layers: every recomputed one by itself, and those between together.

    ``wanted`` are the names that other stages or the loss need.
    """
    parts: list[tuple[list[Layer], bool]] = []
    for layer in layers:
        again = layer.name in recompute
        if again or not parts or parts[-1][1]:
            parts.append(([], again))
        parts[-1][0].append(layer)
    found: list[Segment] = []
    needed = set(wanted)
    for part, again in reversed(parts):
        found.append(Segment(part, needed, autocast, recomputed=again))
        needed |= set(found[-1].inputs)
    return found[::-1]
