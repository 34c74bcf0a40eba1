"""The device that is measured on: its clock, its threads, its memory, the types it computes in, and its condition.

Times are those of the host, or between events of the device. A rank's threads are each kept on cores of its own. Most
bytes are those alive at once while something runs. Where the machine tells, it is noted what its clock did meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from autopar.capture.model.effects import StorageTracker
from autopar.errors import UsageError
from autopar.formats.profile import DeviceKind, Precision
from autopar.ranks.device import found_device

COMMUNICATOR_BYTES = 600_000_000
"""Of one NCCL communicator (544 to 688 MB: nccl#964)."""
COMMUNICATORS = 2
"""Of a rank: one with all ranks, one with its stage's replicas."""
COMMUNICATORS_BYTES = COMMUNICATORS * COMMUNICATOR_BYTES


def choose(name: str) -> torch.device:
    """Return the device for ``auto``, ``cpu`` or ``cuda``.

    Raises:
        UsageError: another name, or ``cuda`` where there is none.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise UsageError(f"`device` must be auto, cpu or cuda, found {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "`device='cuda'`: this machine, or this build of torch, has no CUDA device; use `device='cpu'`"
        )
    return torch.device("cuda", 0) if name != "cpu" and torch.cuda.is_available() else torch.device("cpu")


def count(device: torch.device) -> int:
    """Return how many such devices this machine has: GPUs, or cores that this process may use."""
    if device.type == "cuda":
        return torch.cuda.device_count()
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe(device: torch.device, threads: int) -> DeviceKind:
    """Return what the profile records; a CPU rank's memory is its equal share of the machine's.

    Of a GPU's memory the context that is there is reserved, the workspaces of matrix products, and what a rank's
    communicators take, which are not there.
    """
    found = found_device(device)
    if device.type == "cuda":
        return DeviceKind(
            type="cuda",
            name=found.name,
            memory_bytes=found.memory_bytes,
            threads=threads,
            reserved_bytes=_context_bytes(device) + _workspace_bytes(device) + COMMUNICATORS_BYTES,
        )
    return DeviceKind(type="cpu", name=found.name, memory_bytes=found.memory_bytes // count(device), threads=threads)


def _context_bytes(device: torch.device) -> int:
    """Return what is gone from a GPU's memory besides torch's tensors: this process's context, if no other runs."""
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(total - free) - int(torch.cuda.memory_reserved(device)))


def _workspace_bytes(device: torch.device) -> int:
    """Return what matrix products keep of a GPU: a cuBLAS workspace for every thread that computes, here two.

    Torch's allocator has them among its tensors, and frees none before the process ends.
    """
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated(device)
    factor = torch.ones(64, 64, device=device, requires_grad=True)
    # With a bias, torch asks cuBLASLt, which has one of its own.
    (factor @ factor + nn.functional.linear(factor, factor, factor[0])).sum().backward()  # type: ignore[no-untyped-call]
    del factor
    return max(0, int(torch.cuda.memory_allocated(device)) - before)


def _lines(path: str | Path) -> list[str]:
    """Return the lines of a file of the system's; none where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def memory_bytes(device: torch.device) -> int:
    """Return the memory of a GPU, or of this machine."""
    return found_device(device).memory_bytes


class Time(NamedTuple):
    """What one call took."""

    seconds: float
    """On a GPU, of its kernels, which waited for no launch."""
    launch_s: float | None = None
    """Seconds in which the host handed the call's work to the device; none where the host computes itself."""


class CallClock:
    """Wall-clock times of calls.

    >>> clock = CallClock()
    >>> clock.time(lambda: None)
    >>> len(clock.times())
    1
    """

    def __init__(self) -> None:
        self._host_s: list[float] = []

    def time(self, work: Callable[[], object]) -> None:
        """Call ``work`` and note how long it takes."""
        started = time.perf_counter()
        work()
        self._host_s.append(time.perf_counter() - started)

    def times(self) -> list[Time]:
        """Return the times of all calls, in order."""
        return [Time(seconds) for seconds in self._host_s]


