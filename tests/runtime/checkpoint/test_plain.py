"""Plain values come back as they were."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch

from autopar.runtime.checkpoint.plain import NotPlainError, from_plain, plain_items, to_plain


def _value(rng: random.Random, depth: int = 3) -> object:
    made = [
        lambda: None,
        lambda: rng.random() < 0.5,
        lambda: rng.randrange(-(2**60), 2**60),
        lambda: rng.choice([rng.gauss(0, 1e-8), 1e300, 5e-324, -0.0, math.inf, -math.inf]),
        lambda: rng.choice(["", "lr", "é\n"]),
        lambda: torch.tensor(rng.gauss(0, 1), dtype=rng.choice([torch.float32, torch.float64, torch.bfloat16])),
        lambda: torch.tensor([rng.randrange(100) for _ in range(3)]),
    ]
    if depth:
        made += [
            lambda: [_value(rng, depth - 1) for _ in range(rng.randrange(4))],
            lambda: tuple(_value(rng, depth - 1) for _ in range(rng.randrange(4))),
            lambda: {f"key{at}": _value(rng, depth - 1) for at in range(rng.randrange(4))},
        ]
    return rng.choice(made)()


def _same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, float) and isinstance(other, float):
        return one == other and math.copysign(1, one) == math.copysign(1, other)
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("seed", range(200))
def test_values_drawn_at_random_come_back_through_json(seed: int) -> None:
    value = _value(random.Random(seed))
    text = json.dumps(to_plain(value), allow_nan=False)
    assert _same(from_plain(json.loads(text)), value)


def test_nan_is_kept_and_code_is_not() -> None:
    assert math.isnan(float(str(from_plain(to_plain(math.nan)))))
    with pytest.raises(NotPlainError):
        to_plain(print)
    with pytest.raises(NotPlainError):
        to_plain(torch.zeros(5000))
    assert plain_items({"lr": 0.1, "hook": print}) == {"lr": 0.1}
