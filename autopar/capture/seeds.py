"""Seeds of data: what is drawn for a sample is the same on every rank that reads it (``docs/seeds.md``)."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


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
