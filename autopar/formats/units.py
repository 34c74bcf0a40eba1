"""Units: sizes and bandwidths as they are typed on the command line, in names of clusters and in their files."""

from __future__ import annotations

import re

from autopar.errors import UsageError

_BINARY = {"B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_DECIMAL = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BITS = {"KBPS": 10**3, "MBPS": 10**6, "GBPS": 10**9, "TBPS": 10**12}
_NUMBER = re.compile(r"(?P<number>\d{1,18}(?:\.\d{1,9})?)\s*(?P<unit>[A-Za-z]*)")


def parse_bytes(text: str, flag: str) -> int:
    """Read bytes: a number with B, KiB .. TiB (powers of 1024) or KB .. TB (powers of 1000).

    >>> parse_bytes("16GiB", "--memory"), parse_bytes("1.5 kb", "--memory"), parse_bytes("300", "--memory")
    (17179869184, 1500, 300)

    Raises:
        UsageError: it is not a size, or none at all.
    """
    return int(_parse(text, flag, {**_DECIMAL, **_BINARY}, "16GiB"))


def parse_bandwidth(text: str, flag: str) -> float:
    """Read bytes per second: a size followed by /s, or bits per second as networks are sold.

    >>> parse_bandwidth("25GB/s", "--bandwidth"), parse_bandwidth("200Gbps", "--bandwidth")
    (25000000000.0, 25000000000.0)

    Raises:
        UsageError: it is not a bandwidth.
    """
    if text.strip().casefold().endswith("bps"):
        return _parse(text.strip(), flag, _BITS, "200Gbps") / 8
    if not text.strip().endswith("/s"):
        raise UsageError(f"{flag} {text[:80]!r}: write bytes or bits per second, such as 25GB/s or 200Gbps")
    return _parse(text.strip().removesuffix("/s"), flag, {**_DECIMAL, **_BINARY}, "25GB/s")


def _parse(text: str, flag: str, units: dict[str, int], example: str) -> float:
    match = _NUMBER.fullmatch(text.strip())
    factor = units.get((match["unit"] or "B").upper()) if match else None
    if match is None or factor is None:
        raise UsageError(
            f"{flag} {text[:80]!r}: write a number and a unit ({', '.join(_names(units))}), such as {example}"
        )
    value = float(match["number"]) * factor
    if not 1 <= value < 2**63:
        raise UsageError(f"{flag} {text[:80]!r}: must be at least 1 and below 2**63")
    return value


def _names(units: dict[str, int]) -> list[str]:
    return [unit.replace("IB", "iB").replace("BPS", "bps") for unit in units]
