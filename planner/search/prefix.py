"""Prefix: the first stages of a plan, as a function from the terms of what follows to the seconds of the step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autopar.planner.bounds.chain import LinkTerms, StageTerms, Terms, Value

_NONE = float("-inf")


class Prefix(NamedTuple):
    """The largest of a number, of a term of what follows and a number, and of lines over its round trip.

    :func:`autopar.planner.bounds.chain.fold` is made of sums and maxima, so that folding any number of stages is again
    of this form.
    """

    constant_s: float = 0.0
    backward_s: float = _NONE
    """Added to the term U of what follows."""
    done_s: float = _NONE
    """Added to its term V."""
    lines: tuple[tuple[float, float], ...] = ()
    """(slope, seconds) over its term R, those only that are the largest somewhere."""

    def step_s(self, behind: Terms) -> Value:
        """Return the seconds of the step of this prefix before the stages ``behind``; scalars and arrays alike."""
        found = np.maximum(self.constant_s, behind.step_s)
        if self.backward_s > _NONE:
            found = np.maximum(found, self.backward_s + behind.backward_s)
        if self.done_s > _NONE:
            found = np.maximum(found, self.done_s + behind.done_s)
        for slope, seconds in self.lines:
            found = np.maximum(found, slope * behind.trip_s + seconds)
        return found

    def then(self, stage: StageTerms, link: LinkTerms) -> Prefix:
        """Return this prefix with one more stage behind it, and the boundary behind that."""
        # The step is the term V of the first stage, or that of a stage behind a boundary that nothing crosses.
        done_s = max(self.done_s, 0.0)
        backward_s = max(self.backward_s, done_s + float(stage.closing_s))
        own = float(stage.forward_s + stage.backward_s)
        forth_s, back_s = float(link.forth_s), float(link.back_s)
        rate, around, beside = float(stage.rate), own + forth_s + back_s, float(stage.beside_s)
        constant_s = max(self.constant_s, backward_s + float(stage.work_s))
        then_done_s = done_s + float(stage.forward_s) + forth_s if link.forth else _NONE
        if not link.back:
            fixed = (
                backward_s + rate * own,
                backward_s + own + beside,
                *(slope * own + seconds for slope, seconds in self.lines),
            )
            return Prefix(max(constant_s, *fixed), _NONE, then_done_s)
        queued = max(float(link.forth_work_s) + back_s, forth_s + float(link.back_work_s))
        lines = [(slope, slope * around + seconds) for slope, seconds in self.lines]
        lines += [(rate, rate * around + backward_s), (1.0, max(own + queued, around + beside) + backward_s)]
        return Prefix(constant_s, backward_s + around, then_done_s, _largest(lines))


NOTHING = Prefix()


def _largest(lines: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return those lines that are the largest at some round trip from 0 on, by slope, ascending.

    >>> _largest([(1.0, 5.0), (2.0, 1.0), (1.0, 4.0), (1.5, 2.0)])
    ((1.0, 5.0), (2.0, 1.0))
    """
    hull: list[tuple[float, float]] = []
    for slope, seconds in sorted(lines):
        while hull and hull[-1][1] <= seconds:
            hull.pop()
        while len(hull) > 1 and _hidden(hull[-2], hull[-1], (slope, seconds)):
            hull.pop()
        hull.append((slope, seconds))
    return tuple(hull)


def _hidden(flat: tuple[float, float], middle: tuple[float, float], steep: tuple[float, float]) -> bool:
    """Whether a line is nowhere above both of its neighbours."""
    return (flat[1] - middle[1]) * (steep[0] - flat[0]) >= (flat[1] - steep[1]) * (middle[0] - flat[0])
