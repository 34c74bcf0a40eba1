"""Progress: how what takes a while tells what it is at. Nothing depends on what is told.

What is told may go into parts: of ``timing layers: forwards`` and ``timing layers: recomputation``, ``timing layers``
is the phase, and shares are of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

Progress = Callable[[str, float], None]
"""Called with what is being done, and about which share of its phase lies behind; 0 where nobody knows."""


def no_progress(what: str, share: float) -> None:
    """Tell nobody."""


class Retold:
    """Tells a progress what it is told, and the last of it again: what a listener raises then ends what takes long.

    >>> told = Retold(lambda what, share: print(what))
    >>> told.again()
    >>> told("searching", 0.2), told.again()
    searching
    searching
    (None, None)
    """

    def __init__(self, progress: Progress) -> None:
        """Take what is told."""
        self._progress, self._last = progress, list[tuple[str, float]]()

    def __call__(self, what: str, share: float) -> None:
        """Tell what is being done."""
        self._last = [(what, share)]
        self.again()

    def again(self) -> None:
        """Tell the last again."""
        for each in self._last:
            self._progress(*each)


SaidNote = Callable[[str, str], None]
"""Called with what a note is about, and its text."""


def said_once(say: Callable[[str], object]) -> SaidNote:
    """Return what says a note; of those about the same, the tenth, hundredth and so on, with their number.

    A run of days may give a note every few seconds.

    >>> note = said_once(print)
    >>> for step in range(12):
    ...     note("rank 1 is slow", f"rank 1 is slow in step {step}")
    rank 1 is slow in step 0
    rank 1 is slow in step 9 (10 times by now)
    """
    counts = Counter[str]()

    def note(about: str, text: str) -> None:
        counts[about] += 1
        count = str(counts[about])
        if count == "1":
            say(text)
        elif count == "1".ljust(len(count), "0"):
            say(f"{text} ({count} times by now)")

    return note


def phase_of(what: str) -> str:
    """Return the phase of what is being done.

    >>> phase_of("timing layers: forwards"), phase_of("measuring the optimizer")
    ('timing layers', 'measuring the optimizer')
    """
    return what.partition(": ")[0]


class PhaseTimes:
    """How long every phase took, and about how long the present one will.

    >>> times = PhaseTimes(iter((0.0, 1.0, 4.0, 5.0, 7.0)).__next__)
    >>> times.tell("capturing", 0.0), times.tell("timing layers: forwards", 0.0)
    (None, None)
    >>> times.tell("timing layers: recomputation", 0.75)
    1.0
    >>> times.tell("linking", 0.0), times.summary()
    (None, 'took 7 s: timing layers 4 s, linking 2 s, capturing 1 s')
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        """Take a clock, of which only differences count."""
        self._now_s, self._seconds = now_s, dict[str, float]()
        self._phase, self._since_s, self._share = "", 0.0, 0.0

    def tell(self, what: str, share: float) -> float | None:
        """Note what is being done; return about how many seconds its phase will take yet, None where nobody knows."""
        now_s, phase = self._now_s(), phase_of(what)
        if phase != self._phase:
            self._end(now_s)
            self._phase, self._since_s, self._share = phase, now_s, share
        if share <= self._share:
            return None
        return (now_s - self._since_s) * (1 - share) / (share - self._share)

    def summary(self, most: int = 3) -> str:
        """End the present phase; return what all took, and the longest phases by name."""
        self._end(self._now_s())
        longest = sorted(self._seconds.items(), key=lambda each: -each[1])[:most]
        parts = ", ".join(f"{phase} {seconds:.3g} s" for phase, seconds in longest)
        return f"took {sum(self._seconds.values()):.3g} s: {parts}"

    def _end(self, now_s: float) -> None:
        if self._phase:
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now_s - self._since_s
        self._phase = ""
