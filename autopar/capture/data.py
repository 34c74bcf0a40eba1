"""Reading data: whether a sample is the same however often, and in whichever order, samples are read.

Every rank has a dataset of its own, and reads the samples of its own share: what one gives may depend on its index and
on the default generators, which are seeded alike on every rank that reads it (``docs/howto/verify.md``), and on nothing
that was read before. ``dataset()`` and ``collate`` may cache. A few samples are read twice, and once more from another
``dataset()``, in other orders and seeded alike; if they differ, ``dataset()[i]`` or ``collate()`` is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from autopar.capture.python_state import contents
from autopar.capture.source import UserModel
from autopar.errors import ModelError


def seed_data(*parts: object) -> None:
    """Seed what data sets draw from: the default generators of Python, NumPy and torch's CPU.

    ``parts``, joined by ``/``, say what is drawn for. Ranks that load the same sample must draw the same for it, or
    inputs on one stage would not be those of the targets on another.

    >>> seed_data(0, "sample", 0, 17)
    >>> first = random.random(), float(np.random.rand()), float(torch.rand(()))
    >>> seed_data(0, "sample", 0, 17)
    >>> first == (random.random(), float(np.random.rand()), float(torch.rand(())))
    True
    """
    number = number_of("/".join(map(str, parts)))
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.default_generator.manual_seed(number)


def number_of(text: str) -> int:
    """Return the first 8 bytes, big-endian, of a text's SHA-256, without the highest bit."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


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
