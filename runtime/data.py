"""Data: which samples make up a rank's share of every micro-batch."""

from __future__ import annotations

from collections.abc import Sized
from itertools import accumulate
from typing import cast

import torch

from autopar.capture.batch import named_tensors
from autopar.capture.source import UserModel
from autopar.errors import FileError
from autopar.formats.plan import Plan

__all__ = ["ShareLoader", "sample_order"]


def sample_order(samples: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the order in which an epoch takes its samples."""
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed + epoch))


class ShareLoader:
    """Loads, for one replica of one stage, the model inputs that its layers read.

    An incomplete last mini-batch of an epoch is dropped.
    """

    def __init__(
        self, model: UserModel, plan: Plan, stage: int, replica: int, names: tuple[str, ...], device: torch.device
    ) -> None:
        """Open the dataset, if any input is read at all.

        Raises:
            FileError: the dataset has fewer samples than a mini-batch.
        """
        self._model, self._plan, self._names, self._device = model, plan, names, device
        edges = [0, *accumulate(plan.stages[stage].shares)]
        self._start, self._stop = edges[replica], edges[replica + 1]
        self._dataset = model.dataset() if names else None
        self._samples = len(cast(Sized, self._dataset)) if names else 0
        self._epoch, self._order = -1, torch.empty(0)
        if self._dataset is not None and self._samples < plan.batch:
            raise FileError(f"{model.spec}: the dataset has {self._samples} samples, a mini-batch takes {plan.batch}")

    def load(self, step: int) -> list[dict[str, torch.Tensor]]:
        """Return the share's inputs of every micro-batch of a step, rows along each tensor's batch dimension."""
        plan = self._plan
        if self._dataset is None:
            return [{} for _ in range(plan.micro_batches)]
        epoch, index = divmod(step, self._samples // plan.batch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, sample_order(self._samples, plan.seed, epoch)
        loaded = []
        for micro_batch in range(plan.micro_batches):
            first = index * plan.batch + micro_batch * plan.micro_batch_size
            picked = self._order[first + self._start : first + self._stop].tolist()
            values = named_tensors(self._model.load_batch(self._dataset, picked))
            loaded.append({name: values[name].to(self._device) for name in self._names})
        return loaded
