"""Weight policies: which weights forwards and backwards see, and what a rank computes from one update to the next.

Version v of a stage's weights has v updates. Micro-batches m count through all mini-batches t, T of them each. K_s of
them are in flight on stage s, counted from 0. On stage s, forward and backward of m see the version

    stash           max(0, floor((m - K_s + 1) / T)): the newest when the forward comes
    vertical-sync   max(0, floor((m - K_0 + 1) / T)): the one that the first stage sees of m, on all stages
    2bw             max(0, t - 1): the one before the newest update of all
    predict         forward: predicted from the newest; backward: the newest, or predicted, too
    pipemare        forward: the newest; backward: the newest, corrected
    wsp             as stash, and what other pipelines have changed, wave by wave

and under ``sync``, with a flush at the end of every step, all see those of the step.

In: how deep a stage is, and a micro-batch. Out: the version of the weights that its forward and its backward see, and
the repetition that programs are made of. A step with a flush is a repetition, too: of one mini-batch, of which all
begins and ends in it (:class:`Sync`). Read :class:`Policy` first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import lcm
from typing import ClassVar, Literal, Protocol

from autopar.depths import StageDepths, delay, distances, sum_lag, updates_ahead
from autopar.errors import UsageError
from autopar.flushes import TAKES_A_FLUSH
from autopar.ownership import Samples, Share, Turn


class _PlannedStage(Protocol):
    """A stage of a plan."""

    @property
    def period(self) -> int:
        """Micro-batches from one of a replica's to its next."""

    @property
    def shard(self) -> str:
        """What its replicas divide."""

    @property
    def in_flight(self) -> int:
        """Most micro-batches in flight on all replicas together."""

    @property
    def devices(self) -> Sequence[int]:
        """Where it is."""


class _Shared(Protocol):
    """A parameter that stages share."""

    @property
    def parameter(self) -> str:
        """Its name."""


class _Planned(Protocol):
    """A plan, as far as its policy looks at it."""

    @property
    def stages(self) -> Sequence[_PlannedStage]:
        """In order."""

    @property
    def tied(self) -> Sequence[_Shared]:
        """What stages share."""

    @property
    def micro_batches(self) -> int:
        """Of a mini-batch."""


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
    supports: ClassVar[Sequence[str]] = ("bf16",)
    """What it goes with of what takes a flush elsewhere."""
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

    def with_waves(self, wave: int, staleness: int, *, eager: bool = False, buffered_of: int = 0) -> Policy:
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

    def refusal(self, plan: _Planned) -> str | None:
        """Return why a plan cannot be trained by it; None where it can."""
        for index, stage in enumerate(plan.stages):
            why = self._turns_refusal(plan) if stage.period > 1 else None
            if why is not None:
                return f"replicas of stage {index} take turns, {why}"
            if stage.shard != "none":
                return f"replicas of stage {index} divide {stage.shard}, of which no versions are kept"
        if plan.tied and not self.shares_parameters:
            name = plan.tied[0].parameter
            return f"{name} is shared between stages, whose rates differ; plan with `policy='stash'`"
        return None

    def _turns_refusal(self, plan: _Planned) -> str | None:
        """Return why replicas of its stages cannot take turns."""
        if not self.takes_turns:
            return "of which only stash has a rule; plan with `policy='stash'`"
        if plan.micro_batches > 1:
            return "which have whole mini-batches; plan with `micro_batches=1`"
        if plan.tied:
            return f"and {plan.tied[0].parameter} is shared between stages; plan with `policy='sync'`"
        return None

    def most_in_flight(self, stage: _PlannedStage, micro_batches: int) -> int | None:
        """Return the most micro-batches in flight on a replica; None: micro-batches of any number of mini-batches."""
        return None

    def stands_still(self, stage: _PlannedStage, before: _PlannedStage, micro_batches: int) -> bool:
        """Whether a stage waits for ever for the one before, which has fewer in flight."""
        return stage.period == before.period == 1 and stage.in_flight > before.in_flight

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
        behind, ahead = distances(self, depths, 0), own.turn + depths.depth * own.turns
        for first in range(0, span, own.turns):
            yield "B", own.stage, first + own.turn, behind.backward
            yield "U", own.stage, first, 0
            yield "F", own.stage, first + ahead, behind.forward

    def _one_mini_batch(self, stage: int, depths: StageDepths) -> Iterator[Computed]:
        """Yield a repetition in which all replicas have a part of every micro-batch."""
        depth, micro_batches = depths.depth, depths.micro_batches
        behind = [distances(self, depths, index) for index in range(micro_batches)]
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


