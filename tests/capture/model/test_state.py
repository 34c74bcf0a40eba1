"""A model is left as it was, whatever its forward writes."""

import random
import warnings
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils import weight_norm

from autopar.capture.model.state import (
    WriteLog,
    deep_copy,
    generator_states,
    preserve_buffers,
    preserve_generators,
    preserve_parameters,
    set_generators,
)
from autopar.errors import CaptureError


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_random_numbers_aliases_and_statistics_are_as_before_even_if_the_block_fails() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.BatchNorm1d(4))
    before, state = _values(model), torch.get_rng_state()

    def run() -> None:
        with preserve_buffers(model):
            model(torch.rand(8, 4))
            assert not torch.equal(model[2].running_mean, before["2.running_mean"])
            raise ValueError("its forward fails")

    with pytest.raises(ValueError, match="its forward fails"):
        run()
    torch.testing.assert_close(_values(model), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)
    draw = random.Random(0)
    for _ in range(20):
        model = nn.ParameterList([nn.Parameter(torch.rand(3, 4)) for _ in range(6)])
        before = _values(model)
        chosen = sorted(draw.sample(range(6), draw.randint(0, 6)))

        def write(model: nn.ParameterList = model, chosen: list[int] = chosen) -> None:
            for index in chosen:
                alias = draw.choice((lambda p: p, lambda p: p.view(12)[3:5], lambda p: p.t()[1], lambda p: p.detach()))
                alias(model[index].data).add_(1.0)

        with preserve_parameters(model):
            write()
            assert [not torch.equal(model[i], before[str(i)]) for i in range(6)] == [i in chosen for i in range(6)]
        torch.testing.assert_close(_values(model), before, rtol=0, atol=0)
        log = WriteLog(model.parameters())
        with log:
            write()
        assert [id(tensor) for tensor, _ in log.previous_values] == [id(model[index]) for index in chosen]


def test_a_copy_has_tensors_of_its_own_and_a_buffer_of_another_size_is_named() -> None:
    with warnings.catch_warnings(action="ignore"):
        model = nn.Sequential(weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2))
    x = torch.rand(3, 4)
    expected = model(x).detach()
    twin = deep_copy(model)
    assert torch.equal(twin(x), expected)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1.0)
    assert torch.equal(model(x), expected)
    assert not torch.isclose(twin(x), expected).any()
    model = nn.Module()
    model.register_buffer("seen", torch.empty(0))
    said = r"buffer seen changes its size from \(0,\) to \(3,\) in a forward"
    with pytest.raises(CaptureError, match=said), preserve_buffers(model):
        model.get_buffer("seen").resize_(3)
    assert model.get_buffer("seen").shape == (0,)
    whole = torch.zeros(4)
    with WriteLog([whole[:2], whole[2:]]) as log:
        whole.add_(1)
    assert [value.tolist() for _, value in log.previous_values] == [[0.0, 0.0]] * 2


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
