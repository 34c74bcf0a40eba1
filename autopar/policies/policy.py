"""Policy: which weights forwards and backwards see, and what follows from that; what all weight policies share.

Read :class:`Policy` first; the policies themselves are in :mod:`autopar.policies`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import lcm
from typing import ClassVar, Literal

from autopar.depths import Ahead, Distances, StageDepths, delay, sum_lag, xpipe_constants
from autopar.errors import UsageError
from autopar.flushes import TAKES_A_FLUSH
from autopar.ownership import Replicas, Samples, Share, Turn

Computed = tuple[str, int, int, int]
"""Of a repetition, without messages: kind of action, as in a program; stage; micro-batch, counted from the first one
whose backward it has, and of an update of several mini-batches the first that it is of; and how many updates behind the
newest weights it sees them."""


class Policy:
    """A weight policy; by itself, all see the newest weights, nothing more is kept, and a pipeline is never flushed.

    Micro-batches are counted through all mini-batches from the last drain on, and versions by their updates.

    With K_s micro-batches in flight on stage s, T of them for an update, and updates that come L_s micro-batches late,
    repetition i has the backwards of micro-batches iT + L_s to iT + L_s + T - 1, each followed by the forward K_s
    micro-batches ahead, and behind the last backward the update of mini-batch i. Repetitions begin before the first
    mini-batch: an action of a micro-batch that there is none of is left out, which fills the pipeline, and drains it in
    the end. A drained pipeline is filled again the same way.

    Where n replicas of a stage take turns (T = 1), replica r has mini-batches r, n + r, 2n + r and so on, counted from
    the fill, and as many in flight as its stage's K_s says. Their gradients are added up, and update all n, once each
    has had one more; behind the last mini-batch, with those that there are. A repetition then has several mini-batches:
    the least number that all such n divide.
    """

    name: ClassVar[str]
    """In a plan."""
    system: ClassVar[str] = ""
    """Whose it is, where its name does not say so."""
    supports: ClassVar[Sequence[str]] = ("bf16",)
    """What it goes with of what takes a flush elsewhere."""
    settings: ClassVar[Mapping[str, str]] = {}
    """Fields of a plan that are its own, none of them null, and why other policies have none but their defaults."""
    asks: ClassVar[Mapping[str, str]] = {}
    """Those of them for which no default is known, and the words of a refusal where they are not given."""
    unit: ClassVar[str] = "per mini-batch"
    """What a plan's seconds are of."""
    minimises: ClassVar[Literal["step", "period"]] = "period"
    """What its plans have least of: seconds of a step, or from one mini-batch to the next of a filled pipeline."""
    keeps_versions: ClassVar[bool] = True
    """Whether weights are kept that an update has replaced."""
    sums_apart: ClassVar[bool] = True
    """Whether sums over all ranks are under way beside those of gradients."""
    prepares: ClassVar[Literal["", "predict", "correct"]] = ""
    """What it makes of the newest weights, for forwards, backwards or both to see; or nothing."""
    sums_gradients: ClassVar[bool] = False
    """Whether updates come so late that all ranks can add up what they know of a mini-batch's gradients before."""
    shares_parameters: ClassVar[bool] = True
    """Whether stages that share a parameter update it alike."""
    has_pipelines: ClassVar[bool] = False
    """Whether its plans have several pipelines, and others one."""
    takes_turns: ClassVar[bool] = False
    """Whether replicas may take whole mini-batches in turn; each then counts its own micro-batches."""

    first_pull = early_pulls = 0
    """How many mini-batches after the pipeline's fill the first comes that pulls what other pipelines have changed; and
    how many pulls come before the first that waits for some."""

    schedule: ClassVar[str | None] = "1f1b"
    """The only schedule that it goes with; None: any."""
    movable: ClassVar[Sequence[str]] = ("F", "S", "R", "SG", "RG")
    """Kinds of actions that an edited program may have elsewhere; none: all."""
    reduces_at_backward: ClassVar[bool] = True
    """Whether all that a rank's last backward of a mini-batch completes is reduced from there on, beside what follows;
    else buckets as they fill, and what stages share where its reduction stands."""

    def refusal_of(self, feature: str) -> str | None:
        """Return why something of :data:`autopar.flushes.TAKES_A_FLUSH` does not go with it; None where it does."""
        return None if feature in self.supports else TAKES_A_FLUSH[feature].format(name=self.name)

    def check(self, feature: str) -> None:
        """Refuse something of :data:`autopar.flushes.TAKES_A_FLUSH` that does not go with it.

        Raises:
            UsageError: says why, and what to do.
        """
        why = self.refusal_of(feature)
        if why is not None:
            raise UsageError(why)

    def with_waves(self, wave: int | None, staleness: int | None, *, eager: bool, buffered_of: int) -> Policy:
        """Return it with what a plan says of waves; ``eager`` ones of so many pipelines are kept where weights are."""
        return self

    def pulls_before(self, micro_batch: int) -> int:
        """Return how many pulls there have been when the forward of a micro-batch comes."""
        return 0

    def title(self, named: str) -> str:
        """Return what a plan's title says of it; ``named`` is it with what is asked of it."""
        return f" without flushes (weight policy {named})"

    def delay(self, stage: StageDepths) -> float:
        """Return how many updates there are from a forward to its own update, in the mean of a mini-batch."""
        return delay(stage)

    def refusal(self, stages: Sequence[Replicas], micro_batches: int, parameter: str | None) -> str | None:
        """Return why it does not train stages of such replicas; None where it does.

        Args:
            stages: how each is replicated.
            micro_batches: of a mini-batch.
            parameter: of several stages, if there is one.
        """
        for index, stage in enumerate(stages):
            why = self._turns_refusal(micro_batches, parameter) if stage.period > 1 else None
            if why is not None:
                return f"replicas of stage {index} take turns, {why}"
            if stage.shard != "none":
                return f"replicas of stage {index} divide {stage.shard}, of which no versions are kept"
        if parameter is not None and not self.shares_parameters:
            return f"{parameter} is shared between stages, whose rates differ; plan with `policy='stash'`"
        return None

    def _turns_refusal(self, micro_batches: int, parameter: str | None) -> str | None:
        """Return why replicas of its stages cannot take turns."""
        if not self.takes_turns:
            return "of which only stash has a rule; plan with `policy='stash'`"
        if micro_batches > 1:
            return "which have whole mini-batches; plan with `micro_batches=1`"
        if parameter is not None:
            return f"and {parameter} is shared between stages; plan with `policy='sync'`"
        return None

    def most_in_flight(self, stage: Replicas, micro_batches: int) -> int | None:
        """Return the most micro-batches in flight on a replica; None: micro-batches of any number of mini-batches."""
        return None

    def stands_still(self, in_flight: tuple[int, int], periods: tuple[int, int], micro_batches: int) -> bool:
        """Whether a stage waits for ever for the one before, of which the first numbers are: it has fewer in flight."""
        return periods == (1, 1) and in_flight[0] < in_flight[1]

    def span(self, periods: Sequence[int]) -> int:
        """Return the mini-batches of a repetition, where a stage's replicas have every ``periods``-th one."""
        return lcm(*periods)

    def lead(self, periods: Sequence[int], depths: Sequence[StageDepths]) -> int:
        """Return how many mini-batches before the first backward repetitions begin, by stage as deep as this."""
        ahead = max(count * (each.depth + each.lag) for count, each in zip(periods, depths, strict=True))
        span = self.span(periods)
        return -(-ahead // (depths[0].micro_batches * span)) * span

    def turn(self, samples: Samples, micro_batches: int) -> Turn:
        """Return which micro-batches of which mini-batches a replica has, whose samples count from the last fill."""
        return Turn(range(micro_batches), samples.first, samples.period)

    def between_drains(self, mini_batches: range) -> Iterator[range]:
        """Yield mini-batches, together those that are trained from a fill of the pipeline to a drain."""
        yield mini_batches

    def shift(self, micro_batches: int) -> int:
        """Return by how many micro-batches a repetition is ahead of the one before, which has so many, in a program."""
        return micro_batches

    def repetition(
        self, own: Share, depths: StageDepths, span: int, order: Iterable[tuple[str, int, int]]
    ) -> Iterator[Computed]:
        """Yield what a rank computes in one repetition, updates included.

        Args:
            own: what it has.
            depths: of its stage.
            span: mini-batches of the repetition.
            order: what its schedule has it compute in a step, by (kind, stage, micro-batch from 0).
        """
        if span == 1:
            yield from self._one_mini_batch(own.stage, depths)
            return
        # Of a mini-batch that is a single micro-batch.
        behind, ahead = self.distances(depths, 0), own.turn + depths.depth * own.turns
        for first in range(0, span, own.turns):
            yield "B", own.stage, first + own.turn, behind.backward
            yield "U", own.stage, first, 0
            yield "F", own.stage, first + ahead, behind.forward

    def _one_mini_batch(self, stage: int, depths: StageDepths) -> Iterator[Computed]:
        """Yield a repetition in which all replicas have a part of every micro-batch."""
        depth, micro_batches = depths.depth, depths.micro_batches
        behind = [self.distances(depths, index) for index in range(micro_batches)]
        last = micro_batches - 1
        for index in range(depths.lag, depths.lag + micro_batches):
            yield "B", stage, index, behind[index % micro_batches].backward
            if self.sums_gradients and (index - sum_lag(depths)) % micro_batches == last:
                yield "N", stage, index - sum_lag(depths), 0
            if index == last + depths.lag:
                yield "U", stage, -1, 0
                if self.prepares_backwards(depths):
                    yield "C", stage, -1, 0
            if self.prepares_forwards(depths) and (depth + index) % micro_batches == 0:
                yield "P", stage, depth + index, 0
            yield "F", stage, depth + index, behind[(depth + index) % micro_batches].forward
            if not self.sums_gradients and (depth + index) % micro_batches == last:
                # Nothing but losses and what they counted, which is known once the forwards are done.
                yield "N", stage, depth + index, 0

    def forward_version(self, stage: StageDepths, micro_batch: int) -> int:
        """Return the version that the forward of a micro-batch sees; below 0 stands for 0."""
        return stage.newest_at_forward(micro_batch)

    def backward_version(self, stage: StageDepths, micro_batch: int) -> int:
        """Return the version that its backward sees."""
        return stage.newest_at_backward(micro_batch)

    def stage_depths(
        self,
        depths: Sequence[int],
        micro_batches: int,
        shared_by: Iterable[Sequence[int]] = (),
        ahead: Ahead = "counted",
    ) -> list[StageDepths]:
        """Return how deep every stage is, and how late its updates come.

        Stages that share a parameter add up its gradients, which are there when the first of them has its own. Until
        then, the others do not wait: they go on for as many micro-batches as backwards are apart.

        Args:
            depths: micro-batches in flight of every stage.
            micro_batches: of a mini-batch.
            shared_by: of every parameter that stages share, these stages.
            ahead: how far ``predict`` predicts.

        >>> from autopar.policies import POLICIES
        >>> [each.lag for each in POLICIES["stash"].stage_depths([4, 3, 2, 1], 1, [[0, 3]])]
        [0, 0, 0, 2]
        """
        found = [StageDepths(depth, depths[0], micro_batches) for depth in depths]
        if ahead == "xpipe":
            count = len(depths)
            found = [each._replace(ahead=xpipe_constants(at, count, micro_batches)) for at, each in enumerate(found)]
        lags = [self.lag(each) for each in found]
        # Where updates are late anyway, the sums have ended by then.
        for first, *others in shared_by if not self.sums_gradients else ():
            for stage in others:
                lags[stage] = max(lags[stage], -(-(depths[first] - depths[stage]) // 2))
        return [each._replace(lag=lag) for each, lag in zip(found, lags, strict=True)]

    def distances(self, stage: StageDepths, index: int) -> Distances:
        """Return the distances of the ``index``-th micro-batch of every mini-batch.

        While the pipeline fills, fewer updates have been made than that says: versions are then counted back from
        those that there are, and none is below 0.

        >>> from autopar.policies import POLICIES
        >>> stage = StageDepths(depth=3, first_depth=4, micro_batches=2)
        >>> [POLICIES["stash"].distances(stage, index) for index in range(2)]
        [Distances(forward=0, backward=1), Distances(forward=0, backward=1)]
        >>> [POLICIES["vertical-sync"].distances(stage, index) for index in range(2)]
        [Distances(forward=1, backward=2), Distances(forward=0, backward=1)]
        """
        newest, later = stage.newest_at_forward(index), stage.newest_at_backward(index)
        return Distances(newest - self.forward_version(stage, index), later - self.backward_version(stage, index))

    def kept_versions(self, stage: StageDepths) -> int:
        """Return how many versions of its weights a stage keeps, the newest among them."""
        return 1 + max(max(self.distances(stage, index)) for index in range(stage.micro_batches))

    def least_micro_batches(self, first_depth: int) -> int:
        """Return the fewest micro-batches of a mini-batch with which the rule holds."""
        return 1

    def lag(self, stage: StageDepths) -> int:
        """Return how many micro-batches later than it could be an update is; ``stage`` has none yet."""
        return 0

    def prepares_forwards(self, stage: StageDepths) -> bool:
        """Whether forwards see weights that are no version; made before the first forward of a mini-batch."""
        return False

    def prepares_backwards(self, stage: StageDepths) -> bool:
        """Whether backwards do; made behind an update, until the next one."""
        return False

    def buffers(self, stage: StageDepths) -> int:
        """Return how often a stage keeps as much as its weights, beside their versions."""
        return 0

    def passing_buffers(self, stage: StageDepths) -> int:
        """Return how often it does so for a while behind an update, and not while it computes."""
        return 0
