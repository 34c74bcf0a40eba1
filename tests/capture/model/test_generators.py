"""Random states that a script draws from: what is set is what was read, and a block leaves them as they were."""

import random
from collections.abc import Callable

import numpy
import pytest
import torch

from autopar.capture.model.generators import generator_states, preserve_generators, set_generators

CPU = torch.device("cpu")
DRAWS: tuple[Callable[[], float], ...] = (
    random.random,
    lambda: random.gauss(0, 1),
    numpy.random.rand,
    numpy.random.randn,
    lambda: float(torch.rand(())),
    lambda: float(torch.randn(())),
)


@pytest.mark.parametrize("seed", range(10))
def test_random_draws_come_again_and_those_of_a_block_are_no_draws(seed: int) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)

    def some() -> list[Callable[[], float]]:
        return chance.choices(DRAWS, k=chance.randint(1, 7))

    for draw in some():
        draw()
    states, draws = generator_states(CPU), some()
    with preserve_generators(CPU):
        expected = [draw() for draw in draws]
    with pytest.raises(KeyError), preserve_generators(CPU):
        raise KeyError([draw() for draw in some()])
    assert [draw() for draw in draws] == expected
    set_generators(CPU, states)
    assert [draw() for draw in draws] == expected
