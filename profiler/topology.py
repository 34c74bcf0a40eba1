"""Topology: which ranks share a host, and what ``nvidia-smi topo -m`` says connects its GPUs."""

from __future__ import annotations

import itertools
import re
import subprocess
from collections import Counter
from collections.abc import Sequence

_MEANINGS = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the host's PCIe bridge",
    "NODE": "PCIe bridges of one NUMA node",
    "SYS": "the link between NUMA nodes",
}
_CELL = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS")


def node_of_each(places: Sequence[tuple[str, int]]) -> list[int]:
    """Return every rank's node, from its host's name and its index among the ranks that one launcher started there.

    Ranks of a host are of one node, unless several launchers run on it: those count as nodes of their own.

    >>> node_of_each([("a", 0), ("a", 1), ("b", 0), ("b", 1)])
    [0, 0, 1, 1]
    >>> node_of_each([("a", 0), ("a", 1), ("a", 0), ("a", 1)])
    [0, 0, 1, 1]
    """
    seen: Counter[tuple[str, int]] = Counter()
    nodes: dict[tuple[str, int], int] = {}
    found = []
    for host, index in places:
        seen[host, index] += 1
        found.append(nodes.setdefault((host, seen[host, index]), len(nodes)))
    return found


def connections() -> str | None:
    """Return what ``nvidia-smi topo -m`` prints; None where there is no such command, or no GPU."""
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def parse_topology(text: str) -> dict[tuple[str, str], str]:
    """Return the kind of connection of every pair in the matrix that ``nvidia-smi topo -m`` prints.

    >>> parse_topology("        GPU0    GPU1    NIC0\\nGPU0     X      NV12    PIX\\nGPU1    NV12     X      SYS\\n")
    {('GPU0', 'GPU1'): 'NV12', ('GPU0', 'NIC0'): 'PIX', ('GPU1', 'NIC0'): 'SYS'}
    """
    # On a terminal the head is underlined.
    lines = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]
    head = next((words for words in lines if words and words[0] == "GPU0" and words[1:2] != ["X"]), [])
    columns = list(itertools.takewhile(lambda word: re.fullmatch(r"(GPU|NIC|mlx)\w*", word), head))
    found: dict[tuple[str, str], str] = {}
    for words in lines:
        if words and words[0] in columns and words != head:
            cells = list(itertools.takewhile(_CELL.fullmatch, words[1:]))
            for column, cell in zip(columns, cells, strict=False):
                if cell != "X" and (column, words[0]) not in found:
                    found[words[0], column] = cell
    return found


def topology_notes(text: str) -> list[str]:
    """Return in words what connects GPUs with each other and with network cards.

    >>> topology_notes("        GPU0    GPU1\\nGPU0     X      NV12\\nGPU1    NV12     X\\n")
    ['GPUs are connected by 12 NVLinks (NV12): 1 pair']
    """
    pairs = parse_topology(text)
    among = Counter(kind for (one, other), kind in pairs.items() if one.startswith("GPU") and other.startswith("GPU"))
    cards = Counter(kind for (one, other), kind in pairs.items() if one.startswith("GPU") != other.startswith("GPU"))
    notes = []
    for counted, what in ((among, "GPUs are connected"), (cards, "GPUs and network cards are connected")):
        if counted:
            parts = [
                f"{_meaning(kind)} ({kind}): {count} pair{'s' if count > 1 else ''}" for kind, count in counted.items()
            ]
            notes.append(f"{what} by {', by '.join(parts)}")
    return notes


def _meaning(kind: str) -> str:
    if kind.startswith("NV"):
        return f"{kind.removeprefix('NV')} NVLinks" if kind != "NV1" else "1 NVLink"
    return _MEANINGS[kind]