_CYCLES_PER_S = 3e9
"""More than a GPU's clock has, so that a delay is no shorter than it is to be."""
_LEAST_DELAY_S = 50e-6


class _EventClock(CallClock):
    """Seconds of the host alone, or, once these are known, of the device alone, between two events.

    When a call begins whose launches are timed, the device has nothing to do, so that no launch waits for room. Before
    one whose kernels are timed it is kept busy for as long as launching the call took, and half as long again: when it
    comes to the call's kernels, all of them wait for it. A queue has room for about a thousand; the host is ahead of
    longer ones, too, if it is as quick as the device.
    """

    def __init__(self, device: torch.device, launches: Sequence[Time] = ()) -> None:
        super().__init__()
        self._device, self._launches = device, launches
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def time(self, work: Callable[[], object]) -> None:
        if not self._launches:
            torch.cuda.synchronize(self._device)
            super().time(work)
            return
        delay_s = _LEAST_DELAY_S + 1.5 * self._launches[len(self._events)].seconds
        torch.cuda._sleep(int(delay_s * _CYCLES_PER_S))  # type: ignore[no-untyped-call]
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        work()
        last.record()
        self._events.append((first, last))

    def times(self) -> list[Time]:
        if not self._launches:
            return super().times()
        torch.cuda.synchronize(self._device)
        kernels_s = (first.elapsed_time(last) / 1e3 for first, last in self._events)
        return [Time(each_s, launch.seconds) for each_s, launch in zip(kernels_s, self._launches, strict=True)]


def time_calls(device: torch.device, run: Callable[[CallClock], None]) -> list[Time]:
    """Return the times of the calls that ``run`` hands to a clock, in order.

    Where the device is a GPU, ``run`` is called twice, and makes the same calls: the first time their launches are
    timed, the second time their kernels.
    """
    clock = _EventClock(device) if device.type == "cuda" else CallClock()
    run(clock)
    if device.type == "cuda":
        clock = _EventClock(device, clock.times())
        run(clock)
    return clock.times()


SAMPLE_S = 0.05


@contextmanager
def pin_threads(count: int) -> Iterator[None]:
    """Compute with ``count`` threads in the block, on the least busy ``count`` cores that this process may use.

    Threads that exist already (of a progress bar, say) stay where they are. Where the system keeps no such masks, or
    refuses, only the number of threads is set.
    """
    before = torch.get_num_threads()
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    torch.set_num_threads(count)
    try:
        if len(cores) > count:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, _idlest(cores, count))
        yield
    finally:
        if cores:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, cores)
        torch.set_num_threads(before)


def _idlest(cores: set[int], count: int) -> list[int]:
    first = _idle_ticks()
    time.sleep(SAMPLE_S)
    last = _idle_ticks()
    return sorted(cores, key=lambda core: (first.get(core, 0) - last.get(core, 0), -core))[:count]


def _idle_ticks() -> dict[int, int]:
    """Return how long every core has idled, in the system's ticks."""
    rows = (line.split() for line in _lines("/proc/stat") if line.startswith("cpu") and line[3].isdigit())
    return {int(row[0][3:]): int(row[4]) for row in rows}


Computing = Callable[[], AbstractContextManager[object]]
"""Makes the context that one forward runs in; a backward runs outside of it, in the types of its forward."""

