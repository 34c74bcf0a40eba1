"""Data: the mini-batches of a rank, read for its share of every micro-batch.

In come a dataset and a plan; out come tensors by name, a dict a micro-batch. For a GPU the next mini-batch is copied
there while it works on this one.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple, cast

import torch

from autopar.capture.graph import TensorSpec
from autopar.capture.model.batch import named_tensors, row_count, seed_data, slice_rows
from autopar.capture.model.source import UserModel
from autopar.errors import FileError, ModelError, TrainingError, UsageError, cause_of
from autopar.formats.plan import Plan
from autopar.options.train import Last
from autopar.runtime.device import Copies, move_to_device


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


def split_rows(
    plan: Plan,
    rank: int,
    values: Mapping[str, torch.Tensor],
    names: Iterable[str],
    device: torch.device,
    written: Collection[str] = (),
) -> list[dict[str, torch.Tensor]]:
    """Return a rank's rows of the named tensors of a whole mini-batch, micro-batch by micro-batch.

    Of those that are ``written`` they are copies: backwards of other micro-batches may have saved the whole.
    """
    own, size, found = plan.ownership.ranks[rank], plan.micro_batch_size, []
    for m in range(plan.micro_batches):
        rows = slice(m * size + own.rows.start, m * size + own.rows.stop)
        asked = names if m in own.micro_batches else ()
        parts = {name: values[name][rows] for name in asked}
        copies = {name: part.clone() for name, part in parts.items() if name in written}
        found.append({name: move_to_device(part, device) for name, part in (parts | copies).items()})
    return found


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


Excerpt = Mapping[str, Sequence[float]]
"""Some numbers of samples, by the names of tensors: whether two processes have read the same shows by them."""
_NUMBERS = 64
"""Of each tensor, at most."""


def same_samples(found: Sequence[tuple[int, Excerpt]], spec: str) -> int:
    """Return how many samples the dataset has, given that and an excerpt by every rank; 0 where none reads it.

    A rank may read the inputs of a sample whose targets are read by another.

    Args:
        found: by rank; 0 samples where it reads none.
        spec: of the model, as a user names it.

    Raises:
        ModelError: two ranks have not read the same.
    """
    readers = [rank for rank, (samples, _) in enumerate(found) if samples]
    for rank in readers[1:]:
        (samples, one), (others, other) = found[readers[0]], found[rank]
        differing = next((name for name in one.keys() & other.keys() if not _alike(one[name], other[name])), None)
        if samples == others and differing is None:
            continue
        said = f"gives another {differing} on rank {rank} than on rank {readers[0]}"
        if samples != others:
            said = f"has {others} samples on rank {rank}, and {samples} on rank {readers[0]}"
        raise ModelError(
            f"{spec}: dataset() {said}; all ranks must read the same samples in the same order: sort what comes from a "
            "set or a folder, and have it stay as it is"
        )
    return found[readers[0]][0] if readers else 0


def _alike(one: Sequence[float], other: Sequence[float]) -> bool:
    """Tell whether numbers are the same, but for what processors of other kinds compute otherwise."""
    if len(one) != len(other):
        return False
    mine, others = (torch.tensor(each, dtype=torch.float64) for each in (one, other))
    return torch.allclose(mine, others, rtol=1e-3, atol=1e-3 * float(mine.abs().nan_to_num().max()), equal_nan=True)


class SampleReader:
    """Reads the samples of a run's mini-batches in order, and collates them, seeded alike wherever they are read.

    An incomplete last mini-batch of an epoch is dropped, or filled up with the epoch's first samples. Data sets may
    draw random numbers: see ``docs/howto/verify.md``.
    """

    def __init__(self, model: UserModel, plan: Plan, last: Last = "drop") -> None:
        """Open the dataset.

        Args:
            model: the user's file.
            plan: how a mini-batch is divided.
            last: what becomes of an epoch's last mini-batch.

        Raises:
            FileError: the dataset has fewer samples than a mini-batch.
        """
        self.model, self.plan = model, plan
        seed_data(plan.seed, "dataset")
        self._dataset = model.dataset()
        self.samples = len(cast(Sized, self._dataset))
        """In the dataset."""
        self._steps = steps_of_epoch(model, self.samples, plan, last)
        self._epoch, self._order = -1, torch.empty(0)

    def whole(self, step: int) -> dict[str, torch.Tensor]:
        """Return a mini-batch, collated at once.

        Raises:
            ModelError: reading a sample or ``collate`` failed.
        """
        epoch, picked = self._epoch_samples(step)
        return self._collate(epoch, picked, step, 0)

    def rows(self, step: int, micro_batch: int, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Return rows of a micro-batch.

        The user's own ``collate`` is given the whole micro-batch on every rank: what it makes of a sample may depend
        on the others (padding) or on chance, and must not depend on how a stage divides them.

        Raises:
            ModelError: as :meth:`whole`.
        """
        epoch, picked = self._epoch_samples(step)
        first = micro_batch * self.plan.micro_batch_size
        if not self.model.collates:
            return self._collate(epoch, picked[first + start : first + stop], step, micro_batch)
        indices = picked[first : first + self.plan.micro_batch_size]
        return slice_rows(self._collate(epoch, indices, step, micro_batch), start, stop)

    def excerpt(self) -> Excerpt:
        """Return some numbers of the first two samples of a run; none of what cannot be read, which its step says."""
        with suppress(Exception):
            epoch, picked = self._epoch_samples(0)
            values = self._collate(epoch, picked[:2], 0, 0)
            dense = {name: value.to_dense() if value.is_sparse else value for name, value in values.items()}
            every = {name: each.flatten() for name, each in dense.items() if not each.is_complex()}
            return {name: each[:: -(-each.numel() // _NUMBERS) or 1].tolist() for name, each in every.items()}
        return {}

    def _epoch_samples(self, step: int) -> tuple[int, list[int]]:
        """Return a mini-batch's epoch, and its samples."""
        (epoch, index), batch = divmod(step, self._steps), self.plan.batch
        if epoch != self._epoch:
            order = sample_order(self.samples, self.plan.seed, epoch)
            self._epoch, self._order = epoch, order.repeat(-(-self._steps * batch // self.samples))
        picked: list[int] = self._order[index * batch : (index + 1) * batch].tolist()
        return epoch, picked

    def _collate(self, epoch: int, indices: list[int], step: int, micro_batch: int) -> dict[str, torch.Tensor]:
        samples = [self._sample(epoch, sample) for sample in indices]
        seed_data(self.plan.seed, "collate", step, micro_batch)
        values = named_tensors(self.model.collate(samples))
        if row_count(values) != len(indices):
            raise ModelError(f"{self.model.path}: collate() made {row_count(values)} rows of {len(indices)} samples")
        return values

    def _sample(self, epoch: int, index: int) -> object:
        seed_data(self.plan.seed, "sample", epoch, index)
        return self.model.sample(self._dataset, index)


Batch = list[dict[str, torch.Tensor]]
"""A rank's rows of the model's inputs, in every micro-batch."""


class Loader(ABC):
    """What a rank's mini-batches come from; by itself, it reads them when they are asked for."""

    samples = 0
    """In the dataset; 0 where this rank does not read it."""
    loaders = 0
    """How many processes read for it."""

    def __init__(self, plan: Plan, rank: int, specs: Sequence[TensorSpec]) -> None:
        """Take the model inputs that a rank's layers read, in its rows of its micro-batches."""
        own = plan.ownership.ranks[rank]
        self._plan, self._rank, self._specs, self._rows = plan, rank, specs, (own.rows.start, own.rows.stop)
        self._number = partial(plan.number_of, stage=own.stage)
        """Returns which of the run's mini-batches a step's is."""
        self._own = list(own.micro_batches) if specs else []

    @abstractmethod
    def load(self, step: int) -> Batch:
        """Return a step's; steps count from 0."""

    def excerpt(self) -> Excerpt:
        """Return some numbers of the first samples that are read for it."""
        return {}

    def expect(self, step: int, following: range, first: int) -> None:  # noqa: B027
        """Have a step's mini-batch read, and as many of those that follow as are read ahead.

        Replicas that take turns began with mini-batch ``first``.
        """

    def is_there(self, step: int) -> bool:
        """Tell whether a step's has been read, or is read when it is asked for."""
        return True

    def work_s(self) -> float | None:
        """Return the seconds in which others read and collated for it, since this was last asked; None without any."""
        return None

    def close(self) -> None:  # noqa: B027
        """Let those who work for it end."""

    @contextmanager
    def _naming(self, step: int, micro_batch: int) -> Iterator[None]:
        """Say of an error which share of a mini-batch could not be loaded."""
        try:
            yield
        except Exception as error:
            raise TrainingError(f"{self._place(step, micro_batch)}: {cause_of(error)}") from error

    def _place(self, step: int, micro_batch: int) -> str:
        first, *others = self._plan.ownership.ranks[self._rank].stages
        stages = ", ".join((self._plan.place_of(first), *map(str, others)))
        return f"rank {self._rank} ({stages}, step {step}, micro-batch {micro_batch})"


class ShareLoader(Loader):
    """Loads, for one rank, the model inputs that its layers read, in the rank's own process."""

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
        super().__init__(plan, rank, specs)
        self._device, self._reader = device, SampleReader(model, plan, last) if specs else None
        self.samples = 0 if self._reader is None else self._reader.samples

    def excerpt(self) -> Excerpt:
        """See :class:`Loader`."""
        return {} if self._reader is None else self._reader.excerpt()

    def load(self, step: int) -> Batch:
        """Return the share's inputs of every micro-batch of a step, rows along each tensor's batch dimension.

        Raises:
            TrainingError: reading a sample or ``collate`` failed, or samples have other shapes than those that the
                model was captured with; names rank, stage, step and micro-batch.
        """
        loaded: Batch = [{} for _ in range(self._plan.micro_batches)]
        if self._reader is None:
            return loaded
        number = self._number(step)
        (start, stop), whole = self._rows, dict[str, torch.Tensor]()
        for micro_batch in self._own:
            with self._naming(step, micro_batch):
                if self._reader.model.whole_batches:
                    whole = whole or self._reader.whole(number)
                    first = micro_batch * self._plan.micro_batch_size
                    values = slice_rows(whole, first + start, first + stop)
                else:
                    values = self._reader.rows(number, micro_batch, start, stop)
                check_inputs(values, self._specs)
            loaded[micro_batch] = {spec.name: values[spec.name].to(self._device) for spec in self._specs}
        return loaded


class BlankLoader(Loader):
    """Makes batches of zeros, of the right shapes."""

    def load(self, step: int) -> Batch:
        """See :class:`Loader`."""
        start, stop = self._rows
        return [
            {each.name: torch.zeros(each.shape(stop - start), dtype=each.dtype) for each in self._specs if own}
            for own in (micro_batch in self._own for micro_batch in range(self._plan.micro_batches))
        ]


class StepLoading(NamedTuple):
    """What loading took of a rank in a step."""

    spans_s: list[tuple[float, float]]
    """When it had to wait for its mini-batches, by the clock of its host."""
    work_s: float
    """Seconds in which samples were read and collated for it, by whomever."""

    @property
    def waited_s(self) -> float:
        """How long it had to wait."""
        return sum(end - start for start, end in self.spans_s)


class Batches:
    """Loads mini-batches; for a GPU, in the host's memory, and copies them on: the next one while the GPU computes."""

    def __init__(self, loader: Loader, copies: Copies | None) -> None:
        """Take what loads them, and what copies them on to a device with a memory of its own."""
        self._loader, self._copies = loader, copies
        self.samples, self.loaders = loader.samples, loader.loaders
        """In the dataset, and how many processes load for this rank."""
        self._following = range(0)
        self.excerpt = loader.excerpt
        self._ahead: tuple[int, Batch] | None = None
        self._spans_s: list[tuple[float, float]] = []

    def load(self, step: int, following: range, first: int = 0) -> Batch:
        """Return a step's, on the device, whose work from now on waits for it; and say which are loaded next, if any.

        Replicas that take turns began with mini-batch ``first``.
        """
        self._following = following
        self._loader.expect(step, following, first)
        if self._copies is None:
            return self._read(step)
        ahead, self._ahead = self._ahead, None
        batch = ahead[1] if ahead is not None and ahead[0] == step else self._bring(step, self._copies)
        self._copies.admit(tensor for inputs in batch for tensor in inputs.values())
        return batch

    def look_ahead(self) -> None:
        """Begin to bring that of the step that follows, where there is one and the device works meanwhile.

        What is wrong with it is said when that step begins.
        """
        if self._copies is None or not self._following:
            return
        step = self._following[0]
        if not self._loader.is_there(step):
            # It is waited for when the device has been given the rest of this step.
            return
        try:
            self._ahead = step, self._bring(step, self._copies)
        except Exception:
            self._ahead = None

    def times(self) -> StepLoading:
        """Return what loading took since this was last asked."""
        spans_s, self._spans_s = self._spans_s, []
        found, work_s = StepLoading(spans_s, 0.0), self._loader.work_s()
        return found._replace(work_s=found.waited_s if work_s is None else work_s)

    def close(self) -> None:
        """Let those who load ahead end."""
        self._loader.close()

    def _read(self, step: int) -> Batch:
        began_s = time.perf_counter()
        try:
            return self._loader.load(step)
        finally:
            self._spans_s.append((began_s, time.perf_counter()))

    def _bring(self, step: int, copies: Copies) -> Batch:
        return [{name: copies.bring(tensor) for name, tensor in inputs.items()} for inputs in self._read(step)]
