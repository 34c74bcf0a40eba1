"""What optimizers keep, and hold for a while, on tensors without data and on real ones; and what a step takes."""

from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from autopar.capture.model.source import load
from autopar.errors import ModelError
from autopar.profiler import optimizer
from autopar.profiler.device import CallClock, Time
from autopar.profiler.optimizer import OptimizerMemory, measure_step, measure_updates, optimizer_memory
from paths import EXAMPLES

MLP, CPU = EXAMPLES / "mlp.py", torch.device("cpu")
LAYERS = {
    "a": [("a.weight", nn.Parameter(torch.zeros(100, 10))), ("a.bias", nn.Parameter(torch.zeros(10)))],
    "b": [("b.weight", nn.Parameter(torch.ones(50)))],
}
Make = Callable[..., torch.optim.Optimizer]


def _memory(make: Make, device: str = "cpu") -> OptimizerMemory:
    user = load(str(MLP))
    user.functions["optimizer"] = make
    return optimizer_memory(user, {**LAYERS, "none": []}, torch.device(device))


def test_states_are_counted_and_updates_of_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _memory(lambda parameters: torch.optim.AdamW(parameters, lr=0.1))
    assert found.state == {"a": 2 * 4040 + 8, "b": 2 * 200 + 4, "none": 0}
    assert found.workspace == {"a": 2 * 4000, "b": 2 * 200, "none": 0}
    assert not found.at_once

    class Reading(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            self.param_groups[0]["lr"] = 0.1 / self.param_groups[0]["params"][0].grad.norm().item()
            super().step()

    found = _memory(lambda parameters: Reading(parameters, lr=0.1, momentum=0.9))
    assert found.state == {"a": 4040, "b": 200, "none": 0}
    weight = nn.Parameter(torch.ones(64, 64))
    found = measure_updates(load(str(MLP)), [("own", [("w", weight)]), ("own", [("v", weight)]), ("none", [])], CPU)
    assert min(found["own"].seconds, found["own"].accumulate_s) > 0
    assert torch.equal(weight, torch.ones(64, 64))
    assert weight.grad is None
    # Without room, they are measured by their first rows.
    weights = [weight, nn.Parameter(torch.ones(64))]
    copies, scale = optimizer._copies(weights, most_bytes=4 * 64 * 65 // 4)
    assert [tuple(copy.shape) for copy in copies] == [(16, 64), (16,)]
    assert scale == 4.0
    monkeypatch.setattr(optimizer, "_free_bytes", lambda device: 4000)
    large = [("large", list(zip("wb", weights, strict=True)))]
    monkeypatch.setattr(CallClock, "times", lambda self: [Time(2.0) for _ in self._host_s])
    # A row of 64 and its bias are timed.
    assert measure_updates(load(str(MLP)), large, CPU)["large"] == optimizer.UpdateCosts(2.0 * 64, 2.0 * 64)


def test_a_step_over_all_layers_is_timed_between_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = Mock()
    monkeypatch.setattr(torch.cuda, "synchronize", waits)
    parameters = [each for layer in LAYERS.values() for each in layer]
    # Models may have parameters of several types.
    parameters += [("half", nn.Parameter(torch.ones(9, dtype=torch.bfloat16))), ("scale", nn.Parameter(torch.ones(())))]
    before = [parameter.clone() for _, parameter in parameters]
    step_s = measure_step(load(str(MLP)), parameters, CPU)
    assert step_s is not None
    assert step_s > 0
    assert waits.call_count == 2 * (optimizer.WARM_UP + optimizer.REPEATS)
    assert all(torch.equal(one, parameter) for one, (_, parameter) in zip(before, parameters, strict=True))
    assert optimizer.UpdateCosts(2.0, 3.0).later(0.5) == optimizer.UpdateCosts(2.5, 3.0)
    monkeypatch.setattr(optimizer, "_free_bytes", lambda device: 4000)
    assert measure_step(load(str(MLP)), parameters, CPU) is None


def test_an_optimizer_works_on_all_at_once_on_cuda_and_says_so_where_it_fails() -> None:
    assert _memory(lambda parameters: torch.optim.AdamW(parameters, lr=0.1), "cuda").at_once
    told = _memory(lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=False), "cuda")
    assert not told.at_once
    fused = _memory(lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True), "cuda")
    assert fused.workspace == {"a": 0, "b": 0, "none": 0}
    # Layers of a single kind are worked on at once, too.
    user = load(str(MLP))
    user.functions["optimizer"] = lambda parameters: torch.optim.AdamW(parameters, lr=0.1)
    single = [optimizer_memory(user, {"a": LAYERS["a"], "none": []}, torch.device(each)) for each in ("cpu", "cuda")]
    assert [each.at_once for each in single] == [False, True]
    with pytest.raises(Exception, match="Invalid learning rate"):
        _memory(lambda parameters: torch.optim.SGD(parameters, lr=-1.0))
    with pytest.raises(ModelError, match=r"the optimizer's step\(\) raised TypeError"):
        _memory(torch.optim.LBFGS)
    user = load(str(MLP))
    user.functions["optimizer"] = lambda parameters: torch.optim.Adafactor(parameters)
    with pytest.raises(ModelError, match=r"the optimizer's step\(\) raised ZeroDivisionError"):
        measure_updates(user, [("empty", [("e", nn.Parameter(torch.zeros(0)))])], CPU)
