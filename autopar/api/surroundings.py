"""Surroundings: what autopar finds on this machine, and what of it will not do."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path

from autopar.cache import Cache, cache_folder
from autopar.errors import FileError
from autopar.report.table import size

_DRIVER = Path("/proc/driver/nvidia/version")
_VERSION = re.compile(r"\d+")


@dataclass(frozen=True)
class Environment:
    """What autopar finds on this machine."""

    entries: Mapping[str, str]
    """By what it is: a version, a number, a place."""
    problems: tuple[str, ...]
    """What is wrong, each with its remedy."""


def environment() -> Environment:
    """Return what autopar finds on this machine: torch, GPUs, processors, memory, caches; and what is wrong.

    >>> found = autopar.environment()
    >>> "torch" in found.entries
    True
    """
    entries = {"autopar": _version("autopar"), "Python": f"{platform.python_version()} on {platform.platform()}"}
    problems = list(_missing())
    if not any(problem.startswith("torch") for problem in problems):
        entries |= _devices(problems)
    entries["Transformers"] = _version("transformers")
    entries["captured models"] = _cache_text(problems)
    return Environment(entries, tuple(problems))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _missing() -> Iterator[str]:
    """Yield which of autopar's requirements are not there, or older."""
    from packaging.requirements import Requirement

    try:
        needed = [Requirement(each) for each in metadata("autopar").get_all("Requires-Dist") or ()]
    except PackageNotFoundError:
        return
    for each in needed:
        if each.marker is None or each.marker.evaluate({"extra": ""}):
            found = _version(each.name)
            if found == "not installed" or not each.specifier.contains(found, prereleases=True):
                yield f"{each.name} is {found}, and autopar needs {each.specifier}; pip install '{each}'"


def _devices(problems: list[str]) -> dict[str, str]:
    import torch

    from autopar.profiler.device import choose, count, memory_bytes

    cpu, built = torch.device("cpu"), torch.version.cuda or torch.version.hip
    found = {"torch": f"{torch.__version__}, {f'built for {built}' if built else 'built for CPUs'}"}
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    found["GPUs"] = ", ".join(f"{each.name} ({size(each.total_memory)})" for each in gpus) or "none"
    found["processors"] = f"{count(choose('cpu'))} that this process may use"
    found["memory"] = size(memory_bytes(cpu))
    distributed = torch.distributed
    backends = {name: getattr(distributed, f"is_{name}_available")() for name in ("gloo", "nccl")}
    found["backends"] = ", ".join(name for name, there in backends.items() if there)
    if not backends["gloo"]:
        problems.append("this torch has no gloo, which ranks meet by; install a build from https://pytorch.org")
    if _DRIVER.exists() and not gpus:
        why = "finds none of them (CUDA_VISIBLE_DEVICES?)" if built else "is built for CPUs"
        problems.append(f"this machine has NVIDIA GPUs, and torch {why}; install a build from https://pytorch.org")
    return found


def _cache_text(problems: list[str]) -> str:
    try:
        kept = Cache(cache_folder()).entries()
    except (FileError, RuntimeError) as error:
        problems.append(f"captured models cannot be kept: {error}; name another folder in AUTOPAR_CACHE")
        return "none"
    return f"{len(kept)} of {size(sum(each.bytes for each in kept))} in {cache_folder()}"
