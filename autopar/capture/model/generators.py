"""Generators: the random states that a script's own code draws from; read, set, and left as they were.

What a job draws between two lines of a script is nothing to the script: else its data loader would give out other
samples than in plain training, and every rank others.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy
import torch

_TWISTER = "MT19937"
"""NumPy's default generator, unless somebody sets another."""


def generator_states(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the states of torch's, Python's and NumPy's default generators, and of the device's."""
    found = {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    _, words, gauss = random.getstate()
    found["python"] = torch.tensor(words)
    found["python gauss"] = _gauss(gauss)
    state = numpy.random.get_state(legacy=False)
    if state["bit_generator"] == _TWISTER:
        found["numpy"] = torch.tensor([*state["state"]["key"].tolist(), state["state"]["pos"]])
        found["numpy gauss"] = _gauss(state["gauss"] if state["has_gauss"] else None)
    return found


def _gauss(kept: float | None) -> torch.Tensor:
    """Of a pair of normal numbers the second, where it has not been given out."""
    return torch.tensor([] if kept is None else [kept], dtype=torch.float64)


def set_generators(device: torch.device, states: Mapping[str, torch.Tensor]) -> None:
    """Set what :func:`generator_states` has found; some may be missing."""
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    if "python" in states:
        gauss = states.get("python gauss", torch.empty(0)).tolist()
        random.setstate((3, tuple(states["python"].tolist()), gauss[0] if gauss else None))
    if "numpy" in states:
        gauss = states.get("numpy gauss", torch.empty(0)).tolist()
        *key, pos = states["numpy"].tolist()
        found = {"state": {"key": numpy.array(key, dtype=numpy.uint32), "pos": pos}, "bit_generator": _TWISTER}
        numpy.random.set_state({**found, "has_gauss": len(gauss), "gauss": gauss[0] if gauss else 0.0})


@contextmanager
def preserve_generators(device: torch.device) -> Iterator[None]:
    """Leave the generators, at the end of the block, as they were at its beginning."""
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpy_state = numpy.random.get_state(legacy=False)
    cuda_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state, device)
