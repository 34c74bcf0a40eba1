"""Rates: how quickly some GPUs were measured to multiply matrices, to attend and to move bytes, and where from.

A GPU that is not here is taken to reach one share of its data sheet's rates (``default_constants`` of
:mod:`autopar.profiler.kernels`): one rate for all shapes, under its power cap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.formats.profile import Precision
from autopar.hardware.gpus import Gpu


class Product(NamedTuple):
    """A product of matrices that was measured."""

    rows: int
    depth: int
    columns: int
    flops_per_s: float


@dataclass(frozen=True, kw_only=True)
class MeasuredRates:
    """What one kind of GPU sustains."""

    gpus: tuple[str, ...]
    """Those with this chip and this power."""
    half: tuple[Product, ...]
    """In bfloat16, as quick as in float16."""
    single: tuple[Product, ...] = ()
    """In float32."""
    attention: tuple[tuple[float, float], ...]
    """Operations of fused attention forward, ascending, and how many a second; blocks that a causal mask skips count as
    none."""
    attention_backward: tuple[tuple[float, float], ...]
    """The same of its backward."""
    memory_share: float
    """Of the memory's bandwidth, that large element-wise kernels reach."""
    source: str


def _products(*measured: tuple[int, int, int, float]) -> tuple[Product, ...]:
    return tuple(Product(rows, depth, columns, tera * 1e12) for rows, depth, columns, tera in measured)


def _attention(*measured: tuple[float, float]) -> tuple[tuple[float, float], ...]:
    return tuple((giga * 1e9, tera * 1e12) for giga, tera in measured)


MEASURED: tuple[MeasuredRates, ...] = (
    MeasuredRates(
        gpus=("H100-SXM", "H200-SXM"),
        half=_products(
            (8192, 8192, 8192, 702),
            (16384, 4096, 4096, 672),
            (16384, 4096, 16384, 647),
            (16384, 16384, 4096, 673),
            (8192, 1024, 4096, 555),
            (8192, 4096, 1024, 647),
            (4096, 2048, 5632, 609),
            (16384, 768, 3072, 548),
            (16384, 768, 50304, 609),
            (2048, 4096, 4096, 617),
            (1024, 12288, 12288, 634),
            (128, 4096, 4096, 157),
        ),
        single=_products(
            (8192, 8192, 8192, 51.6),
            (16384, 4096, 4096, 50.4),
            (16384, 4096, 16384, 50.7),
            (16384, 16384, 4096, 51.6),
            (8192, 1024, 4096, 48.7),
            (8192, 4096, 1024, 48.6),
            (4096, 2048, 5632, 48.2),
            (16384, 768, 3072, 47.5),
            (16384, 768, 50304, 49.2),
            (2048, 4096, 4096, 51.5),
            (1024, 12288, 12288, 51.5),
            (128, 4096, 4096, 42.9),
        ),
        attention=_attention(
            (5.1, 80), (10.2, 143), (25.8, 285), (51.5, 382), (137, 462), (275, 574), (550, 544), (1100, 605)
        ),
        attention_backward=_attention(
            (12.7, 38), (25.4, 76), (64.4, 163), (129, 201), (344, 306), (687, 399), (1374, 425), (2749, 495)
        ),
        memory_share=0.88,
        source="measured for this project on one H100 SXM (700 W, torch 2.11, CUDA 13, 28 November 2026), sustained; "
        "the H200 has the same chip and power",
    ),
    MeasuredRates(
        gpus=("B200-HGX",),
        half=_products(
            (4096, 8192, 10240, 1452),
            (4096, 10240, 8192, 1121),
            (10240, 4096, 8192, 1345),
            (4096, 8192, 8192, 1079),
            (8192, 4096, 8192, 1077),
            (4096, 8192, 57344, 1095),
            (4096, 57344, 8192, 1087),
            (57344, 4096, 8192, 1020),
            (4096, 28672, 8192, 1091),
            (4096, 8192, 28672, 1067),
            (8192, 4096, 28672, 1034),
            (4096, 8192, 128256, 1097),
            (4096, 128256, 8192, 1060),
            (128256, 4096, 8192, 1023),
            (4096, 8192, 1024, 1381),
            (4096, 1024, 8192, 1388),
        ),
        attention=_attention((34, 349), (69, 650), (137, 823), (275, 980), (550, 1121)),
        attention_backward=_attention((86, 741), (172, 850), (344, 896), (687, 820), (1374, 936)),
        memory_share=0.67,
        source="SimuMax's measurements of one B200 (github.com/MooreThreads/SimuMax, release v1.2, Apache-2.0): shares "
        "of 2250 TFLOP/s and of 8 TB/s; its shares of attention count a causal mask's skipped blocks as well",
    ),
)


def rates_of(gpu: Gpu) -> MeasuredRates | None:
    """Return what was measured of a GPU; none where nothing was.

    >>> from autopar.hardware.gpus import find
    >>> rates_of(find("H100")).half[0].flops_per_s, rates_of(find("T4"))
    (702000000000000.0, None)
    """
    return next((each for each in MEASURED if gpu.name in each.gpus), None)


def attention_flops_per_s(rates: MeasuredRates, flops: float, *, backward: bool) -> float:
    """Return the rate of attention of so many operations, between those that were measured in logarithms."""
    known, found = np.log(np.transpose(rates.attention_backward if backward else rates.attention))
    return float(np.exp(np.interp(np.log(flops), known, found)))


def near(products: Sequence[Product], factors: npt.NDArray[np.float64], outputs: float, depth: float) -> float:
    """Return the mean of the products' factors, weighted by how near their shapes are: at a measured shape, its own.

    Shapes are as far apart as the logarithms of what is computed, and of how many terms each number adds up (Shepard's
    inverse squares of distances).
    """
    shapes = np.log([(each.rows * each.columns, each.depth) for each in products])
    squares = np.square(shapes - np.log([outputs, depth])).sum(axis=1)
    return float(np.average(factors, weights=1 / (squares + 1e-9)))


def products_in(rates: MeasuredRates, precision: Precision) -> tuple[Product, ...]:
    """Return the products that were measured in a precision."""
    return rates.single if precision == "fp32" else rates.half
