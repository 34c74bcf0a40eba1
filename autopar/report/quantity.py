"""Quantities as people read them: durations, sizes, bandwidths."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Return seconds in the unit that leaves one to three digits before the point.

    >>> duration(0), duration(0.0000123), duration(0.01234), duration(0.5), duration(75.25)
    ('0 s', '12.3 us', '12.3 ms', '500 ms', '75.2 s')
    """
    if seconds == 0:
        return "0 s"
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 0.9995:
            return f"{_three_digits(seconds * factor)} {unit}"
    return f"{_three_digits(seconds * 1e9)} ns"


def size(count: int) -> str:
    """Return bytes in binary units.

    >>> size(0), size(1000), size(1536), size(16 * 2**30)
    ('0 B', '1000 B', '1.5 KiB', '16 GiB')
    """
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{_three_digits(value)} {unit}"
        value /= 1024
    return f"{_three_digits(value)} TiB"


def bandwidth(bytes_per_s: float) -> str:
    """Return bytes per second in decimal units, as makers of links do.

    >>> bandwidth(25e9), bandwidth(1.5e6)
    ('25 GB/s', '1.5 MB/s')
    """
    for unit, factor in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_s >= factor:
            return f"{_three_digits(bytes_per_s / factor)} {unit}"
    return f"{_three_digits(bytes_per_s)} B/s"


def percentage(share: float, *, signed: bool = False) -> str:
    """Return a share in per cent.

    >>> percentage(0.256), percentage(0.031, signed=True)
    ('25.6 %', '+3.1 %')
    """
    return f"{share:{'+' if signed else ''}.1%}".replace("%", " %")


def figure(value: float) -> str:
    """Return a number without a unit, in four digits or, where it has more before its point, in all of them.

    >>> figure(58.4912), figure(32123.456), figure(0.5), figure(1.5e-05)
    ('58.49', '32,123', '0.5', '1.5e-05')
    """
    return f"{value:.4g}" if abs(value) < 9999.5 else f"{value:,.0f}"


def _three_digits(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.2f}".rstrip("0").rstrip(".") if value < 10 else f"{value:.1f}".removesuffix(".0")
