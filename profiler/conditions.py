"""Conditions: what the device's clock did while it was measured, where the machine tells."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

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
    slowed: tuple[str, ...] = ()
    """Reasons at this moment (GPU)."""
    throttle_count: int = 0
    """How often heat has slowed the cores since the machine started (CPU)."""

    def throttled_since(self, before: Conditions) -> str | None:
        """Return why the clock was slowed at either moment or in between; none if nothing is known of it."""
        reasons = dict.fromkeys((*before.slowed, *self.slowed))
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
    Conditions(clock_hz=1980000000.0, slowed=('power limit', 'temperature (hardware)'), throttle_count=0)
    """
    clock, *active = (part.strip() for part in line.strip().split(","))
    slowed = tuple(name for name, state in zip(_REASONS.values(), active, strict=False) if state == "Active")
    return Conditions(float(clock) * 1e6 if clock.replace(".", "").isdigit() else None, slowed)


def _cpu() -> Conditions:
    clocks = [int(text) * 1e3 for text in _texts("cpufreq/scaling_cur_freq")]
    if not clocks:
        clocks = _listed_clocks()
    counts = [int(text) for text in _texts("thermal_throttle/core_throttle_count")]
    return Conditions(max(clocks, default=None), throttle_count=sum(counts))


def _texts(name: str) -> list[str]:
    found = []
    for path in _CORES.glob(f"cpu[0-9]*/{name}"):
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            found.append(text)
    return found


def _listed_clocks() -> list[float]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [float(line.partition(":")[2]) * 1e6 for line in lines if line.startswith("cpu MHz")]
