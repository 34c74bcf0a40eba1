"""What a profile records of the device that it was measured on, and of the circumstances."""

import os
import subprocess
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from autopar.errors import UsageError
from autopar.profiler import device
from autopar.profiler.device import Conditions, Time, computing, describe, observe, parse, pin_threads, time_calls
from autopar.profiler.estimate import CONTEXT_BYTES, RESERVED_BYTES, WORKSPACE_BYTES
from autopar.profiler.layer_runs import compiling

CPU = torch.device("cpu")
GIB = 2**30


def test_reasons_of_either_moment_are_told_and_what_a_driver_does_not_tell_stays_empty() -> None:
    assert parse("[N/A], [N/A], Not Active, [N/A], Not Active, Not Active") == Conditions()
    found = parse("1410, Not Active, Not Active, Active, Not Active, Active")
    assert found.throttle_reasons == ("temperature (software)", "power brake")
    before, after = Conditions(1e9, ("power limit",), 3), Conditions(1e9, ("power brake",), 4)
    assert after.throttled_since(before) == "power limit, power brake, temperature"
    assert Conditions().throttled_since(Conditions()) is None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity masks")
@pytest.mark.reliability(58)
def test_threads_are_pinned_in_the_block_and_freed_after_it() -> None:
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    with pin_threads(1):
        assert len(os.sched_getaffinity(0)) == 1
        assert torch.get_num_threads() == 1
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == (cores, threads)


def test_autocast_is_by_the_precision_and_one_that_it_does_not_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.ones(2, 2)
    for precision, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        with computing(precision, CPU)():  # type: ignore[arg-type]
            assert torch.mm(made, made).dtype == dtype
    monkeypatch.setitem(computing.__globals__["AUTOCAST"], "fp16", torch.float64)
    with pytest.raises(UsageError, match="`precision='fp16'`: autocast on cpu does not compute in float64"):
        computing("fp16", CPU)


def test_on_a_gpu_launches_are_timed_with_nothing_queued_and_kernels_behind_a_delay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The calls are made twice; no kernel of the second time is launched later than the device comes to it."""
    did: list[str] = []
    event = SimpleNamespace(record=lambda: did.append("record"), elapsed_time=lambda last: 4000.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: did.append("wait"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: did.append(f"delay {cycles / device._CYCLES_PER_S:.6f}"))
    monkeypatch.setattr(device.time, "perf_counter", iter((0.0, 2.0, 10.0, 13.0)).__next__)

    def run(clock: device.CallClock) -> None:
        for name in ("forward", "backward"):
            clock.time(lambda: did.append(name))  # noqa: B023

    assert time_calls(torch.device("cuda"), run) == [Time(4.0, 2.0), Time(4.0, 3.0)]
    launches = ["wait", "forward", "wait", "backward"]
    kernels = ["delay 3.000050", "record", "forward", "record", "delay 4.500050", "record", "backward", "record"]
    assert did == [*launches, *kernels, "wait"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch finds none")
def test_many_small_kernels_are_launched_longer_than_they_compute_and_one_large_one_is_not() -> None:
    small, large = torch.ones(8, device="cuda"), torch.ones(8192, 8192, device="cuda")

    def add() -> None:
        for _ in range(200):
            small.add_(1)

    def multiply() -> None:
        large.mm(large)

    def run(clock: device.CallClock) -> None:
        clock.time(add)
        clock.time(multiply)

    time_calls(torch.device("cuda"), run)
    many, one = time_calls(torch.device("cuda"), run)
    assert many.launch_s is not None
    assert one.launch_s is not None
    # A kernel of a GPU takes some 2 us at least, and its launch from Python some 5 us.
    assert 200 * 1e-6 < many.seconds < many.launch_s
    assert one.launch_s < one.seconds


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Mock(side_effect=RuntimeError("\n  no g++\n more"))
    monkeypatch.setattr(torch, "compile", lambda *_, **__: missing)
    said = r"`compile`: torch.compile does not work here \(no g\+\+\); install"
    with pytest.raises(UsageError, match=said), compiling(CPU):
        pass


def test_without_the_drivers_tool_a_gpus_conditions_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", Mock(side_effect=FileNotFoundError("nvidia-smi")))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="0"))
    assert observe(torch.device("cuda", 0)) == Conditions()
    found = observe(CPU)
    assert found.clock_hz is None or 1e8 < found.clock_hz < 1e10


def test_a_gpu_that_is_there_reserves_what_an_estimated_one_with_that_context(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = 3 * GIB
    properties = SimpleNamespace(name="GPU", total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * GIB - tensors - CONTEXT_BYTES, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: tensors)
    monkeypatch.setattr("autopar.profiler.device._workspace_bytes", lambda device: WORKSPACE_BYTES)
    assert describe(torch.device("cuda", 0), 1).reserved_bytes == RESERVED_BYTES
    assert describe(CPU, 1).reserved_bytes == 0
    assert describe(CPU, 1).memory_bytes == device.memory_bytes(CPU) // device.count(CPU)


def test_the_cores_that_idle_most_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([{0: 100, 1: 10, 2: 50}, {0: 101, 1: 15, 2: 53}])
    monkeypatch.setattr(device, "_idle_ticks", ticks.__next__)
    assert device._idlest({0, 1, 2}, 2) == [1, 2]
