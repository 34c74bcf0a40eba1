"""Kernels: what a layer launches on a GPU, found by running it on fake tensors of the CPU, and what that takes.

In come a layer and its inputs' shapes; out come its kernels' operations and bytes. Four things differ between the
devices. Scaled dot-product attention is one kernel on a GPU, chosen by the rules of PyTorch's ``sdp_utils.cpp``;
dropout is one kernel that keeps a mask of bytes; CUDA's autocast computes softmax, norms, powers and losses in float32
(torch.amp, "CUDA Ops that can autocast to float32"), which the CPU's leaves as they are. An LSTM, which oneDNN runs as
one operator, is taken step by step, as other recurrences are.

Seconds are those of a roofline, from the GPU's peak rates and a handful of constants. A product of matrices, a
convolution or an attention takes the longer of its operations at a share of the peak rate and its bytes at a share of
the memory's bandwidth; every other kernel takes its bytes (Williams, Waterman and Patterson, "Roofline", 2009). A
product that makes few numbers, or adds up few terms in each, leaves part of the GPU idle: its share of the peak
saturates with both. Where products and attention were measured (:mod:`autopar.hardware.rates`), all of that is
corrected by what was measured of the nearest shapes. The host takes time to launch a kernel; what it takes and what the
kernels take are told apart, for launching is asynchronous.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, prod
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from autopar.capture.model.effects import OperatorMode, storage_of, values_by_name, written_values
from autopar.capture.model.operations import PRODUCTS, operations_of
from autopar.formats.profile import Precision
from autopar.hardware.gpus import Architecture, Gpu
from autopar.hardware.rates import MeasuredRates, attention_flops_per_s, near, products_in, rates_of
from autopar.profiler.device import AUTOCAST, Computing

KernelKind = Literal["matmul", "convolution", "attention", "gather", "other"]


ALIGNED_BYTES = 16
"""What rows must be multiples of for a GPU to load them as quickly as it can."""


class Kernel(NamedTuple):
    """One launch."""

    op: str
    kind: KernelKind
    dtype: torch.dtype
    """Of what it computes with: of a product's first factor."""
    flops: int
    read_bytes: int
    written_bytes: int
    outputs: int = 0
    """Of products: numbers that are computed, independent of each other."""
    depth: int = 0
    """Of products: terms that are added up in each of them."""
    aligned_bytes: int = ALIGNED_BYTES
    """Of products of matrices: the largest power of two, up to that, of which all their rows are multiples."""


GATHERS = {"embedding", "index", "index_select", "gather", "nll_loss_forward", "nll_loss2d_forward"}
"""Operators that read of their first argument, a table, the rows that they are asked for."""
NOT_READ = {"copy_", "zero_", "fill_", "bernoulli_", "normal_", "uniform_", "random_", "exponential_"}
"""In-place operators that overwrite without reading."""
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "set_", "resize_"}
"""Operators that allocate, and launch nothing."""


