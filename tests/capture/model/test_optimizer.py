"""Which optimizers need all parameters at once, and which can step parts of them, found by trying."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from autopar.capture.model.optimizer import needs_all, splitting_problem, try_sharding
from autopar.capture.model.source import UserModel

Parameters = Iterable[nn.Parameter]
Make = Callable[[Any], optim.Optimizer]
Named = list[tuple[str, nn.Parameter]]
Change = Callable[[dict[str, Any]], None]


class Stepping(optim.Optimizer):
    """Its step is a function of a group."""

    def __init__(self, parameters: Parameters, change: Change) -> None:
        super().__init__(parameters, {"size": 1e-3})
        self.change = change

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.change(group)


def descend(group: dict[str, Any]) -> None:
    for each in group["params"]:
        each.sub_(each.grad, alpha=0.1)


def clip(group: dict[str, Any]) -> None:
    nn.utils.clip_grad_norm_(group["params"], 1.0)
    descend(group)


def trust(group: dict[str, Any]) -> None:
    """Scale each parameter's step by its own norm, as LAMB does."""
    for each in group["params"]:
        if each.grad is not None:
            wanted = each.grad + 0.1 * each
            each.sub_(wanted * (each.norm() / wanted.norm()), alpha=0.1)


def estimate(group: dict[str, Any]) -> None:
    """Estimate the step's size over all parameters, as D-Adaptation and Prodigy do."""
    begun = group.setdefault("begun", [each.clone() for each in group["params"]])
    pairs = list(zip(group["params"], begun, strict=True))
    gained = sum(float((each.grad * (first - each)).sum()) for each, first in pairs)
    group["size"] = max(group["size"], gained / (1 + sum(float(each.grad.abs().sum()) for each, _ in pairs)))
    for each, _ in pairs:
        each.sub_(each.grad.sign(), alpha=group["size"])


def rank(group: dict[str, Any], over: int = 0) -> None:
    """Centre rows over the rows of their parameter: nothing fails, and parts are centred otherwise."""
    for each in group["params"]:
        here = each.to_local() if hasattr(each, "to_local") else each
        slope = each.grad.to_local() if hasattr(each.grad, "to_local") else each.grad
        here.sub_(slope - slope.mean(over, keepdim=True) if slope.dim() > over else slope, alpha=0.1)


def noise(group: dict[str, Any]) -> None:
    descend(group)
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
def named() -> Named:
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


@pytest.mark.some(6)
@pytest.mark.parametrize("name", TORCHS)
def test_most_of_torchs_optimizers_take_parameters_one_by_one_and_in_parts(name: str, named: Named) -> None:
    assert needs_all(_user(TORCHS[name]), named) is None
    real = [(name, each) for name, each in named if not each.is_complex()] if name == "fused" else named
    assert try_sharding(_user(TORCHS[name]), real) is None
    assert splitting_problem(_user(TORCHS[name]), real) is None


@pytest.mark.parametrize(("name", "alone"), [("Adafactor", False), ("Rprop", True), ("Muon", False)])
def test_those_that_look_at_a_whole_matrix_cannot_step_its_parts(name: str, alone: bool, named: Named) -> None:
    make = getattr(optim, name)
    user = _user(lambda parameters: make([each for each in parameters if each.dim() == 2 and not each.is_complex()]))
    assert needs_all(user, named) is None
    assert "where replicas hold parts of parameters" in (try_sharding(user, named) or "")
    assert (splitting_problem(user, named) is None) == alone


SHARDED, PARTS = (
    f"its step does something else where {who} parts of parameters" for who in ("replicas hold", "ranks have")
)


@pytest.mark.parametrize(
    ("change", "together", "sharded", "alone"),
    [
        (clip, "takes all parameters together", ..., PARTS),
        (estimate, "takes all parameters together", ..., ...),
        # Each parameter's norm is known to replicas that hold parts of it, and not to ranks that have parts alone.
        (trust, None, None, PARTS),
        (rank, None, SHARDED, PARTS),
        # Halves of rows have whole columns to centre over, and halves of columns have not.
        (partial(rank, over=1), None, ..., PARTS),
        (noise, "draws random numbers for one parameter after the other", ..., PARTS),
    ],
)
def test_a_statistic_over_parameters_or_over_rows_is_found(
    change: Change, together: object, sharded: object, alone: object, named: Named
) -> None:
    real = [(name, each) for name, each in named if not each.is_complex()]
    user = _user(lambda parameters: Stepping(parameters, change))
    assert needs_all(user, real) == together
    many = [(name, each) for name, each in real if len(each.shape) and 1 not in each.shape]
    assert sharded is ... or try_sharding(user, many) == sharded
    assert alone is ... or splitting_problem(user, real) == alone


def test_groups_that_go_by_place_are_no_statistic_and_what_cannot_be_tried_is_left_to_others(named: Named) -> None:
    def fails(parameters: Parameters) -> optim.Optimizer:
        raise ValueError("these are too small")

    assert [ask(_user(fails), named) for ask in (needs_all, try_sharding, splitting_problem)] == [None] * 3

    def by_place(parameters: Parameters) -> optim.Optimizer:
        first, *others = parameters
        return optim.SGD([{"params": [first], "lr": 1.0}, {"params": others}], lr=0.1)

    assert needs_all(_user(by_place), named) is None
