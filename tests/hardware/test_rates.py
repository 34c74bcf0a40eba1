"""Rates that were measured: given back at their shapes, and between them never beyond those around."""

import csv
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.hardware.gpus import find
from autopar.hardware.rates import MEASURED, MeasuredRates, attention_flops_per_s, near
from autopar.profiler.kernels import Kernel, KernelTable, default_constants, seconds


def _product(rows: int, depth: int, columns: int, dtype: torch.dtype) -> Kernel:
    return Kernel("mm", "matmul", dtype, 2 * rows * depth * columns, 0, 0, rows * columns, depth)


@pytest.mark.parametrize("rates", MEASURED, ids=lambda rates: rates.gpus[0])
def test_a_product_of_a_measured_shape_takes_what_was_measured(rates: MeasuredRates) -> None:
    gpu = find(rates.gpus[0])
    constants = default_constants(gpu)
    assert constants.memory_share == rates.memory_share
    for products, dtype in ((rates.half, torch.bfloat16), (rates.half, torch.float16), (rates.single, torch.float32)):
        for rows, depth, columns, flops_per_s in products:
            kernel = _product(rows, depth, columns, dtype)
            alike = [each for each in products if (each.rows * each.columns, each.depth) == (rows * columns, depth)]
            if len(alike) == 1:
                taken = seconds(KernelTable.of([[kernel]], gpu), gpu, constants)[0] - constants.kernel_s
                assert kernel.flops / taken == pytest.approx(flops_per_s, rel=1e-3)
    assert len(rates.source) > 40
    for known in (rates.attention, rates.attention_backward):
        assert [flops for flops, _ in known] == sorted(flops for flops, _ in known)
        assert all(rate < gpu.flops_per_s("bf16") for _, rate in known)


@given(outputs=st.floats(1, 1e10), depth=st.floats(1, 1e6))
def test_between_shapes_and_beyond_them_factors_are_those_of_some(outputs: float, depth: float) -> None:
    products = MEASURED[0].half
    factors = np.linspace(0.5, 1.5, len(products))
    assert 0.5 <= near(products, factors, outputs, depth) <= 1.5


@given(flops=st.floats(1e3, 1e18), backward=st.booleans())
def test_attention_reaches_what_some_did(flops: float, backward: bool) -> None:
    rates = MEASURED[0]
    known = [rate for _, rate in (rates.attention_backward if backward else rates.attention)]
    assert min(known) * (1 - 1e-9) <= attention_flops_per_s(rates, flops, backward=backward) <= max(known) * (1 + 1e-9)


@pytest.mark.skipif("AUTOPAR_DATA" not in os.environ, reason="AUTOPAR_DATA names no folder of published data")
def test_the_h100_s_products_are_those_of_the_table() -> None:
    path = Path(os.environ["AUTOPAR_DATA"]) / "h100" / "measured.csv"
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["what"] == "matmul" and row["n"] != "50257"]
    known = {"torch.bfloat16": MEASURED[0].half, "torch.float32": MEASURED[0].single}
    assert len(rows) == sum(map(len, known.values()))
    for row in rows:
        shape = int(row["m"]), int(row["k"]), int(row["n"])
        rate = next(each.flops_per_s for each in known[row["dtype"]] if each[:3] == shape)
        assert rate == pytest.approx(float(row["tflops"]) * 1e12, rel=0.01)
