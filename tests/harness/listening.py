"""What processes there are and where they listen, by the kernel's tables."""

import ipaddress
import os
import re
from contextlib import suppress
from pathlib import Path

_LISTENS = "0A"


def _parents() -> dict[int, int]:
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, above = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(entry.name)] = int(above)
    return parents


def descendants(process: int) -> set[int]:
    """Return a process, those that it has started, and theirs."""
    parents = _parents()
    found, before = {process}, set[int]()
    while found != before:
        before = set(found)
        found |= {each for each, above in parents.items() if above in before}
    return found


def ranks_of(process: int) -> list[int]:
    """Return the ranks that a process has had forked: what descends from it and has started nothing."""
    return sorted(descendants(process) - {process} - set(_parents().values()))


def listening_places(process: int) -> list[tuple[str, int]]:
    """Return the addresses and ports on which a process listens for connections."""
    sockets = set()
    for entry in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):
            sockets.update(re.findall(r"socket:\[(\d+)\]", os.readlink(entry)))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and fields[9] in sockets:
                address, _, port = fields[1].partition(":")
                found.append((_address(address), int(port, 16)))
    return found


def _address(digits: str) -> str:
    """Return an address that the kernel writes as words of four bytes, each in the order of this machine."""
    words = [bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8)]
    return str(ipaddress.ip_address(b"".join(words)))
