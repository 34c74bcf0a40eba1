"""Roofline: seconds of kernels on a GPU that is not there, from its peak rates and a handful of constants.

A product of matrices, a convolution or an attention takes the longer of its operations at a share of the peak rate
and its bytes at a share of the memory's bandwidth; every other kernel takes its bytes (Williams, Waterman and
Patterson, "Roofline", 2009). A product that makes few numbers, or adds up few terms in each, leaves part of the GPU
idle: its share of the peak saturates with both. The host takes time to launch a kernel; what it takes and what the
kernels take are told apart, for launching is asynchronous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from autopar.formats.profile import Precision
from autopar.hardware.gpus import Architecture, Gpu
from autopar.profiler.kernels import Kernel

Numbers = npt.NDArray[np.float64]


ALIGNED_SHARE = {16: 1.0, 8: 0.37, 4: 0.37, 2: 0.17}
"""Of the rate of 16-bit products whose rows are multiples of 16 bytes, what others reach: medians of 19 products on an
H100 (`docs/design/estimates.md`). A vocabulary of 50,257 has rows of an odd number of elements."""


@dataclass(frozen=True)
class Constants:
    """What a data sheet does not say.

    The defaults are starting points; `docs/design/estimates.md` says where each is from, and ``--calibrate-with`` fits
    them to measured runs.
    """

    matmul_share: float = 0.75
    """Of the peak rate, that large products of matrices, convolutions and attention reach."""
    half_outputs: float = 4e5
    """Numbers a product makes at which it reaches half of that share: a few per arithmetic unit."""
    half_depth: float = 48.0
    """Terms in each of these numbers at which it reaches half of that share."""
    memory_share: float = 0.8
    """Of the memory's bandwidth, that large kernels reach."""
    kernel_s: float = 2e-6
    """Time a kernel takes however little it does: filling and draining the GPU."""
    forward_launch_s: float = 12e-6
    """Time the host takes to launch one kernel of a forward, in Python. On an H100's host, 8.7 us were measured of an
    element-wise kernel, and 25 us of a linear layer called as a module (torch 2.11, 28 November 2026)."""
    backward_launch_s: float = 8e-6
    """The same in a backward, which autograd's own thread runs."""
    update_share: float = 0.6
    """Of the memory's bandwidth, that the optimizer's kernels reach; above 1 where a fused one moves fewer bytes than
    the optimizer does that was recorded."""
    step_s: float = 5e-3
    """Time of a step that belongs to no layer: loading, zeroing, the first launches."""


def default_constants(gpu: Gpu) -> Constants:
    """Return the constants to start from for a GPU.

    Data-centre GPUs reach three quarters of their peak in large products, those after Ampere less, for their units
    have grown faster than what feeds them; consumer GPUs are clocked above the rate that they sustain, and a T4 above
    the one that its 70 watts allow.
    """
    share: dict[Architecture, float] = {
        "volta": 0.7,
        "turing": 0.5,
        "ampere": 0.75,
        "ada": 0.7,
        "hopper": 0.65,
        "blackwell": 0.6,
        "cdna3": 0.5,
    }
    return Constants(matmul_share=share[gpu.architecture])


@dataclass(frozen=True)
class KernelTable:
    """Kernels as columns, with the group (a layer's pass) that each belongs to."""

    flops: Numbers
    flops_per_s: Numbers
    """Of the GPU at its peak, in the kernel's type."""
    bytes: Numbers
    outputs: Numbers
    """Infinite where saturation does not apply."""
    depth: Numbers
    aligned_share: Numbers
    """Of what matrices reach whose rows begin where the GPU loads quickest."""
    group: npt.NDArray[np.int64]
    groups: int

    @classmethod
    def of(cls, groups: Sequence[Sequence[Kernel]], gpu: Gpu) -> KernelTable:
        """Return the kernels of all groups."""
        every = [(index, kernel) for index, kernels in enumerate(groups) for kernel in kernels]
        kernels = [kernel for _, kernel in every]
        return cls(
            flops=np.array([float(kernel.flops) for kernel in kernels]),
            flops_per_s=np.array([_peak(gpu, kernel) for kernel in kernels]),
            bytes=np.array([float(kernel.read_bytes + kernel.written_bytes) for kernel in kernels]),
            outputs=np.array([float(kernel.outputs) or np.inf for kernel in kernels]),
            depth=np.array([float(kernel.depth) or np.inf for kernel in kernels]),
            aligned_share=np.array([_aligned_share(kernel) for kernel in kernels]),
            group=np.array([index for index, _ in every], dtype=np.int64),
            groups=len(groups),
        )

    @property
    def launches(self) -> Numbers:
        """Kernels per group."""
        return np.bincount(self.group, minlength=self.groups).astype(np.float64)


def seconds(table: KernelTable, gpu: Gpu, constants: Constants) -> Numbers:
    """Return the seconds of every group's kernels, one after the other on the device."""
    saturation = (1 + constants.half_outputs / table.outputs) * (1 + constants.half_depth / table.depth)
    computing = table.flops / table.flops_per_s / constants.matmul_share / table.aligned_share * saturation
    moving = table.bytes / (gpu.memory_bytes_per_s * constants.memory_share)
    each = np.maximum(computing, moving) + constants.kernel_s
    return np.asarray(np.bincount(table.group, weights=each, minlength=table.groups), dtype=np.float64)


def _aligned_share(kernel: Kernel) -> float:
    return ALIGNED_SHARE[kernel.aligned_bytes] if kernel.dtype in (torch.float16, torch.bfloat16) else 1.0


def _peak(gpu: Gpu, kernel: Kernel) -> float:
    precisions: dict[torch.dtype, Precision] = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
    if not kernel.flops:
        return 1.0
    return gpu.flops_per_s(precisions.get(kernel.dtype, "fp64"))
