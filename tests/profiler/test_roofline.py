"""Seconds of kernels on a GPU that is not there, against closed forms."""

import numpy as np
import pytest
import torch

from autopar.hardware.gpus import find
from autopar.profiler.kernels import ALIGNED_SHARE, Constants, Kernel, KernelTable, default_constants, seconds

A100 = find("A100")


def _product(size: int, dtype: torch.dtype = torch.float16) -> Kernel:
    return Kernel("mm", "matmul", dtype, 2 * size**3, 2 * size**2 * 2, size**2 * 2, size**2, size)


def test_a_large_product_reaches_the_stated_share_and_small_ones_less() -> None:
    constants = Constants(matmul_share=0.7)
    table = KernelTable.of([[_product(size)] for size in (512, 2048, 65536)], A100)
    reached = table.flops / seconds(table, A100, constants) / 312e12
    assert np.all(np.diff(reached) > 0)
    assert reached[-1] == pytest.approx(0.7, rel=0.01)
    assert reached[0] < 0.35


def test_a_kernel_without_products_takes_its_bytes_and_launches_are_counted_apart() -> None:
    copy = Kernel("clone", "other", torch.float32, 0, 10**9, 10**9)
    table = KernelTable.of([[copy], [copy] * 3, []], A100)
    constants = Constants(memory_share=0.5, kernel_s=1e-3)
    each_s = 2e9 / (0.5 * 2039e9) + 1e-3
    assert seconds(table, A100, constants) == pytest.approx([each_s, 3 * each_s, 0.0])
    assert table.launches.tolist() == [1.0, 3.0, 0.0]


def test_few_numbers_or_few_terms_halve_the_share_that_a_product_reaches() -> None:
    constants = Constants(half_outputs=1000.0, half_depth=50.0, kernel_s=0.0)
    sizes = [(10**12, 10**9), (1000, 10**9), (10**12, 50), (1000, 50), (250, 10**9)]
    flops = 10**15
    products = [Kernel("mm", "matmul", torch.bfloat16, flops, 1, 1, outputs, depth) for outputs, depth in sizes]
    found = seconds(KernelTable.of([[each] for each in products], A100), A100, constants)
    whole_s = flops / A100.flops_per_s("bf16") / constants.matmul_share
    assert found / whole_s == pytest.approx([1, 2, 2, 4, 5], rel=1e-6)
    # What takes longer hides the other; rows that are not aligned slow products of 16 bits alone.
    moving = Kernel("mm", "matmul", torch.bfloat16, flops, 10**13, 0, 10**12, 10**9)
    (moving_s,) = seconds(KernelTable.of([[moving]], A100), A100, constants)
    assert moving_s == pytest.approx(1e13 / A100.memory_bytes_per_s / constants.memory_share)
    for dtype, share in ((torch.bfloat16, ALIGNED_SHARE[2]), (torch.float16, ALIGNED_SHARE[2]), (torch.float32, 1)):
        pair = [[_product(65536, dtype)._replace(aligned_bytes=each)] for each in (2, 16)]
        slow, quick = seconds(KernelTable.of(pair, A100), A100, constants)
        assert slow / quick == pytest.approx(1 / share)
    assert default_constants(find("T4")).matmul_share < default_constants(find("H100")).matmul_share < 0.7