class KernelLog(OperatorMode):  # type: ignore[no-untyped-call]
    """Records every kernel launched while it is active; views and allocations are none.

    Operators are taken as one kernel each, as PyTorch's eager mode nearly runs them. Bytes are those of the distinct
    tensors an operator reads and writes: caches are assumed to serve repeated reads within it, and nothing between
    kernels. Operations of products are torch's own counts (``torch.utils.flop_counter``).

    >>> a = torch.ones(4, 8)
    >>> with KernelLog() as log:
    ...     b = a @ a.t()
    >>> [(k.op, k.kind, k.flops, k.read_bytes, k.written_bytes, k.outputs, k.depth) for k in log.kernels]
    [('mm', 'matmul', 256, 128, 64, 16, 8)]
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []

    def run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        given = list(_distinct(_tensors((args, kwargs))))
        result = super().run(operator, args, kwargs)
        name = operator._schema.name.rpartition("::")[2]
        if operator.is_view or name in FREE:
            return result
        storages = {storage_of(tensor) for tensor in given}
        made = [tensor for tensor in _distinct(_tensors(result)) if storage_of(tensor) not in storages]
        changed = list(_distinct(_tensors(written_values(operator, args, kwargs))))
        if not (made or changed):
            return result
        read = [each for each in given if name not in NOT_READ or not any(each is other for other in changed)]
        kind, read_bytes = kind_of(operator, name), sum(map(_bytes, read))
        if kind == "gather" and read:
            # Of a table only the rows are read that are asked for.
            read_bytes = sum(map(_bytes, read[1:])) + min(_bytes(read[0]), sum(map(_bytes, made)))
        outputs, depth = _product(name, args, made) if kind in ("matmul", "convolution") else (0, 0)
        flops = 2 * outputs * depth if name in PRODUCTS else _flops(operator, args, kwargs, result)
        aligned = _aligned_bytes((*read, *made)) if kind == "matmul" and name not in PRODUCTS else ALIGNED_BYTES
        dtype, written_bytes = (read or made or changed)[0].dtype, sum(map(_bytes, (*made, *changed)))
        self.kernels.append(Kernel(name, kind, dtype, flops, read_bytes, written_bytes, outputs, depth, aligned))
        return result


def kind_of(func: Any, name: str) -> KernelKind:  # noqa: ANN401
    if "convolution" in name:
        return "convolution"
    if "attention" in name:
        return "attention"
    if func.overloadpacket in flop_registry or name in PRODUCTS:
        return "matmul"
    return "gather" if name in GATHERS else "other"


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> int:  # noqa: ANN401
    flops = operations_of(func, args, kwargs, result)
    # Blocks above the diagonal of a causal mask are skipped; the counts include them.
    return flops // 2 if values_by_name(func, args, kwargs).get("is_causal") else flops


def _product(name: str, args: tuple[Any, ...], new_tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
    """(numbers computed, terms in each) of a product of matrices, or of a convolution seen as one."""
    if "convolution" in name:
        # Backwards take the gradient of the output first.
        backward = name == "convolution_backward"
        weight: torch.Tensor = args[2] if backward else args[1]
        return (args[0] if backward else new_tensors[0]).numel(), prod(weight.shape[1:])
    if name in PRODUCTS:
        return PRODUCTS[name](args)
    left: torch.Tensor = args[1 if name in ("addmm", "baddbmm") else 0]
    return new_tensors[0].numel(), left.shape[-1]


def _aligned_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return what the rows of matrices, as they lie in memory, are multiples of.

    >>> [_aligned_bytes([torch.empty(6, n, dtype=torch.bfloat16).t()]) for n in (8, 12, 50258, 50257)]
    [16, 8, 4, 2]
    """
    rows = (max(each.stride()[-2:]) * each.element_size() for each in tensors if each.dim() > 1)
    return gcd(ALIGNED_BYTES, *rows)


