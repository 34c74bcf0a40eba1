"""Which optimizers need all parameters at once, and which can step parts of them, found by trying."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from autopar.capture.optimizer import needs_all, splitting_problem, try_sharding
from autopar.capture.source import UserModel

Parameters = Iterable[nn.Parameter]
Make = Callable[[Any], optim.Optimizer]


class Clipping(optim.SGD):
    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        nn.utils.clip_grad_norm_([each for group in self.param_groups for each in group["params"]], 1.0)
        super().step()


class Trusting(optim.Optimizer):
    """Each parameter's step is scaled by its own norm, as LAMB's is."""

    def __init__(self, parameters: Parameters, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    wanted = each.grad + 0.1 * each
                    each.add_(wanted * (each.norm() / wanted.norm()), alpha=-group["lr"])


class Estimating(optim.Optimizer):
    """The step's size is estimated over all parameters, as D-Adaptation and Prodigy do."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters, {"size": 1e-3})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            gained, summed = 0.0, 0.0
            for each in group["params"]:
                state = self.state[each]
                state.setdefault("begun", each.clone())
                gained += float((each.grad * (state["begun"] - each)).sum())
                summed += float(each.grad.abs().sum())
            group["size"] = max(group["size"], gained / (1 + summed))
            for each in group["params"]:
                each.add_(each.grad.sign(), alpha=-group["size"])


class Ranking(optim.SGD):
    """Rows are centred over the rows of their parameter: nothing fails, and parts are centred otherwise."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                here = each.to_local() if hasattr(each, "to_local") else each
                slope = each.grad.to_local() if hasattr(each.grad, "to_local") else each.grad
                here.sub_(slope - slope.mean(0), alpha=group["lr"])


class Noisy(optim.SGD):
    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for each in group["params"]:
                each.add_(torch.randn_like(each), alpha=1e-3)


TORCHS: dict[str, Make] = {
    name: partial(getattr(optim, name), lr=1e-2)
    for name in ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "SGD")
}
TORCHS |= {
    "foreach": lambda parameters: optim.AdamW(parameters, foreach=True, amsgrad=True),
    "fused": lambda parameters: optim.AdamW(parameters, fused=True),
    "momentum": lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "centred": lambda parameters: optim.RMSprop(parameters, centered=True, momentum=0.9),
    "rate": lambda parameters: optim.Adam(parameters, lr=torch.tensor(1e-2)),
}


@pytest.fixture(scope="module")
def named() -> list[tuple[str, nn.Parameter]]:
    model = nn.Sequential(nn.Linear(50, 8), nn.Conv2d(3, 4, 3), nn.LayerNorm(8), nn.Linear(8, 1), nn.Linear(30, 20))
    model.gain = nn.Parameter(torch.tensor(1.0))
    model.nothing = nn.Parameter(torch.zeros(0, 3))
    model.turn = nn.Parameter(torch.zeros(4, 4, dtype=torch.complex64))
    return list(model.named_parameters())


@pytest.fixture(autouse=True)
def _same_random_numbers() -> Iterator[None]:
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before)


def _user(make: Make) -> UserModel:
    return UserModel("model.py", Path("model.py"), "0" * 64, lambda: None, {"optimizer": make})


@pytest.mark.parametrize("name", TORCHS)
def test_most_of_torchs_optimizers_take_parameters_one_by_one_and_in_parts(
    name: str, named: list[tuple[str, nn.Parameter]]
) -> None:
    assert needs_all(_user(TORCHS[name]), named) is None
    real = [(name, each) for name, each in named if not each.is_complex()] if name == "fused" else named
    assert try_sharding(_user(TORCHS[name]), real) is None
    assert splitting_problem(_user(TORCHS[name]), real) is None


@pytest.mark.parametrize("name", ["Adafactor", "Rprop", "Muon"])
def test_those_that_look_at_a_whole_matrix_cannot_step_parts(name: str, named: list[tuple[str, nn.Parameter]]) -> None:
    make = getattr(optim, name)
    user = _user(lambda parameters: make([each for each in parameters if each.dim() == 2 and not each.is_complex()]))
    assert needs_all(user, named) is None
    assert "where replicas hold parts of parameters" in (try_sharding(user, named) or "")


@pytest.mark.parametrize(("kind", "together"), [(Clipping, True), (Estimating, True), (Trusting, False)])
def test_a_statistic_over_all_parameters_is_found(
    kind: type[optim.Optimizer], together: bool, named: list[tuple[str, nn.Parameter]]
) -> None:
    real = [(name, each) for name, each in named if not each.is_complex()]
    found = needs_all(_user(lambda parameters: kind(parameters)), real)
    assert found == ("takes all parameters together" if together else None)


def test_one_that_steps_each_parameter_by_its_norm_can_step_parts(named: list[tuple[str, nn.Parameter]]) -> None:
    assert try_sharding(_user(Trusting), named) is None


@pytest.mark.parametrize("kind", [Clipping, Trusting, Ranking, Noisy])
def test_a_statistic_over_a_parameter_is_another_on_a_rank_that_has_a_part_alone(
    kind: Callable[..., optim.Optimizer], named: list[tuple[str, nn.Parameter]]
) -> None:
    real = [(name, each) for name, each in named if not each.is_complex()]
    found = splitting_problem(_user(lambda parameters: kind(parameters, lr=0.1)), real)
    assert found == "its step does something else where ranks have parts of parameters"


@pytest.mark.parametrize(("name", "steps_parts"), [("Adafactor", False), ("Rprop", True), ("Muon", False)])
def test_those_that_look_at_a_whole_matrix_cannot_step_parts_alone(
    name: str, steps_parts: bool, named: list[tuple[str, nn.Parameter]]
) -> None:
    make = getattr(optim, name)
    user = _user(lambda parameters: make([each for each in parameters if each.dim() == 2 and not each.is_complex()]))
    assert (splitting_problem(user, named) is None) == steps_parts


def test_one_that_takes_parts_for_wholes_is_found_by_what_it_does(named: list[tuple[str, nn.Parameter]]) -> None:
    many = [(name, each) for name, each in named if len(each.shape) and 1 not in each.shape]
    found = try_sharding(_user(lambda parameters: Ranking(parameters, lr=0.1)), many)
    assert found == "its step does something else where replicas hold parts of parameters"


def test_one_that_draws_random_numbers_draws_them_in_the_order_of_all_parameters(
    named: list[tuple[str, nn.Parameter]],
) -> None:
    assert "draws random numbers" in (needs_all(_user(lambda parameters: Noisy(parameters, lr=0.1)), named) or "")


def test_an_optimizer_that_cannot_be_tried_is_left_to_what_else_finds_it(
    named: list[tuple[str, nn.Parameter]],
) -> None:
    def fails(parameters: Parameters) -> optim.Optimizer:
        raise ValueError("these are too small")

    assert needs_all(_user(fails), named) is None
    assert try_sharding(_user(fails), named) is None
    assert splitting_problem(_user(fails), named) is None


def test_groups_that_go_by_place_are_no_statistic(named: list[tuple[str, nn.Parameter]]) -> None:
    def by_place(parameters: Parameters) -> optim.Optimizer:
        first, *others = parameters
        return optim.SGD([{"params": [first], "lr": 1.0}, {"params": others}], lr=0.1)

    assert needs_all(_user(by_place), named) is None
