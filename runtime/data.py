"""Data: the mini-batches of a rank, read for its share of every micro-batch.

In come a dataset and a plan; out come tensors by name, a dict a micro-batch. For a GPU the next mini-batch is copied
there while it works on this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Protocol, cast

import torch

from autopar.capture.batch import named_tensors, row_count, seed_data, slice_rows
from autopar.capture.graph import TensorSpec
from autopar.capture.source import UserModel
from autopar.errors import AutoparError, FileError, ModelError, TrainingError, UsageError
from autopar.formats.plan import Plan
from autopar.runtime.device import Copies, move_to_device
from autopar.runtime.settings import Last
from autopar.schedules.expand import mine, stages_of


def sample_order(samples: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the order in which an epoch takes its samples."""
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed + epoch))


def steps_of_epoch(model: UserModel, samples: int, plan: Plan, last: Last) -> int:
    """Return the steps in which a run goes through its dataset once; an incomplete last one counts if it is filled up.

    Raises:
        FileError: the dataset has too few samples for one.
    """
    found = -(-samples // plan.batch) if last == "pad" else samples // plan.batch
    if not found:
        remedy = "plan with a smaller `batch`, or pass `last='pad'`" if samples else "give it samples"
        raise FileError(f"{model.spec}: the dataset has {samples} samples, a mini-batch takes {plan.batch}; {remedy}")
    return found


def _rows_of(plan: Plan, rank: int) -> tuple[int, int]:
    """Return the first of a rank's rows in each of its micro-batches, and the one behind the last."""
    (stage, *_), replica = stages_of(plan, rank)
    start = plan.stages[stage].row_starts[replica]
    return start, start + plan.stages[stage].rows[replica]


def split_rows(
    plan: Plan, rank: int, values: Mapping[str, torch.Tensor], names: Iterable[str], device: torch.device
) -> list[dict[str, torch.Tensor]]:
    """Return a rank's rows of the named tensors of a whole mini-batch, micro-batch by micro-batch."""
    (start, stop), size, own = _rows_of(plan, rank), plan.micro_batch_size, mine(plan, rank)
    return [
        {name: move_to_device(values[name][m * size + start : m * size + stop], device) for name in names if m in own}
        for m in range(plan.micro_batches)
    ]


def check_inputs(values: Mapping[str, torch.Tensor], specs: Sequence[TensorSpec]) -> None:
    """Refuse inputs of other shapes or types than the model was captured with.

    Raises:
        TrainingError: names the tensor, what was expected and what was found.
    """
    for spec in specs:
        value = values.get(spec.name)
        if value is None:
            raise TrainingError(f"the batch has no {spec.name}; it has {', '.join(values) or 'nothing'}")
        found, expected = tuple(value.shape[1:]), spec.shape(0)[1:]
        if found != expected or value.dtype != spec.dtype:
            raise TrainingError(
                f"{spec.name} is {value.dtype} of shape {found} per sample, the model was captured with {spec.dtype} "
                f"of shape {expected}; pad samples to one shape"
            )


def check_given(
    rank: int, values: Mapping[str, torch.Tensor], rows: int | None, specs: list[TensorSpec], expected_rows: int | None
) -> None:
    """Refuse what a rank was given as a batch.

    Raises:
        UsageError: it is not as planned, or lacks what the rank's stages read.
    """
    if rows is None:
        if specs:
            raise UsageError(f"was given no batch, and its stages read {', '.join(spec.name for spec in specs)}")
        return
    if expected_rows is not None and rows != expected_rows:
        raise UsageError(
            f"a batch of {rows} samples, the plan is for {expected_rows}; drop or fill up what is incomplete "
            "(DataLoader(drop_last=True)), or plan for another batch"
        )
    if rows == 0:
        raise UsageError("a batch without samples")
    check_inputs(values, specs)


class ShareLoader:
    """Loads, for one rank, the model inputs that its layers read.

    An incomplete last mini-batch of an epoch is dropped, or filled up with the epoch's first samples. Data sets may
    draw random numbers: see ``docs/howto/verify.md``.
    """

    def __init__(
        self,
        model: UserModel,
        plan: Plan,
        rank: int,
        specs: Sequence[TensorSpec],
        device: torch.device,
        last: Last = "drop",
    ) -> None:
        """Open the dataset, if any input is read at all.

        Args:
            model: the user's file.
            plan: how a mini-batch is divided.
            rank: whose share is loaded.
            specs: the model inputs that its layers read.
            device: where they go.
            last: what becomes of an epoch's last mini-batch.

        Raises:
            FileError: the dataset has fewer samples than a mini-batch.
        """
        self._model, self._plan, self._specs, self._device = model, plan, specs, device
        self._rank = rank
        self._start, self._stop = _rows_of(plan, rank)
        self._mine = mine(plan, rank)
        seed_data(plan.seed, "dataset")
        self._dataset = model.dataset() if specs else None
        self.samples = len(cast(Sized, self._dataset)) if specs else 0
        """In the dataset; 0 where it is not read."""
        self._steps = steps_of_epoch(model, self.samples, plan, last) if specs else 0
        self._epoch, self._order = -1, torch.empty(0)

    def load(self, step: int) -> list[dict[str, torch.Tensor]]:
        """Return the share's inputs of every micro-batch of a step, rows along each tensor's batch dimension.

        Raises:
            ModelError: reading a sample or ``collate`` failed; names rank, step and micro-batch.
            TrainingError: samples have other shapes than those that the model was captured with; likewise.
        """
        plan = self._plan
        if self._dataset is None:
            return [{} for _ in range(plan.micro_batches)]
        epoch, index = divmod(step, self._steps)
        if epoch != self._epoch:
            order = sample_order(self.samples, plan.seed, epoch)
            repeats = -(-self._steps * plan.batch // self.samples)
            self._epoch, self._order = epoch, order.repeat(repeats)
        picked = self._order[index * plan.batch : (index + 1) * plan.batch].tolist()
        whole: dict[str, torch.Tensor] = {}
        loaded: list[dict[str, torch.Tensor]] = []
        for micro_batch in range(plan.micro_batches):
            if micro_batch not in self._mine:
                loaded.append({})
                continue
            first = micro_batch * plan.micro_batch_size
            try:
                if self._model.whole_batches:
                    whole = whole or self._collated(picked, step, 0)
                    values = slice_rows(whole, first + self._start, first + self._stop)
                else:
                    values = self._share(picked[first : first + plan.micro_batch_size], step, micro_batch)
                check_inputs(values, self._specs)
            except AutoparError as error:
                raise type(error)(f"rank {self._rank} (step {step}, micro-batch {micro_batch}): {error}") from error
            loaded.append({spec.name: values[spec.name].to(self._device) for spec in self._specs})
        return loaded

    def _share(self, indices: list[int], step: int, micro_batch: int) -> dict[str, torch.Tensor]:
        """Return this replica's rows of the micro-batch of the picked samples.

        The user's own ``collate`` is given the whole micro-batch on every rank: what it makes of a sample may depend
        on the others (padding) or on chance, and must not depend on how a stage divides them.
        """
        start, stop = self._start, self._stop
        if not self._model.collates:
            return self._collated(indices[start:stop], step, micro_batch)
        return slice_rows(self._collated(indices, step, micro_batch), start, stop)

    def _collated(self, indices: list[int], step: int, micro_batch: int) -> dict[str, torch.Tensor]:
        samples = [self._sample(sample) for sample in indices]
        seed_data(self._plan.seed, "collate", step, micro_batch)
        values = named_tensors(self._model.collate(samples))
        if row_count(values) != len(indices):
            raise ModelError(f"{self._model.path}: collate() made {row_count(values)} rows of {len(indices)} samples")
        return values

    def _sample(self, index: int) -> object:
        assert self._dataset is not None
        seed_data(self._plan.seed, "sample", self._epoch, index)
        return self._model.sample(self._dataset, index)


Batch = list[dict[str, torch.Tensor]]
"""A rank's rows of the model's inputs, in every micro-batch."""


class Loader(Protocol):
    """What a rank's mini-batches come from."""

    samples: int
    """In the dataset; 0 where this rank does not read it."""

    def load(self, step: int) -> Batch:
        """Return a step's; steps count from 0."""


class Batches:
    """Loads mini-batches; for a GPU, in the host's memory, and copies them on: the next one while the GPU computes."""

    def __init__(self, loader: Loader, copies: Copies | None) -> None:
        """Take what loads them, and what copies them on to a device with a memory of its own."""
        self.samples = loader.samples
        self._loader, self._copies = loader, copies
        self._next: int | None = None
        self._ahead: tuple[int, Batch] | None = None

    def load(self, step: int, following: int | None) -> Batch:
        """Return a step's, on the device, whose work from now on waits for it; and say which is loaded next, if any."""
        self._next = following
        if self._copies is None:
            return self._loader.load(step)
        ahead, self._ahead = self._ahead, None
        batch = ahead[1] if ahead is not None and ahead[0] == step else self._bring(step, self._copies)
        self._copies.admit(tensor for inputs in batch for tensor in inputs.values())
        return batch

    def look_ahead(self) -> None:
        """Begin to bring that of the step that follows, where there is one and the device works meanwhile.

        What is wrong with it is said when that step begins.
        """
        if self._copies is not None and self._next is not None:
            try:
                self._ahead = self._next, self._bring(self._next, self._copies)
            except Exception:
                self._ahead = None

    def _bring(self, step: int, copies: Copies) -> Batch:
        inputs_of_each = self._loader.load(step)
        return [{name: copies.bring(tensor) for name, tensor in inputs.items()} for inputs in inputs_of_each]