def _distinct(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Leave out a second view of the same numbers."""
    seen = set()
    for tensor in tensors:
        key = (storage_of(tensor), tensor.storage_offset(), tensor.numel())
        if key not in seen:
            seen.add(key)
            yield tensor


def _tensors(value: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _bytes(tensor: torch.Tensor) -> int:
    # An expanded tensor is read once.
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


AttentionKernel = Literal["flash", "efficient", "math"]
_FLASH_HEAD = 256
"""Largest head that flash attention takes."""

_ATTENTION = "scaled_dot_product_attention"
_DROPOUT = ("dropout", "dropout_")
_SOFTMAX = ("softmax", "log_softmax")
# aten/src/ATen/autocast_mode.h, AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE; cross_entropy is made of two of them.
_IN_FLOAT32_TEXT = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm "
    "native_layer_norm group_norm rms_norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss "
    "nll_loss2d nll_loss_nd hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss "
    "margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss "
    "binary_cross_entropy_with_logits cross_entropy cross_entropy_loss dist pdist cdist renorm logsumexp prod softmax "
    "log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm norm sum"
)
_IN_FLOAT32 = frozenset(_IN_FLOAT32_TEXT.split())


def as_on_cuda(gpu: Gpu, precision: Precision) -> Computing:
    """Return what forwards on the CPU's fake tensors run in, to launch and keep what they would on a GPU."""
    half = AUTOCAST.get(precision)

    @contextmanager
    def context() -> Iterator[None]:
        autocast = nullcontext() if half is None else torch.autocast("cpu", dtype=half)
        with autocast, _step_by_step(), CudaRules(gpu, precision):
            yield

    return context


@contextmanager
def _step_by_step() -> Iterator[None]:
    """Keep oneDNN from taking a whole LSTM for one operator, of which nothing is counted."""
    before = torch._C._get_mkldnn_enabled()
    # Not by torch.backends.mkldnn.flags, which sets other flags as well, and warns of them.
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def attention_kernel(
    gpu: Gpu, dtype: torch.dtype, head: int, value_head: int, mask: torch.Tensor | None
) -> AttentionKernel:
    """Return the kernel that scaled dot-product attention becomes.

    Flash attention wants half precision, no mask, heads of at most 256 numbers, and an architecture after Turing;
    the memory-efficient one wants rows of 16 bytes; all else is computed step by step, with all weights in memory.

    >>> from autopar.hardware.gpus import find
    >>> attention_kernel(find("A100"), torch.bfloat16, 128, 128, None)
    'flash'
    >>> attention_kernel(find("V100"), torch.float16, 64, 64, None)
    'efficient'
    >>> attention_kernel(find("A100"), torch.float64, 64, 64, None)
    'math'
    """
    half = dtype in (torch.float16, torch.bfloat16)
    newer = gpu.architecture not in ("pascal", "volta", "turing")
    if half and newer and mask is None and head == value_head <= _FLASH_HEAD:
        return "flash"
    aligned = all(size * dtype.itemsize % 16 == 0 for size in (head, value_head))
    return "efficient" if aligned and (half or dtype == torch.float32) else "math"


class CudaRules(TorchFunctionMode):
    """Replaces calls while it is active, of operators in a captured graph and of functions in modules alike."""

    def __init__(self, gpu: Gpu, precision: Precision) -> None:
        super().__init__()
        self._gpu = gpu
        self._half = AUTOCAST.get(precision)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = dict(kwargs or {})
        name = _name(func)
        if name == _ATTENTION:
            return self._attention(*args, **kwargs)
        if name in _DROPOUT and (dropped := _dropout(args, kwargs)) is not None:
            return dropped
        if self._half is not None and name in _IN_FLOAT32:
            return self._in_float32(func, name, args, kwargs)
        return func(*args, **kwargs)

    def _in_float32(
        self, func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> torch.Tensor:
        if name in _SOFTMAX and (fused := _softmax(name, args, kwargs)) is not None:
            return fused
        with torch.autocast("cpu", enabled=False):
            result: torch.Tensor = func(*map(_float32, args), **{key: _float32(value) for key, value in kwargs.items()})
        return result

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if self._half is not None:
            query, key, value = (t.to(self._half) if t.dtype == torch.float32 else t for t in (query, key, value))
            if attn_mask is not None and attn_mask.is_floating_point():
                attn_mask = attn_mask.to(self._half)
        kernel = attention_kernel(self._gpu, query.dtype, query.shape[-1], value.shape[-1], attn_mask)
        bare = (query, key, value)
        operators = torch.ops.aten
        out: torch.Tensor
        if query.dim() != 4 or kernel == "math":
            rest = (attn_mask, dropout_p, is_causal)
            out, _ = operators._scaled_dot_product_attention_math(*bare, *rest, scale=scale, enable_gqa=enable_gqa)
        elif kernel == "flash":
            out, *_ = operators._scaled_dot_product_flash_attention(*bare, dropout_p, is_causal, False, scale=scale)
        else:
            if enable_gqa:
                groups = query.shape[1] // key.shape[1]
                bare = (query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1))
            bias = _bias(attn_mask, query, key)
            out, *_ = operators._scaled_dot_product_efficient_attention(
                *bare, bias, True, dropout_p, is_causal, scale=scale
            )
        return out


def _name(func: Callable[..., Any]) -> str:
    if isinstance(func, torch._ops.OpOverload):
        return func._schema.name.removeprefix("aten::")
    return getattr(func, "__name__", "")


def _float32(value: Any) -> Any:  # noqa: ANN401
    halves = (torch.float16, torch.bfloat16)
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in halves else value


def _softmax(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """One kernel reads float16 and writes float32; there is none for bfloat16 (aten/native/SoftMax.cpp)."""
    given, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim")
    asked = args[2] if len(args) > 2 else kwargs.get("dtype")
    if given.dtype != torch.float16 or not isinstance(dim, int) or asked not in (None, False, torch.float32):
        return None
    operator = torch.ops.aten._log_softmax if name == "log_softmax" else torch.ops.aten._softmax
    result: torch.Tensor = operator(given, dim, True)
    return result


def _dropout(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Drop with the fused kernel; none where nothing is dropped."""
    values = {**dict(zip(("input", "p", "train"), args, strict=False)), **kwargs}
    train = values.get("train", values.get("training", True))
    if not train or not 0 < values.get("p", 0.5) < 1:
        return None
    result: torch.Tensor = torch.native_dropout(values["input"], values.get("p", 0.5), True)[0]
    return result


def _bias(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """The mask as numbers to add, seen by every head."""
    if mask is None:
        return None
    bias = (
        torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask
    )
    return bias.expand(*query.shape[:2], query.shape[2], key.shape[2])


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
    """Of the memory's bandwidth, that large kernels reach; as measured where it was."""
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
    """Return the constants to start from for a GPU: one share for all products, under its power cap.

    Data-centre GPUs reach three quarters of their peak in large products, those after Ampere less, for their units
    have grown faster than what feeds them; consumer GPUs are clocked above the rate that they sustain, and a T4 above
    the one that its 70 watts allow.
    """
    share: dict[Architecture, float] = {
        "pascal": 0.8,
        "volta": 0.7,
        "turing": 0.5,
        "ampere": 0.75,
        "ada": 0.7,
        "hopper": 0.65,
        "blackwell": 0.6,
        "cdna3": 0.5,
        "cdna4": 0.5,
    }
    rates, constants = rates_of(gpu), Constants(matmul_share=share[gpu.architecture])
    return constants if rates is None else replace(constants, memory_share=rates.memory_share)


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
    measured: Numbers
    """Times the rate that the GPU's default constants have, which was measured; 1 where nothing was."""
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
            measured=np.array([_measured(gpu, kernel) for kernel in kernels]),
            group=np.array([index for index, _ in every], dtype=np.int64),
            groups=len(groups),
        )

    @property
    def launches(self) -> Numbers:
        """Kernels per group."""
        return np.bincount(self.group, minlength=self.groups).astype(np.float64)


def seconds(table: KernelTable, gpu: Gpu, constants: Constants) -> Numbers:
    """Return the seconds of every group's kernels, one after the other on the device."""
    share = constants.matmul_share / _saturation(constants, table.outputs, table.depth)
    computing = table.flops / table.flops_per_s / share / table.aligned_share / table.measured
    moving = table.bytes / (gpu.memory_bytes_per_s * constants.memory_share)
    each = np.maximum(computing, moving) + constants.kernel_s
    return np.asarray(np.bincount(table.group, weights=each, minlength=table.groups), dtype=np.float64)


def _saturation(constants: Constants, outputs: Numbers, depth: Numbers) -> Numbers:
    return (1 + constants.half_outputs / outputs) * (1 + constants.half_depth / depth)


def _measured(gpu: Gpu, kernel: Kernel) -> float:
    rates, known = rates_of(gpu), kernel.dtype in _PRECISIONS and kernel.kind in ("matmul", "attention")
    if rates is None or not known or not kernel.flops:
        return 1.0
    if kernel.kind == "attention":
        share = default_constants(gpu).matmul_share * _peak(gpu, kernel)
        return attention_flops_per_s(rates, kernel.flops, backward="backward" in kernel.op) / share
    return _near(gpu, rates, _PRECISIONS[kernel.dtype], kernel.outputs, kernel.depth)


@lru_cache(maxsize=2**12)
def _near(gpu: Gpu, rates: MeasuredRates, precision: Precision, outputs: int, depth: int) -> float:
    products, constants = products_in(rates, precision), default_constants(gpu)
    if not products or not outputs:
        return 1.0
    shapes = np.array([(each.rows * each.columns, each.depth) for each in products], dtype=np.float64).T
    shares = constants.matmul_share / _saturation(constants, *shapes)
    measured = np.array([each.flops_per_s for each in products]) / gpu.flops_per_s(precision)
    return near(products, measured / shares, outputs, depth)


def _aligned_share(kernel: Kernel) -> float:
    return ALIGNED_SHARE[kernel.aligned_bytes] if kernel.dtype in (torch.float16, torch.bfloat16) else 1.0


def _peak(gpu: Gpu, kernel: Kernel) -> float:
    return gpu.flops_per_s(_PRECISIONS.get(kernel.dtype, "fp64")) if kernel.flops else 1.0


_PRECISIONS: dict[torch.dtype, Precision] = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
