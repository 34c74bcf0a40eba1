"""PullLog: how many waves of other pipelines the pulls of an eager run took (weight policy wsp).

    {"format": "autopar.pulls", "version": 1, "plan_sha256": "...",
     "fills": [{"first_step": 0, "steps": 8, "taken": [[[0], [2], [3]], [[0], [1], [2]]]}]}

In comes what ranks noted; out comes a log by which a run takes the same waves again. From one fill of the pipelines to
their drain, it has by rank and by pull a number for every other pipeline: of how many of its waves the rank had the
changes from then on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, NoReturn

from pydantic import Field

from autopar.errors import FileError
from autopar.formats.document import Count, Digest, Document, Index, Record
from autopar.formats.plan import Plan

Taken = tuple[Index, ...]
"""By other pipeline, ascending: of how many waves."""


class Fill(Record):
    """From a fill of the pipelines to their drain."""

    first_step: Index
    """The first that is trained."""
    steps: Count
    """How many are."""
    taken: Annotated[tuple[tuple[Taken, ...], ...], Field(min_length=2)]
    """By rank, pull and other pipeline, ascending: of how many of its waves the rank has the changes from then on."""

    @property
    def stop(self) -> int:
        """The step behind the last."""
        return self.first_step + self.steps


class PullLog(Document):
    """The log of an eager run."""

    format: Literal["autopar.pulls"] = "autopar.pulls"
    version: Literal[1] = 1
    plan_sha256: Digest
    """Of the plan that was run."""
    fills: Annotated[tuple[Fill, ...], Field(min_length=1)]
    """One behind the other."""

    @classmethod
    def of(cls, plan: Plan, fills: Sequence[Fill]) -> PullLog:
        """Return the log of a plan's run."""
        return cls(plan_sha256=digest_of(plan), fills=tuple(fills))

    @property
    def ends(self) -> tuple[int, ...]:
        """Behind how many steps of the run pipelines were drained."""
        return tuple(each.stop for each in self.fills)

    def taken_by(self, rank: int) -> Mapping[int, Sequence[Taken]]:
        """Return what the pulls of a rank took, by the step with which the pipelines were filled."""
        return {each.first_step: each.taken[rank] for each in self.fills}

    def check(self, plan: Plan, path: Path) -> None:
        """Refuse a log that is of another plan, or that no run of it can have written.

        Raises:
            FileError: names the JSON path.
        """
        if self.plan_sha256 != digest_of(plan):
            _refuse(path, "plan_sha256", "it is the log of another plan, or of another seed; replay it with its own")
        for index, (fill, following) in enumerate(pairwise(self.fills), 1):
            if fill.stop != following.first_step:
                _refuse(path, f"fills[{index}].first_step", f"must be {fill.stop}, found {following.first_step}")
        for index, fill in enumerate(self.fills):
            _check_fill(fill, plan, path, f"fills[{index}]")


def digest_of(plan: Plan) -> str:
    """Return the SHA-256 of a plan, by which a log is known to be its own."""
    return sha256(plan.dumps().encode()).hexdigest()


def _refuse(path: Path, at: str, what: str) -> NoReturn:
    raise FileError(f"{path}: $.{at}: {what}")


def _check_fill(fill: Fill, plan: Plan, path: Path, at: str) -> None:
    """Refuse pulls that are not as many as there are, or took what cannot have been taken."""
    assert plan.wave is not None
    assert plan.staleness is not None
    waves, others = fill.steps // plan.wave, len(plan.pipelines) - 1
    if len(fill.taken) != len(plan.devices):
        _refuse(path, f"{at}.taken", f"the plan has {len(plan.devices)} ranks, found {len(fill.taken)}")
    pulls = max(0, waves - 1)
    for rank, rows in enumerate(fill.taken):
        if len(rows) != pulls:
            said = f"{fill.steps} steps have {pulls} pulls, found {len(rows)}"
            _refuse(path, f"{at}.taken[{rank}]", said)
        before: Taken = (0,) * others
        for number, row in enumerate(rows):
            here = f"{at}.taken[{rank}][{number}]"
            if len(row) != others:
                _refuse(path, here, f"there are {others} other pipelines, found {len(row)}")
            for index, (least, count) in enumerate(zip(before, row, strict=True)):
                lowest, most = max(least, number + 1 - plan.staleness), min(waves, number + 2 + plan.staleness)
                if not lowest <= count <= most:
                    _refuse(path, f"{here}[{index}]", f"must be {lowest} to {most}, found {count}")
            before = row
    _check_order(fill, plan, path, at)


def _check_order(fill: Fill, plan: Plan, path: Path, at: str) -> None:
    """Refuse pulls that would wait for each other in a ring.

    A pipeline pushes a wave once all of its ranks have pulled behind the push before.
    """
    every, placed = range(len(plan.pipelines)), plan.ownership.ranks
    ranks = [[rank for rank, own in enumerate(placed) if plan.pipeline_of(own.stage) == at] for at in every]
    pushed, pulls = [1 for _ in every], len(fill.taken[0])

    def lacking(own: int) -> tuple[int, int] | None:
        """Return the rank and the place of what a pipeline's next pull takes before it is pushed."""
        others = [each for each in every if each != own]
        for rank in ranks[own]:
            for index, count in enumerate(fill.taken[rank][pushed[own] - 1]):
                if count > pushed[others[index]]:
                    return rank, index
        return None

    moved = True
    while moved:
        moved = False
        for own in every:
            while pushed[own] <= pulls and lacking(own) is None:
                pushed[own] += 1
                moved = True
    for own in every:
        wanted = lacking(own) if pushed[own] <= pulls else None
        if wanted is not None:
            rank, index = wanted
            here = f"{at}.taken[{rank}][{pushed[own] - 1}][{index}]"
            _refuse(path, here, "waits for a wave that waits for this pull")
