"""Times of layers in rounds, and the line that fits them."""

import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from autopar.capture import capture_module, named_tensors
from autopar.profiler import measure as measuring
from autopar.profiler.device import as_it_is
from autopar.profiler.layer_runs import LayerChain, LayerInputs
from autopar.profiler.measure import fit_line, measure, spread
from capture_zoo import build

CPU = torch.device("cpu")


def test_without_a_budget_measuring_costs_a_bounded_number_of_steps() -> None:
    model, batch, loss = build("chain")
    graph = capture_module(model, batch, loss)
    chain = LayerChain(graph.layers, graph.outputs, as_it_is, CPU)
    ways = [Mock(wraps=getattr(chain, way)) for way in ("step", "split", "recompute")]
    chain.step, chain.split, chain.recompute = ways  # type: ignore[method-assign]
    tensors = named_tensors(batch)
    whole = LayerInputs(6, tensors, dict.fromkeys(tensors, False))
    half = LayerInputs(3, {name: tensor[:3] for name, tensor in whole.tensors.items()}, whole.gradient)
    timings = measure(chain, {3: half, 6: whole}, 1e-9, lambda what, share: None)
    # Of each kind, and of each size, a step that is not recorded, and three or two that are; and a warm-up.
    rows = [[call.args[0].rows for call in way.call_args_list] for way in ways]
    assert [(each.count(6), each.count(3)) for each in rows] == [(4, 5), (3, 3), (3, 3)]
    kinds = {layer.fingerprint for layer in graph.layers}
    assert timings.keys() == {(kind, size) for kind in kinds for size in (3, 6)}
    for timing in timings.values():
        assert 2 * len(timing.forward) == 3 * len(timing.backward_input) == 3 * len(timing.recompute)


def test_no_other_line_without_a_negative_part_has_less_relative_error() -> None:
    draw = random.Random(2)
    for _ in range(50):
        sizes = sorted(draw.sample(range(1, 65), draw.randint(2, 6)))
        seconds = [draw.uniform(0.5, 1.5) * (draw.choice((0, 1)) + draw.choice((-0.01, 0.1)) * n + 1) for n in sizes]
        line = fit_line(sizes, seconds)
        assert line is not None

        rows, values = np.array(sizes), np.array(seconds)
        # A grid of lines around it, in shares of the largest that could fit.
        fixed, slope = np.meshgrid(np.linspace(0, 2, 101) * values.max(), np.linspace(0, 2, 101) * max(values / rows))
        others = ((fixed[..., None] + slope[..., None] * rows) / values - 1) ** 2
        own = sum((line.at(size) / second - 1) ** 2 for size, second in zip(sizes, seconds, strict=True))
        assert min(line.fixed_s, line.per_sample_s) >= 0
        assert own <= others.sum(-1).min() + 1e-9
        errors = [abs(line.at(size) / second - 1) for size, second in zip(sizes, seconds, strict=True)]
        assert line.residual == pytest.approx(max(errors))
    for falling, expected in (((1.0, 4.0), (0.0, 1.2)), ((2.0, 1.0), (1.2, 0.0))):
        line = fit_line((1, 2), falling)
        assert line is not None
        assert (line.fixed_s, line.per_sample_s) == pytest.approx(expected)


@pytest.mark.reliability(48)
def test_spread_is_over_the_median_and_no_round_ends_beyond_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of 4 seconds: two end within 8 to 12, and a third would end at 12."""
    times = [float(number) for number in range(1, 8)]
    random.Random(0).shuffle(times)
    # Of 1 to 7 the quartiles are 2, 4 and 6; of three times they are the times themselves.
    assert spread(times) == pytest.approx((6 - 2) / 4)
    assert spread([3.0, 1.0, 2.0]) == pytest.approx((3 - 1) / 2)
    assert spread([9.0, 1.0]) == 0.0
    for budget_s, rounds in ((8.0, 2), (11.9, 2), (12.0, 3)):
        run: list[int] = []
        clock = SimpleNamespace(perf_counter=iter(range(0, 400, 4)).__next__)
        monkeypatch.setattr(measuring, "time", clock)
        measuring._rounds(run.append, (1, 2), budget_s, lambda share: None)
        assert run == [1, 2] * rounds


def test_shares_of_timing_only_rise_and_say_what_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, float]] = []
    none = dict.fromkeys(("step", "split", "recompute"), lambda _: ())
    chain = SimpleNamespace(layers=(), on_gpu=False, **none)
    monkeypatch.setattr(measuring, "MAX_ROUNDS", 3)
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    for splits, names in ((True, 4), (False, 3)):
        told.clear()
        measuring.measure(chain, {1: None, 4: None}, 1.0, lambda *each: told.append(each), splits)  # type: ignore[arg-type]
        assert [share for _, share in told] == sorted(share for _, share in told)
        assert (told[0][1], told[-1][1]) == (0.0, pytest.approx(1.0))
        assert len({what for what, _ in told}) == names
        assert {what.partition(": ")[0] for what, _ in told} == {"timing layers"}


@pytest.mark.parametrize("step_s", [0.01, 1.0])
def test_long_rounds_are_shortened_on_a_gpu(monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
    """One step in a row then, with halves and recomputation at the largest size alone."""
    now_s, ran = 0.0, list[tuple[str, int]]()

    def way(name: str) -> Callable[[int], tuple[()]]:
        def run(size: int) -> tuple[()]:
            nonlocal now_s
            now_s += step_s
            ran.append((name, size))
            return ()

        return run

    ways = {name: way(name) for name in ("step", "split", "recompute")}
    chain = SimpleNamespace(layers=(), on_gpu=True, **ways)
    monkeypatch.setattr(measuring, "MAX_ROUNDS", 1)
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: now_s))
    measuring.measure(chain, {size: size for size in (1, 4)}, 1.0, lambda what, share: None)  # type: ignore[arg-type]
    counts = Counter(ran)
    # Two to see how long one takes, and one that warms up.
    long = {("step", 1): 3 + 2, ("step", 4): 2, ("split", 4): 1, ("recompute", 4): 1}
    short = {
        ("step", 1): 3 + 4,
        ("step", 4): 4,
        **{(name, size): 3 for name in ways if name != "step" for size in (1, 4)},
    }
    assert counts == (long if step_s == 1.0 else short)