class Sync(Policy):
    """Every step ends with a flush: all of its micro-batches see the weights that the step before has left."""

    name, unit, minimises = "sync", "step", "step"
    supports = tuple(TAKES_A_FLUSH)
    keeps_versions = sums_apart = False
    sums_gradients = True
    schedule = None
    movable = ()
    reduces_at_backward = False

    def title(self, named: str) -> str:
        """See :class:`Policy`."""
        return ""

    def delay(self, stage: StageDepths) -> float:
        """See :class:`Policy`."""
        return 0.0

    def refusal(self, plan: _Planned) -> str | None:
        """See :class:`Policy`."""
        return None

    def most_in_flight(self, stage: _PlannedStage, micro_batches: int) -> int | None:
        """See :class:`Policy`: of replicas that take turns, the first has the most micro-batches."""
        return -(-micro_batches // stage.period)

    def stands_still(self, stage: _PlannedStage, before: _PlannedStage, micro_batches: int) -> bool:
        """See :class:`Policy`."""
        return min(stage.in_flight, micro_batches) > min(before.in_flight, micro_batches)

    def span(self, periods: Sequence[int]) -> int:
        """See :class:`Policy`: a step has one mini-batch."""
        return 1

    def lead(self, periods: Sequence[int], depths: Sequence[StageDepths]) -> int:
        """See :class:`Policy`: a step's forwards are its own."""
        return 0

    def turn(self, samples: Samples, micro_batches: int) -> Turn:
        """See :class:`Policy`: replicas that take turns have some micro-batches of every mini-batch."""
        return Turn(samples.of(micro_batches), 0, 1)

    def between_drains(self, mini_batches: range) -> Iterator[range]:
        """See :class:`Policy`: each by itself."""
        return (range(each, each + 1) for each in mini_batches)

    def shift(self, micro_batches: int) -> int:
        """See :class:`Policy`: a step has nothing to do with others."""
        return 0

    def forward_version(self, stage: StageDepths, micro_batch: int) -> int:
        """See :class:`Policy`."""
        return micro_batch // stage.micro_batches

    def backward_version(self, stage: StageDepths, micro_batch: int) -> int:
        """See :class:`Policy`."""
        return micro_batch // stage.micro_batches

    def repetition(
        self, own: Share, depths: StageDepths, span: int, order: Iterable[tuple[str, int, int]]
    ) -> Iterator[Computed]:
        """See :class:`Policy`: the schedule's order, and the update."""
        for kind, stage, index in order:
            yield kind, stage, own.micro_batches[index], 0
        yield "U", own.stage, -1, 0


class OneVersion(Policy):
    """Backwards see what their forwards have seen."""

    def backward_version(self, stage: StageDepths, micro_batch: int) -> int:
        """See :class:`Policy`."""
        return self.forward_version(stage, micro_batch)


class Stash(OneVersion):
    """Weight stashing: a micro-batch sees the weights that were the newest when it came.

    Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, section 3.3. With K_s
    micro-batches in flight and T of them between updates, micro-batch m sees max(0, floor((m - K_s + 1) / T)) updates;
    a stage keeps 1 + ceil((K_s - 1) / T) versions. Stages see different versions.

    Where n replicas take whole mini-batches in turn (T = 1), there is an update for every n of them, by the mean of
    their gradients: mini-batch m sees max(0, floor(m / n) - K_s + 1) updates.
    """

    name = "stash"
    takes_turns = True


class VerticalSync(OneVersion):
    """Vertical sync: all stages see the version that the first stage sees of a micro-batch.

    Narayanan et al., as above: as weight stashing, with the first stage's K_0 in place of every stage's own depth,
    forth and back.
    """

    name = "vertical-sync"

    def forward_version(self, stage: StageDepths, micro_batch: int) -> int:
        """See :class:`Policy`."""
        return (micro_batch - stage.first_depth + 1) // stage.micro_batches


class TwoBuffers(OneVersion):
    """PipeDream-2BW: all micro-batches of a mini-batch see the weights before the newest update of all, on every stage.

    Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, section 3.1: W(t+1) = W(t) - rate x
    gradient(W(t-1)). Mini-batch t sees max(0, t - 1) updates, with one stage, too; a stage keeps two versions. That the
    weights which the first forward of a mini-batch is to see are there by then takes T >= K_0 - 1 micro-batches.

    The update of mini-batch t may come any time before the first forward of mini-batch t + 2, which is T - K_s + 1
    micro-batches behind its last backward. It comes as late: sums over replicas, and of norms and counts over all
    ranks, end meanwhile, and nobody waits for them. Gradients of two mini-batches are kept.
    """

    name = "2bw"
    supports = ("bf16", "clip_norm", "fp16")
    sums_gradients = True

    def forward_version(self, stage: StageDepths, micro_batch: int) -> int:
        """See :class:`Policy`."""
        return micro_batch // stage.micro_batches - 1

    def lag(self, stage: StageDepths) -> int:
        """See :class:`Policy`."""
        return min(stage.micro_batches - stage.depth, stage.micro_batches - 2 + sum_lag(stage)) + 1

    def least_micro_batches(self, first_depth: int) -> int:
        """See :class:`Policy`."""
        return max(1, first_depth - 1)


class Predict(Policy):
    """Prediction: forwards, and backwards if so asked, see weights as they are expected to be after the next updates.

    Guan et al., "XPipe: Efficient Pipeline Model Parallelism for Multi-GPU DNN Training", arXiv 1911.04610. Just before
    the first forward of a mini-batch, the newest weights w and the optimizer's state make what all its T forwards see:

        Adam, AdamW        w - d rate m / (sqrt(v) + eps), both moments without their bias; decay is left out
        SGD with momentum  w - d rate buffer

    How far ahead, d, is

        counted   forwards ceil((K_s - 1) / T), the updates from there to the mini-batch's own; backwards 0: the newest
        xpipe     forwards round((S + T - s/2 - 2) / T); backwards round((T + floor(s/2) - 1) / T)

    of stage s of S, from 0, halves rounded up. What backwards see is made behind each update: of the weights and the
    state that there are at the first backward of the next mini-batch, XPipe's bellwether, for all T of them. Only where
    the update is late (parameters that stages share) do those before it see what the update before has left.

    XPipe's constants are known here at third hand only. Under PA, of all stages of S = 2..8 and T = 1..8, they agree
    with what is counted for 34 % of forwards, and for 5 % of backwards (those with T = 1 and s = 0 or 1).
    """

    name = "predict"
    supports = ()
    prepares = "predict"

    def prepares_forwards(self, stage: StageDepths) -> bool:
        """See :class:`Policy`."""
        return updates_ahead(stage).forward > 0

    def prepares_backwards(self, stage: StageDepths) -> bool:
        """See :class:`Policy`."""
        return updates_ahead(stage).backward > 0

    def buffers(self, stage: StageDepths) -> int:
        """See :class:`Policy`."""
        return self.prepares_forwards(stage) + self.prepares_backwards(stage)


DECAY = 0.135
"""PipeMare's D: what is left of a difference after tau_s updates."""


class PipeMare(Policy):
    """PipeMare: forwards and backwards see the newest weights, and what that costs in learning is corrected.

    Yang et al., "PipeMare: Asynchronous Pipeline Parallel DNN Training", arXiv 1910.05124; at second hand. With tau_s
    the mean over a mini-batch of the updates from a forward to its own update:

        T1  the rate of mini-batch t is multiplied by max(1, tau_s) ^ -(1 - min(t / N, 1))
        T2  backwards see w - tau_s delta; after an update, delta <- g delta + (1 - g) (new - old) with
            g = 0.135 ^ (1 / tau_s)
        T3  the first N' steps are synchronous, and t counts from there
    """

    name = "pipemare"
    supports = ()
    prepares = "correct"
    # Each stage's rate is its own.
    shares_parameters = False

    def prepares_backwards(self, stage: StageDepths) -> bool:
        """See :class:`Policy`."""
        return delay(stage) > 0

    def buffers(self, stage: StageDepths) -> int:
        """See :class:`Policy`."""
        return 2 if delay(stage) else 0


def rate_factor(tau: float, step: int, anneal_steps: int) -> float:
    """Return what PipeMare multiplies the rate of a step by (T1)."""
    return float(max(1.0, tau) ** -(1 - min(step / anneal_steps, 1.0)))


WRITTEN_BUFFERS = "writes buffers, which pipelines do not tell each other; plan with `policy='sync'`"
"""Of a layer, why several pipelines do not train it."""


def most_buffered(staleness: int) -> int:
    """Return the most waves that another pipeline has pushed and an ``eager`` one has not taken."""
    return 2 * staleness + 2


class Waves(OneVersion):
    """Several pipelines that stash weights, each with its own optimizer, and push what they change wave by wave.

    Park et al., "HetPipe", USENIX ATC 2020, sections 4 and 5. A wave is W mini-batches of a pipeline, of which at most
    as many are in flight. With all counts from the last fill, waves from 0 and mini-batches from 1:

        push  behind the update of mini-batch (c + 1) W, what wave c has changed of the weights
        pull  before the forward of mini-batch (e + 2) W, what all others have changed in their waves up to e - D

    Changes are added to the weights, and not averaged. So mini-batch p sees its own pipeline's updates up to p - K_s,
    and of every other pipeline max(0, floor(p / W) - 1 - D) waves, which are at most (D + 1) W + W - 2 mini-batches
    behind it. When pipelines are drained, all take what is left of all waves, and hold the same weights.

    There is no server: the ranks that hold a layer add up each wave's changes of it, an equal part each, from the last
    push on; nobody waits there but who pulls. So a rank keeps the weights that all have, and of D + 1 waves at most
    what it has changed and the sum.

    An ``eager`` pull takes of every other pipeline all that has come, and waits for waves up to e - D alone; so the
    first is before the forward of mini-batch 2 W. Waves are sent whole, and added by pipeline and then by wave. A rank
    keeps its weights as they were at its last push, and of every other pipeline at most 2 D + 2 waves: when pull e
    comes, it has pushed waves up to e, another e + D + 2 waves at most, of which the pull before took e - D at least.
    """

    name = "wsp"
    supports = ()
    unit = "per mini-batch of each pipeline"
    has_pipelines = True

    def __init__(self, wave: int = 1, staleness: int = 0, *, eager: bool = False, buffered_of: int = 0) -> None:
        """Take W and D; of so many pipelines, ``eager`` waves are kept where weights are."""
        self._wave, self._staleness, self._eager, self._buffered_of = wave, staleness, eager, buffered_of
        self.early_pulls = staleness if eager else 0
        self.first_pull = (2 + staleness - self.early_pulls) * wave - 1

    def with_waves(self, wave: int, staleness: int, *, eager: bool = False, buffered_of: int = 0) -> Policy:
        """See :class:`Policy`."""
        return Waves(wave, staleness, eager=eager, buffered_of=buffered_of)

    def pulls_before(self, micro_batch: int) -> int:
        """See :class:`Policy`."""
        return max(0, (micro_batch + 1) // self._wave - 1 - self._staleness + self.early_pulls)

    def refusal(self, plan: _Planned) -> str | None:
        """See :class:`Policy`."""
        for index, stage in enumerate(plan.stages):
            if len(stage.devices) > 1:
                return f"stage {index} has {len(stage.devices)} devices; plan with one device a stage of every pipeline"
        if plan.tied:
            name = plan.tied[0].parameter
            return f"{name} is shared between stages; plan with stages of which one of every pipeline has all its uses"
        return None

    def span(self, periods: Sequence[int]) -> int:
        """See :class:`Policy`: a wave."""
        return self._wave

    def buffers(self, stage: StageDepths) -> int:
        """See :class:`Policy`: the weights that all have, and of every wave that is not taken yet two.

        If eager, the weights as they were, and every wave that is not taken yet.
        """
        if self._eager:
            return 1 + self._buffered_of * most_buffered(self._staleness)
        return 1 + 2 * (self._staleness + 1) - self.passing_buffers(stage)

    def passing_buffers(self, stage: StageDepths) -> int:
        """See :class:`Policy`: as many in flight as a wave has, and a pull stands right behind the push.

        If eager, the wave that is pushed or taken.
        """
        return 1 if self._eager else 2 if stage.depth == self._wave else 0

    def repetition(
        self, own: Share, depths: StageDepths, span: int, order: Iterable[tuple[str, int, int]]
    ) -> Iterator[Computed]:
        """See :class:`Policy`."""
        behind = distances(self, depths, 0)
        for index in range(span):
            yield "B", own.stage, index, behind.backward
            yield "U", own.stage, index if span > 1 else -1, 0
            if index == span - 1:
                yield "PS", own.stage, index, 0
            ahead = index + depths.depth
            if (ahead + 1) % span == 0:
                yield "PL", own.stage, ahead, 0
            yield "F", own.stage, ahead, behind.forward


POLICIES: dict[str, Policy] = {
    each.name: each for each in (Sync(), Stash(), VerticalSync(), TwoBuffers(), Predict(), PipeMare(), Waves())
}
"""By the name in a plan."""
