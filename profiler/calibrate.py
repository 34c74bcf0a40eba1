"""Calibrate: fit the constants of estimates to a few measured runs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from autopar.profiler.estimate import LayerSeconds, Workload, layer_seconds
from autopar.profiler.roofline import Constants

NOISE = 0.07
"""Relative error that a run is expected to be predicted with: what the constants cannot explain."""
FEWEST_TO_LEAVE_OUT = 5

Numbers = npt.NDArray[np.float64]


class _Prior(NamedTuple):
    """How far a constant may be from its default: its logarithm's standard deviation."""

    deviation: float
    least: float
    most: float


_PRIORS = {
    "matmul_share": _Prior(0.2, 0.05, 1.0),
    "half_outputs": _Prior(0.7, 1e3, 1e8),
    "half_depth": _Prior(0.7, 1.0, 2e3),
    "memory_share": _Prior(0.2, 0.05, 1.0),
    "kernel_s": _Prior(0.7, 1e-7, 1e-4),
    "forward_launch_s": _Prior(0.7, 1e-7, 1e-3),
    "backward_launch_s": _Prior(0.7, 1e-7, 1e-3),
    "update_share": _Prior(0.5, 0.01, 3.0),
    "step_s": _Prior(1.0, 1e-5, 10.0),
}


class PricedRun(Protocol):
    """A run whose stages and micro-batches are known: what the planner's ``DictatedRun`` is."""

    @property
    def rows(self) -> tuple[int, ...]:
        """Every number of samples that a replica takes of a micro-batch."""

    def step_s(
        self,
        forward_s: Mapping[int, Sequence[float]],
        backward_s: Mapping[int, Sequence[float]],
        accumulate_s: Sequence[float],
        update_s: Sequence[float],
        overhead_s: float,
    ) -> float:
        """Return the seconds of a step, given every layer's times by number of samples."""


@dataclass(frozen=True)
class Observation:
    """A run that was measured."""

    load: Workload
    """Of its model; holds the run's numbers of rows among its sizes."""
    run: PricedRun
    recompute: bool
    """Whether every layer's backward ran its forward again."""
    step_s: float


@dataclass(frozen=True)
class Calibration:
    """Fitted constants, and how well they do; errors are medians of |predicted / measured - 1|."""

    constants: Constants
    runs: int
    error_before: float
    error_after: float
    error_left_out: float | None
    """Of each run with constants fitted to the others; none for fewer than five runs."""

    def notes(self) -> tuple[str, ...]:
        """Return what a profile says of its constants.

        >>> Calibration(Constants(), 6, 0.31, 0.04, 0.07).notes()[0]
        'constants fitted to 6 measured runs: median error 4.0 %, by default 31.0 %, of a run left out 7.0 %'
        """
        left_out = "" if self.error_left_out is None else f", of a run left out {100 * self.error_left_out:.1f} %"
        values = ", ".join(f"{name} {value:.3g}" for name, value in asdict(self.constants).items())
        return (
            f"constants fitted to {self.runs} measured run{'s' if self.runs > 1 else ''}: median error "
            f"{100 * self.error_after:.1f} %, by default {100 * self.error_before:.1f} %{left_out}",
            f"fitted constants: {values}",
        )


def calibrate(observations: Sequence[Observation], start: Constants, leave_out: bool = True) -> Calibration:
    """Fit constants to measured runs.

    Least squares of the logarithms of predicted over measured steps, robust to single bad runs (soft l1), with every
    constant drawn to where it starts, so that few runs move only what they tell about.
    """
    fitted = _fit(observations, start)
    left_out = None
    if leave_out and len(observations) >= FEWEST_TO_LEAVE_OUT:
        left_out = statistics.median(
            abs(predict([each], _fit([*observations[:index], *observations[index + 1 :]], start))[0] / each.step_s - 1)
            for index, each in enumerate(observations)
        )
    return Calibration(
        constants=fitted,
        runs=len(observations),
        error_before=_error(observations, start),
        error_after=_error(observations, fitted),
        error_left_out=left_out,
    )


def predict(observations: Sequence[Observation], constants: Constants) -> list[float]:
    """Return the predicted seconds of every run's step."""
    priced: dict[int, _Times] = {}
    for each in observations:
        if id(each.load) not in priced:
            priced[id(each.load)] = _Times.of(each.load, layer_seconds(each.load, constants))
    return [_step_s(each, priced[id(each.load)], constants) for each in observations]


def _step_s(observation: Observation, times: _Times, constants: Constants) -> float:
    return observation.run.step_s(
        times.forward_s,
        times.backward_again_s if observation.recompute else times.backward_s,
        times.accumulate_s,
        times.update_s,
        constants.step_s,
    )


@dataclass(frozen=True)
class _Times:
    """A workload's times as lists by number of rows."""

    forward_s: Mapping[int, Sequence[float]]
    backward_s: Mapping[int, Sequence[float]]
    backward_again_s: Mapping[int, Sequence[float]]
    accumulate_s: Sequence[float]
    update_s: Sequence[float]

    @classmethod
    def of(cls, load: Workload, times: LayerSeconds) -> _Times:
        def by_rows(values: Numbers) -> dict[int, list[float]]:
            return dict(zip(load.sizes, values.tolist(), strict=True))

        again = times.backward_s + times.forward_s
        once = (times.accumulate_s.tolist(), times.update_s.tolist())
        return cls(by_rows(times.forward_s), by_rows(times.backward_s), by_rows(again), *once)


def _fit(observations: Sequence[Observation], start: Constants) -> Constants:
    names = Constants.names()
    measured = np.log([each.step_s for each in observations])
    origin = _encode(start)
    deviations = np.array([_PRIORS[name].deviation for name in names])

    def residuals(point: Numbers) -> Numbers:
        predicted = np.log(predict(observations, _decode(point)))
        # The robust loss is for runs; a pull to the start is made as strong there as the square is.
        errors = np.sign(predicted - measured) * np.sqrt(_soft_l1((predicted - measured) / NOISE))
        return np.concatenate((errors, (point - origin) / deviations))

    bounds = (
        np.log([_PRIORS[name].least for name in names]),
        np.log([_PRIORS[name].most for name in names]),
    )
    inside = np.clip(origin, bounds[0] + 1e-9, bounds[1] - 1e-9)
    result = least_squares(residuals, inside, bounds=bounds, x_scale=deviations, diff_step=1e-4, ftol=1e-5, xtol=1e-5)
    return _decode(result.x)


def _soft_l1(errors: Numbers) -> Numbers:
    """Square of small errors, twice the size of large ones (scipy's soft_l1)."""
    return np.asarray(2 * (np.sqrt(1 + errors**2) - 1))


def _encode(constants: Constants) -> Numbers:
    return np.log(list(asdict(constants).values()))


def _decode(point: Numbers) -> Constants:
    return Constants(*np.exp(point).tolist())


def _error(observations: Sequence[Observation], constants: Constants) -> float:
    predicted = predict(observations, constants)
    return statistics.median(abs(p / each.step_s - 1) for p, each in zip(predicted, observations, strict=True))
