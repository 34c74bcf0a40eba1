"""Kernels that a layer launches, against counting by hand."""

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.hardware.gpus import find
from autopar.profiler.kernels import KernelLog, as_on_cuda, attention_kernel

A100 = find("A100")


def test_views_launch_nothing_and_dropout_and_gathers_move_what_they_name() -> None:
    a, b = torch.ones(4, 6), torch.ones(6)
    with KernelLog() as log:
        torch.empty(100)
        c = a.view(2, 12).t()
        d = a + b.expand(4, 6)
        d.mul_(2)
        d.copy_(a)
        a[:2].sum()
    assert c.shape == (12, 2)
    found = [(k.op, k.read_bytes, k.written_bytes) for k in log.kernels]
    assert found == [("add", 96 + 24, 96), ("mul_", 96, 96), ("copy_", 96, 96), ("sum", 48, 4)]
    x = torch.ones(4, 8, requires_grad=True)
    with as_on_cuda(A100, "fp32")(), KernelLog() as log:
        dropped = F.dropout(x, 0.5, training=True)
        F.dropout(x, 0.5, training=False)
    assert [(k.op, k.written_bytes) for k in log.kernels] == [("native_dropout", 128 + 32)]
    assert dropped.grad_fn is not None
    rows, table = torch.tensor([1, 3, 3]), torch.ones(100, 4)
    with KernelLog() as log:
        F.embedding(rows, table)
    assert [(k.kind, k.read_bytes, k.written_bytes) for k in log.kernels] == [("gather", 3 * 8 + 3 * 16, 3 * 16)]


def test_products_convolutions_and_grouped_products_are_counted_with_their_outputs_and_depth() -> None:
    with FakeTensorMode(), KernelLog() as log:
        torch.empty(5, 4, 8) @ torch.empty(5, 8, 16)
        F.conv2d(torch.empty(2, 3, 10, 10), torch.empty(7, 3, 3, 3))
    product, convolution = log.kernels
    assert (product.kind, product.flops, product.outputs, product.depth) == ("matmul", 2 * 5 * 4 * 8 * 16, 5 * 64, 8)
    assert convolution.flops == 2 * 2 * 8 * 8 * 7 * 27
    assert (convolution.kind, convolution.outputs, convolution.depth) == ("convolution", 2 * 64 * 7, 27)
    with FakeTensorMode(), KernelLog() as log:
        rows, experts = torch.empty(32, 16, dtype=torch.bfloat16), torch.empty(4, 16, 64, dtype=torch.bfloat16)
        torch._grouped_mm(rows, experts, torch.empty(4, dtype=torch.int32))
    assert [(k.kind, k.flops, k.outputs, k.depth) for k in log.kernels] == [("matmul", 2 * 32 * 16 * 64, 32 * 64, 16)]


def test_attention_and_autocast_are_cudas_or_step_by_step() -> None:
    assert attention_kernel(A100, torch.float16, 320, 320, None) == "efficient"
    assert attention_kernel(A100, torch.float16, 63, 63, torch.ones(1)) == "math"
    q = torch.zeros(2, 2, 16, 63, dtype=torch.float64)
    with as_on_cuda(A100, "fp32")(), KernelLog() as log:
        F.scaled_dot_product_attention(q, q, q)
    assert any("softmax" in kernel.op for kernel in log.kernels)
    assert not any(kernel.kind == "attention" for kernel in log.kernels)
    with FakeTensorMode(), as_on_cuda(A100, "fp16")(), KernelLog() as log:
        x, weight = torch.empty(2, 8), torch.empty(8, 8)
        product = x @ weight
        assert product.dtype == torch.float16
        assert F.softmax(product, -1).dtype == torch.float32
        assert F.layer_norm(product, (8,)).dtype == torch.float32
        assert F.gelu(product).dtype == torch.float16
        assert F.cross_entropy(product, torch.empty(2, dtype=torch.long)).dtype == torch.float32
    assert [k.op for k in log.kernels][:4] == ["_to_copy", "_to_copy", "mm", "_softmax"]
    with FakeTensorMode(), as_on_cuda(A100, "fp32")():
        assert (torch.empty(2, 8) @ torch.empty(8, 8)).dtype == torch.float32
