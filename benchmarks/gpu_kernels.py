"""The part of `benchmarks/gpu.py` that measures on a GPU the constants of estimates (`profiler/kernels.py`)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autopar.hardware.gpus import find, is_known
from autopar.profiler.device import CallClock, Time, time_calls

__all__ = ["constants"]

PRODUCTS = (
    *((8192, 8192, 8192), (16384, 768, 3072), (16384, 3072, 768), (16384, 768, 50304), (16384, 768, 50257)),
    *((512, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048), (8192, 64, 8192), (8192, 256, 8192)),
)
"""Rows, terms, columns: large ones, one that is not aligned, few outputs, few terms."""
COPIED = (2**20, 2**24, 2**28)
"""Numbers that an element-wise kernel reads and writes."""
SMALL, LAUNCHES = 8, 200
REPEATS = 5


def constants(device: torch.device, *, tiny: bool) -> dict[str, Any]:
    """Return rates of products and copies, seconds of small kernels, of launches and of an optimizer's step."""
    part = 16 if tiny else 1
    products = [_product(device, *(max(1, each // part) for each in shape)) for shape in PRODUCTS]
    copies = [_copy(device, size // part**2) for size in COPIED]
    found = {
        "products": products,
        "copies": copies,
        **_launches(device, LAUNCHES // part),
        "update_bytes_per_s": _update(device, 10**8 // part**3),
    }
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    if is_known(name):
        gpu = find(name)
        found["matmul_share"] = max(each["flops_per_s"] for each in products) / gpu.flops_per_s("bf16")
        found["memory_share"] = copies[-1]["bytes_per_s"] / gpu.memory_bytes_per_s
        found["update_share"] = found["update_bytes_per_s"] / gpu.memory_bytes_per_s
    return {"gpu": name, **found}


def _times(device: torch.device, works: Sequence[Callable[[], object]]) -> list[Time]:
    """Return the medians of calls, of which each is made several times."""

    def run(clock: CallClock) -> None:
        for work in works:
            for _ in range(REPEATS + 1):
                clock.time(work)

    every, found = time_calls(device, run), []
    for first in range(0, len(every), REPEATS + 1):
        # The first call may load what it runs.
        own = every[first + 1 : first + 1 + REPEATS]
        launches = [each.launch_s for each in own if each.launch_s is not None]
        seconds = statistics.median(each.seconds for each in own)
        found.append(Time(seconds, statistics.median(launches) if launches else None))
    return found


def _product(device: torch.device, rows: int, terms: int, columns: int) -> dict[str, float]:
    one, other = torch.ones(rows, terms, device=device), torch.ones(terms, columns, device=device)
    one, other = one.bfloat16(), other.bfloat16()
    (each,) = _times(device, [lambda: one @ other])
    flops = 2 * rows * terms * columns
    shape = {"rows": rows, "terms": terms, "columns": columns}
    return {**shape, "seconds": each.seconds, "flops_per_s": flops / each.seconds}


def _copy(device: torch.device, numbers: int) -> dict[str, float]:
    held = torch.ones(numbers, device=device)
    (each,) = _times(device, [lambda: held.add_(1)])
    size = 2 * held.nbytes
    return {"bytes": size, "seconds": each.seconds, "bytes_per_s": size / each.seconds}


def _launches(device: torch.device, count: int) -> dict[str, float | None]:
    """Return the device's seconds of a small kernel, and the host's of launching one forward and backward."""
    held, start = torch.ones(SMALL, device=device), torch.ones(SMALL, device=device)
    weights = torch.ones(SMALL, SMALL, device=device, requires_grad=True)

    def forward() -> torch.Tensor:
        value = start
        for _ in range(count):
            value = weights @ value
        return value.sum()

    losses = [forward() for _ in range(REPEATS + 1)]
    again = [forward() for _ in range(REPEATS + 1)]
    # Of a GPU, calls are made twice; what a backward has run over is gone.
    backwards = iter([*losses, *again])

    def add() -> None:
        for _ in range(count):
            held.add_(0)

    small, there, back = _times(device, [add, forward, lambda: next(backwards).backward()])
    return {
        "kernel_s": small.seconds / count,
        "elementwise_launch_s": _over(small.launch_s, count),
        "forward_launch_s": _over(there.launch_s, count),
        # A product's backward has two products and a sum.
        "backward_launch_s": _over(back.launch_s, 3 * count),
    }


def _over(seconds: float | None, count: int) -> float | None:
    return None if seconds is None else seconds / count


def _update(device: torch.device, numbers: int) -> float:
    """Return the bytes per second of AdamW's step: of weights, gradients and two moments, three of them written."""
    parameter = torch.nn.Parameter(torch.ones(max(1, numbers), device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter])
    (each,) = _times(device, [optimizer.step])
    return 7 * parameter.nbytes / each.seconds
