"""What a profile records of the device that it was measured on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from autopar.profiler.device import describe
from autopar.profiler.estimate import CONTEXT_BYTES, RESERVED_BYTES, WORKSPACE_BYTES

GIB = 2**30


def test_a_gpu_that_is_there_reserves_what_an_estimated_one_with_that_context_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = 3 * GIB
    properties = SimpleNamespace(name="GPU", total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * GIB - tensors - CONTEXT_BYTES, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: tensors)
    monkeypatch.setattr("autopar.profiler.device._workspace_bytes", lambda device: WORKSPACE_BYTES)
    assert describe(torch.device("cuda", 0), 1).reserved_bytes == RESERVED_BYTES


def test_a_cpu_reserves_nothing() -> None:
    assert describe(torch.device("cpu"), 1).reserved_bytes == 0
