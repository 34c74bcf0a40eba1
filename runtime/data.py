"""Data: which samples make up a rank's share of every micro-batch."""

from __future__ import annotations

from collections.abc import Sized
from typing import cast

import torch

from autopar.capture.batch import named_tensors, row_count, slice_rows
from autopar.capture.source import UserModel
from autopar.errors import FileError, ModelError
from autopar.formats.plan import Plan
from autopar.runtime.seeds import seed_data
from autopar.schedules.expand import mine, stages_of

__all__ = ["ShareLoader", "sample_order"]


def sample_order(samples: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the order in which an epoch takes its samples."""
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed + epoch))


class ShareLoader:
    """Loads, for one rank, the model inputs that its layers read.

    An incomplete last mini-batch of an epoch is dropped. Data sets may draw random numbers: see ``docs/seeds.md``.
    """

    def __init__(self, model: UserModel, plan: Plan, rank: int, names: tuple[str, ...], device: torch.device) -> None:
        """Open the dataset, if any input is read at all.

        Raises:
            FileError: the dataset has fewer samples than a mini-batch.
        """
        self._model, self._plan, self._names, self._device = model, plan, names, device
        (stage, *_), replica = stages_of(plan, rank)
        self._start = plan.stages[stage].row_starts[replica]
        self._stop = self._start + plan.stages[stage].rows[replica]
        self._mine = mine(plan, rank)
        seed_data(plan.seed, "dataset")
        self._dataset = model.dataset() if names else None
        self._samples = len(cast(Sized, self._dataset)) if names else 0
        self._epoch, self._order = -1, torch.empty(0)
        if self._dataset is not None and self._samples < plan.batch:
            raise FileError(f"{model.spec}: the dataset has {self._samples} samples, a mini-batch takes {plan.batch}")

    def load(self, step: int) -> list[dict[str, torch.Tensor]]:
        """Return the share's inputs of every micro-batch of a step, rows along each tensor's batch dimension.

        Raises:
            ModelError: reading a sample or ``collate`` failed.
        """
        plan = self._plan
        if self._dataset is None:
            return [{} for _ in range(plan.micro_batches)]
        epoch, index = divmod(step, self._samples // plan.batch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, sample_order(self._samples, plan.seed, epoch)
        loaded: list[dict[str, torch.Tensor]] = []
        for micro_batch in range(plan.micro_batches):
            if micro_batch not in self._mine:
                loaded.append({})
                continue
            first = index * plan.batch + micro_batch * plan.micro_batch_size
            values = self._share(self._order[first : first + plan.micro_batch_size].tolist(), step, micro_batch)
            loaded.append({name: values[name].to(self._device) for name in self._names})
        return loaded

    def _share(self, picked: list[int], step: int, micro_batch: int) -> dict[str, torch.Tensor]:
        """Return this replica's rows of the micro-batch of the picked samples.

        The user's own ``collate`` is given the whole micro-batch on every rank: what it makes of a sample may depend
        on the others (padding) or on chance, and must not depend on how a stage divides them.
        """
        start, stop = self._start, self._stop
        wanted = picked if self._model.collates else picked[start:stop]
        samples = [self._sample(sample) for sample in wanted]
        seed_data(self._plan.seed, "collate", step, micro_batch)
        values = named_tensors(self._model.collate(samples))
        if row_count(values) != len(wanted):
            raise ModelError(f"{self._model.path}: collate() made {row_count(values)} rows of {len(wanted)} samples")
        return slice_rows(values, start, stop) if self._model.collates else values

    def _sample(self, index: int) -> object:
        assert self._dataset is not None
        seed_data(self._plan.seed, "sample", self._epoch, index)
        return self._model.sample(self._dataset, index)
