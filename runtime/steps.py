"""Steps: how long the steps of a run were, and the timelines of those that were recorded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from statistics import median, quantiles

from autopar.formats.own_times import OwnTimes, medians, own_times
from autopar.formats.program import Program
from autopar.formats.report import StepTimes
from autopar.formats.spent import Spent, spent_within
from autopar.formats.timeline import Timeline
from autopar.runtime.result import RankResult

__all__ = ["Steps"]


class Steps:
    """The steps of a run, from what the ranks bring back.

    The first step, which allocates memory and opens connections, counts for nothing where there are others.
    """

    def __init__(self, program: Program, results: Sequence[RankResult]) -> None:
        self._program, self._results = program, results
        ends = [max(moments) for moments in zip(*(result["ends_s"] for result in results), strict=True)]
        begin = min(result["starts_s"][0] for result in results)
        self.lengths_s: list[float] = [end - before for before, end in zip([begin, *ends], ends, strict=False)]
        """A step lasts from the end of the one before it, on the slowest rank, to its own end there."""
        self._steady = self.lengths_s[1:] or self.lengths_s
        recorded = [int(step) for step in results[0]["times_s"]]
        self._recorded = [step for step in recorded if step > 0] or recorded
        self._ends_s = [begin, *ends]

    def times(self) -> StepTimes:
        """Return how the lengths are distributed."""
        return StepTimes(
            median=median(self._steady),
            p10=_quantile(self._steady, 0),
            p90=_quantile(self._steady, 8),
            longest=max(self._steady),
            first=self.lengths_s[0],
        )

    @cached_property
    def typical(self) -> int:
        """The recorded step with one after it whose length is nearest to the median; of equal ones the last."""
        middle = median(self._steady)
        return min(self._recorded[:-1] or self._recorded, key=lambda step: (abs(self.lengths_s[step] - middle), -step))

    def timeline(self, step: int) -> Timeline:
        """Return when the actions of a recorded step ran, from the beginning of the first."""
        return self._timeline(step, min(result["times_s"][str(step)][0][0] for result in self._results))

    def spent(self, step: int) -> list[Spent]:
        """Return where the ranks' time went in a recorded step."""
        steps = [self._timeline(each, 0.0) for each in self._recorded if each in (step, step + 1)]
        return spent_within(steps, self._ends_s[step], self._ends_s[step + 1])

    def _timeline(self, step: int, begin: float) -> Timeline:
        times = [result["times_s"][str(step)] for result in self._results]
        timeline = Timeline("measured")
        for rank, actions in enumerate(self._program.ranks):
            for action, (start, end) in zip(actions, times[rank], strict=True):
                timeline.add(rank, action, start - begin, end - begin)
        return timeline

    def own_times(self) -> OwnTimes:
        """Return the median of every action by itself over the recorded steps."""
        return medians(own_times(self.timeline(step)) for step in self._recorded)

    def overhead_s(self) -> float:
        """Return the median, of the rank where it is largest, of what recorded steps take before their first action."""
        found: list[float] = []
        for result in self._results:
            begun = [result["times_s"][str(step)][0][0] - result["starts_s"][step] for step in self._recorded]
            found.append(median(begun))
        return max(0.0, *found)


def _quantile(values: Sequence[float], index: int) -> float:
    return quantiles(values, n=10, method="inclusive")[index] if len(values) > 1 else values[0]
