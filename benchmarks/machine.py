"""Machine: what a benchmark records of where and when it ran."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

__all__ = ["Watch", "busy_s", "commit_of", "loop_s"]


class Watch:
    """Describes the machine, and how many of its cores other processes used since creation (Linux)."""

    def __init__(self) -> None:
        self._began_s, self._before_s = time.monotonic(), busy_s()

    def record(self, found: Mapping[str, object], path: Path | None) -> None:
        """Print what a benchmark found, as JSON behind where and when it ran, and write it to a file if one is named.

        All processes that the benchmark started must have ended.
        """
        text = json.dumps({**self._describe(), **found}, indent=1)
        sys.stdout.write(text + "\n")
        if path is not None:
            path.write_text(text + "\n")

    def _describe(self) -> dict[str, object]:
        import torch

        times = os.times()
        own_s = times.user + times.system + times.children_user + times.children_system
        others_s = busy_s() - self._before_s - own_s
        return {
            "date": datetime.date.today().isoformat(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cores_used_by_others": round(max(0.0, others_s / (time.monotonic() - self._began_s)), 2),
            "loop_s": loop_s(),
        }


def loop_s(part: int = 1) -> float:
    """Return the processor seconds of ten million additions in Python, the least of three times.

    Cores that are a share of a machine are faster on some days than on others: hold processor seconds against this.

    Args:
        part: does as many times fewer additions, where ten million take too long.
    """

    def looped_s() -> float:
        began, total = time.thread_time(), 0
        for each in range(10_000_000 // part):
            total += each
        return time.thread_time() - began

    return round(part * min(looped_s() for _ in range(3)), 3)


def busy_s() -> float:
    """Return the seconds that the machine's cores have been busy (Linux)."""
    user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return (user + nice + system + sum(rest[:2])) / os.sysconf("SC_CLK_TCK")


def commit_of(tree: Path) -> str:
    """Return a checkout's commit, and whether something in it is not committed."""
    told = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(told, cwd=tree, capture_output=True, text=True, check=True).stdout.strip()
