"""Outputs that pages show, compared with real ones: any number stands for any other, ``...`` for lines left out."""

import re
from itertools import groupby

_TIMES, _SIZES = r"(?:us|ms|s|min|h)", r"(?:[kKMGTP]i?B|B|bytes)"
_NUMBER = re.compile(rf"(?<!\w)[-+]?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?(?: ?(?:({_TIMES})|({_SIZES}))(?:/s)?(?!\w))?")
_COLOURS = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
_BUSY = re.compile(r"(?m)^autopar: rank \d+ \(stage \d+\) computes .* times as long as planned, .*\n?")
"""What a run may say on a machine that has other work."""
_LEFT_OUT = "..."


def difference(shown: str, printed: str) -> tuple[int, str] | None:
    """Return the first line of what is shown that was not printed, counted from 0, and why; None if there is none.

    >>> difference("step 1.5 ms\\n...\\ndone", "step 900 us\\nmore\\nand more\\ndone")
    >>> difference("step 1.5 ms\\ndone", "step 900 us\\nfailed")
    (1, "the page shows 'done', and the block prints 'failed'")

    A line that a busy machine adds is passed over:

    >>> difference("done", "autopar: rank 1 (stage 1) computes 1.4 times as long as planned, the others 0.5\\ndone")
    """
    lines = shown.splitlines()
    expected = [(number, _pattern(line)) for number, line in enumerate(lines) if line.strip()]
    plain = _BUSY.sub("", _COLOURS.sub("", printed).replace("\r", "\n"))
    found = [line for line in plain.splitlines() if line.strip()]
    patterns = [_pattern(line) for line in found]
    at, is_free = 0, False
    parts = [list(group) for _, group in groupby(expected, key=lambda each: each[1] == _LEFT_OUT)]
    for part in parts:
        if part[0][1] == _LEFT_OUT:
            is_free = True
            continue
        start, agreed = _place(part, patterns, at, is_free, is_last=part is parts[-1])
        if agreed < len(part):
            number, at = part[agreed][0], start + agreed
            instead = repr(found[at].strip()) if at < len(found) else "nothing more"
            return number, f"the page shows {lines[number].strip()!r}, and the block prints {instead}"
        at, is_free = start + agreed, False
    if at < len(found) and not is_free:
        return max(len(lines) - 1, 0), f"the block prints another line: {found[at]!r}"
    return None


def _place(part: list[tuple[int, str]], lines: list[str], at: int, is_free: bool, is_last: bool) -> tuple[int, int]:
    """Find the lines of a part from a place on, or, where lines before it are left out, anywhere behind that.

    Returns where most of them agree, and how many do.
    """
    last = max(at, len(lines) - len(part))
    starts = range(last if is_last else at, last + 1) if is_free else [at]
    agree = {start: _agreeing(part, lines[start:]) for start in starts}
    start = max(agree, key=lambda each: (agree[each], -each))
    return start, agree[start]


def _agreeing(part: list[tuple[int, str]], lines: list[str]) -> int:
    """Return how many lines agree from the first on."""
    count = 0
    for (_, expected), line in zip(part, lines, strict=False):
        if expected != line:
            break
        count += 1
    return count


def _pattern(line: str) -> str:
    """Return a line in which numbers, spaces and rules are alike, whatever their size.

    >>> _pattern("  3 x   17.5 ms, 2 GiB ────")
    '# x #s, #B ─'
    """
    plain = re.sub(r"─+|━+", "─", " ".join(line.split()))
    return _NUMBER.sub(lambda found: "#s" if found[1] else "#B" if found[2] else "#", plain)
