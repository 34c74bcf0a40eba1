"""Prefetch: a GPU's mini-batches, brought there beside its work."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from autopar.runtime.copies import Copies

__all__ = ["Batch", "Prefetch"]

Batch = list[dict[str, torch.Tensor]]
"""A rank's rows of the model's inputs, in every micro-batch."""


class Prefetch:
    """Loads mini-batches in the host's memory and copies them on; of two, the later one while the GPU computes."""

    def __init__(self, load: Callable[[int], Batch], copies: Copies) -> None:
        """Take what loads a step's mini-batch, and what copies it."""
        self._load, self._copies = load, copies
        self._ahead: tuple[int, Batch] | None = None

    def load(self, step: int) -> Batch:
        """Return a step's mini-batch on the device, whose work from now on waits for it."""
        ahead, self._ahead = self._ahead, None
        batch = ahead[1] if ahead is not None and ahead[0] == step else self._brought(step)
        self._copies.admit(tensor for inputs in batch for tensor in inputs.values())
        return batch

    def look_ahead(self, step: int) -> None:
        """Begin to bring the mini-batch of a later step; what is wrong with it is said when that step begins."""
        try:
            self._ahead = step, self._brought(step)
        except Exception:
            self._ahead = None

    def _brought(self, step: int) -> Batch:
        return [self._bring(inputs) for inputs in self._load(step)]

    def _bring(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: self._copies.bring(tensor) for name, tensor in inputs.items()}