as_it_is: Computing = contextlib.nullcontext
"""Compute in the types that the tensors have."""

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The types that autocast computes in, by precision."""


def computing(precision: Precision, device: torch.device) -> Computing:
    """Return what forwards run in: autocast for ``bf16`` and ``fp16``, else nothing.

    Raises:
        UsageError: autocast of this device does not take the type.
    """
    if precision not in AUTOCAST:
        return as_it_is
    kind = AUTOCAST[precision]
    if not _takes(device, kind):
        name = str(kind).removeprefix("torch.")
        raise UsageError(f"`precision={precision!r}`: autocast on {device.type} does not compute in {name} here")
    return lambda: torch.autocast(device.type, kind)


def _takes(device: torch.device, kind: torch.dtype) -> bool:
    square = torch.ones(2, 2, device=device)
    with contextlib.suppress(RuntimeError), warnings.catch_warnings():
        # What autocast does not take, it leaves as it is, with a warning.
        warnings.simplefilter("ignore")
        with torch.autocast(device.type, kind):
            return torch.mm(square, square).dtype == kind
    return False


def peak_bytes(work: Callable[[], None], device: torch.device) -> int:
    """Return the most bytes that ``work`` had allocated at once, beyond what there was before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return max(0, int(torch.cuda.max_memory_allocated(device)) - before)
    with StorageTracker() as tracker:
        work()
    return int(tracker.peak_bytes)


# The driver's names for what slows a clock; idling and what a user set are no such reasons.
_REASONS = {
    "sw_power_cap": "power limit",
    "hw_slowdown": "hardware slowdown",
    "sw_thermal_slowdown": "temperature (software)",
    "hw_thermal_slowdown": "temperature (hardware)",
    "hw_power_brake_slowdown": "power brake",
}
_CORES = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Conditions:
    """The clock at one moment, and what has slowed it."""

    clock_hz: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    """Reasons at this moment (GPU)."""
    throttle_count: int = 0
    """How often heat has slowed the cores since the machine started (CPU)."""

    def throttled_since(self, before: Conditions) -> str | None:
        """Return why the clock was slowed at either moment or in between; none if nothing is known of it."""
        reasons = dict.fromkeys((*before.throttle_reasons, *self.throttle_reasons))
        if self.throttle_count > before.throttle_count:
            reasons["temperature"] = None
        return ", ".join(reasons) or None


def observe(device: torch.device) -> Conditions:
    """Return the conditions now; empty where neither system nor driver tells."""
    return _gpu(device) if device.type == "cuda" else _cpu()


def _gpu(device: torch.device) -> Conditions:
    identity = torch.cuda.get_device_properties(device).uuid
    # Drivers before 535 call the reasons by their older name.
    for prefix in ("clocks_event_reasons", "clocks_throttle_reasons"):
        fields = ("clocks.sm", *(f"{prefix}.{reason}" for reason in _REASONS))
        query = f"--query-gpu={','.join(fields)}"
        command = ["nvidia-smi", f"--id=GPU-{identity}", query, "--format=csv,noheader,nounits"]
        try:
            return parse(subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout)
        except (OSError, subprocess.SubprocessError):
            continue
    return Conditions()


def parse(line: str) -> Conditions:
    """Read the driver's answer: the clock in MHz, then whether each reason is active.

    >>> parse("1980, Active, Not Active, Not Active, Active, Not Active")
    Conditions(clock_hz=1980000000.0, throttle_reasons=('power limit', 'temperature (hardware)'), throttle_count=0)
    """
    clock, *active = (part.strip() for part in line.strip().split(","))
    slowed = tuple(name for name, state in zip(_REASONS.values(), active, strict=False) if state == "Active")
    return Conditions(float(clock) * 1e6 if clock.replace(".", "").isdigit() else None, slowed)


def _cpu() -> Conditions:
    clocks = [count * 1e3 for count in _counts("cpufreq/scaling_cur_freq")]
    if not clocks:
        lines = _lines("/proc/cpuinfo")
        clocks = [float(line.partition(":")[2]) * 1e6 for line in lines if line.startswith("cpu MHz")]
    slowed = _counts("thermal_throttle/core_throttle_count")
    return Conditions(max(clocks, default=None), throttle_count=sum(slowed))


def _counts(name: str) -> list[int]:
    """Return a whole number of every core that has a file of this name with one."""
    texts = ("".join(_lines(path)).strip() for path in _CORES.glob(f"cpu[0-9]*/{name}"))
    return [int(text) for text in texts if text.isdigit()]
