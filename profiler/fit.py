"""The affine function of the micro-batch size that fits a layer's times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.formats.profile import Line


def fitted(sizes: Sequence[int], seconds: Sequence[float]) -> Line | None:
    """Fit ``fixed_s + per_sample_s * rows``, neither part negative, with the least squares of relative errors.

    Returns none for a single size, which no line follows from.

    >>> line = fitted((1, 4, 8), (3.0, 6.0, 10.0))
    >>> round(line.fixed_s, 9), round(line.per_sample_s, 9), round(line.residual, 9)
    (2.0, 1.0, 0.0)
    >>> fitted((1, 4), (1.0, 0.5)).per_sample_s, fitted((1, 4), (0.0, 0.0)).at(8), fitted((4,), (1.0,))
    (0.0, 0.0, None)
    """
    if len(sizes) < 2:
        return None
    rows, values = np.asarray(sizes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    # A layer without a backward takes nothing at any size.
    weights = 1 / np.where(values > 0, values, 1.0)
    ones = np.ones_like(rows)
    candidates = [np.linalg.lstsq(np.stack((ones, rows), 1) * weights[:, None], values * weights, rcond=None)[0]]
    candidates += [_alone(ones, values, weights, 0), _alone(rows, values, weights, 1)]
    # The least error without a negative part lies where no part is negative, or on an edge where one is 0.
    fixed, per_sample = min(
        (each for each in candidates if min(each) >= 0),
        key=lambda each: float(np.sum(((each[0] + each[1] * rows - values) * weights) ** 2)),
    )
    differences = np.abs(fixed + per_sample * rows - values) * weights
    return Line(fixed_s=float(fixed), per_sample_s=float(per_sample), residual=float(differences.max()))


def _alone(column: np.ndarray, values: np.ndarray, weights: np.ndarray, place: int) -> np.ndarray:
    result = np.zeros(2)
    result[place] = np.sum(column * values * weights**2) / np.sum((column * weights) ** 2)
    return result
