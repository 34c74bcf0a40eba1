"""Reading: whether data is the same however often, and in whichever order, it is read.

Every rank has a dataset of its own, and reads the samples of its own share: what one gives may depend on its index and
on the default generators, and on nothing that was read before.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from autopar.capture.seeds import seed_data
from autopar.capture.source import UserModel
from autopar.capture.state import contents
from autopar.errors import ModelError

SAMPLES = 4
_REMEDY = "seeded alike; every rank reads for itself, so it must depend on {} and the default generators only"


def check_reading(user: UserModel, seed: int) -> None:
    """Read a few samples twice, and once more from another ``dataset()``, in other orders, all seeded as in training.

    Raises:
        ModelError: samples or batches differ; names ``dataset()``, its item, or ``collate()``.
    """
    with _generators():
        seed_data(seed, "dataset")
        dataset = user.dataset()
        indices = list(range(min(SAMPLES, user.sample_count(dataset))))
        samples, batch = _read(user, dataset, indices, seed)
        again = _read(user, dataset, indices[::-1], seed)
        seed_data(seed, "dataset")
        anew = _read(user, user.dataset(), indices[1:] + indices[:1], seed)
    file = user.data or user.path
    for what, (others, other) in (("", again), (" of dataset() called again", anew)):
        for index in indices:
            if samples[index] != others[index]:
                remedy = _REMEDY.format("its index")
                raise ModelError(
                    f"{file}: dataset()[{index}]{what} gives another sample when it is read again, {remedy}"
                )
        if batch != other:
            remedy = _REMEDY.format("its samples")
            raise ModelError(f"{file}: collate() makes another batch of the same samples, {remedy}")


def _read(user: UserModel, dataset: object, order: Sequence[int], seed: int) -> tuple[dict[int, object], object]:
    """Return the content of samples, and of a batch of them in the order of their indices."""
    samples: dict[int, object] = {}
    found: dict[int, object] = {}
    for index in order:
        seed_data(seed, "sample", 0, index)
        samples[index] = user.sample(dataset, index)  # type: ignore[arg-type]
        found[index] = contents(samples[index])
    seed_data(seed, "collate", 0, 0)
    return found, contents(user.collate([samples[index] for index in sorted(samples)]))


@contextlib.contextmanager
def _generators() -> Iterator[None]:
    """Leave the default generators as they were."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
