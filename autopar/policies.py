"""Weight policies: which weights the forwards and backwards of a pipeline that is never flushed see.

Version v of a stage's weights has v updates. Micro-batches m count through all mini-batches t, T of them each. K_s of
them are in flight on stage s, counted from 0. On stage s, forward and backward of m see the version

    stash           max(0, floor((m - K_s + 1) / T)): the newest when the forward comes
    vertical-sync   max(0, floor((m - K_0 + 1) / T)): the one that the first stage sees of m, on all stages
    2bw             max(0, t - 1): the one before the newest update of all
    predict         forward: predicted from the newest; backward: the newest, or predicted, too
    pipemare        forward: the newest; backward: the newest, corrected

and under ``sync``, with a flush at the end of every step, all see those of the step.

In: how deep a stage is, and a micro-batch. Out: the version of the weights that its forward and its backward see. Read
:class:`Policy` first; :func:`distances` is what programs are made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal, NamedTuple


class UpdatesAhead(NamedTuple):
    """How many updates ahead weights are predicted; 0: the newest are seen."""

    forward: int
    backward: int


class StageDepths(NamedTuple):
    """How deep a stage of a pipeline that is never flushed is."""

    depth: int
    """Its micro-batches in flight, K_s."""
    first_depth: int
    """The first stage's, K_0."""
    micro_batches: int
    """Of a mini-batch, T: there is an update for every T of them."""
    lag: int = 0
    """Micro-batches whose backwards come between a mini-batch's last one and its update."""
    ahead: UpdatesAhead | None = None
    """Of ``predict``: how far predictions are ahead; None: as far as is counted."""

    @property
    def gradients(self) -> int:
        """Of how many mini-batches gradients are kept at a time."""
        return 1 - (-self.lag // self.micro_batches)

    def newest_at_forward(self, micro_batch: int) -> int:
        """Return how many updates there have been when the forward of a micro-batch comes; below 0 stands for 0.

        It comes behind the backward of ``depth`` micro-batches before.
        """
        return (micro_batch - self.depth - self.lag + 1) // self.micro_batches

    def newest_at_backward(self, micro_batch: int) -> int:
        """Return how many there have been when its backward comes: without a lag, those of the mini-batches before."""
        return (micro_batch - self.lag) // self.micro_batches


class Policy:
    """A weight policy; by itself, all see the newest weights, and nothing more is kept.

    Micro-batches are counted through all mini-batches from the last drain on, and versions by their updates.
    """

    prepares: ClassVar[Literal["", "predict", "correct"]] = ""
    """What it makes of the newest weights, for forwards, backwards or both to see; or nothing."""
    sums_gradients: ClassVar[bool] = False
    """Whether updates come so late that all ranks can add up what they know of a mini-batch's gradients before."""
    shares_parameters: ClassVar[bool] = True
    """Whether stages that share a parameter update it alike."""
    takes_turns: ClassVar[bool] = False
    """Whether replicas may take whole mini-batches in turn; each then counts its own micro-batches."""

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

    takes_turns = True


class VerticalSync(OneVersion):
    """Vertical sync: all stages see the version that the first stage sees of a micro-batch.

    Narayanan et al., as above: as weight stashing, with the first stage's K_0 in place of every stage's own depth,
    forth and back.
    """

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


def sum_lag(stage: StageDepths) -> int:
    """Return how many micro-batches behind its last backward a stage begins the sum over all ranks.

    That is when the first stage, whose last backward is the last of all, does: a micro-batch before its own update.
    Between stages, backwards of a micro-batch are half as many others apart as the stages' depths.

    >>> [sum_lag(StageDepths(depth, 4, 4)) for depth in (4, 3, 2, 1)]
    [0, 0, 1, 1]
    """
    own = max(0, stage.first_depth - stage.depth)
    return max(0, stage.micro_batches - stage.first_depth) + own // 2


Ahead = Literal["counted", "xpipe"]
"""Where the d of :class:`Predict` is from."""


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


def updates_ahead(stage: StageDepths) -> UpdatesAhead:
    """Return the d of :class:`Predict`: the stage's own, or what is counted."""
    return stage.ahead or UpdatesAhead(-(-(stage.depth + stage.lag - 1) // stage.micro_batches), 0)


def xpipe_constants(stage: int, stages: int, micro_batches: int) -> UpdatesAhead:
    """Return XPipe's d of a stage.

    >>> [xpipe_constants(stage, 4, 4) for stage in range(2)]
    [UpdatesAhead(forward=2, backward=1), UpdatesAhead(forward=1, backward=1)]
    """
    twice = 2 * micro_batches
    forward = 2 * (stages + micro_batches - 2) - stage
    backward = 2 * (micro_batches + stage // 2 - 1)
    return UpdatesAhead((forward + micro_batches) // twice, (backward + micro_batches) // twice)


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

    prepares = "correct"
    # Each stage's rate is its own.
    shares_parameters = False

    def prepares_backwards(self, stage: StageDepths) -> bool:
        """See :class:`Policy`."""
        return delay(stage) > 0

    def buffers(self, stage: StageDepths) -> int:
        """See :class:`Policy`."""
        return 2 if delay(stage) else 0


def delay(stage: StageDepths) -> float:
    """Return PipeMare's tau_s.

    >>> [delay(StageDepths(depth, 5, 4)) for depth in (5, 3, 1)]
    [1.0, 0.5, 0.0]
    """
    every = range(stage.micro_batches)
    return sum(-stage.newest_at_forward(each) for each in every) / len(every)


def rate_factor(tau: float, step: int, anneal_steps: int) -> float:
    """Return what PipeMare multiplies the rate of a step by (T1)."""
    return float(max(1.0, tau) ** -(1 - min(step / anneal_steps, 1.0)))


POLICIES: dict[str, Policy] = {
    "stash": Stash(),
    "vertical-sync": VerticalSync(),
    "2bw": TwoBuffers(),
    "predict": Predict(),
    "pipemare": PipeMare(),
}
"""By the name in a plan."""


def stage_depths(
    policy: Policy,
    depths: Sequence[int],
    micro_batches: int,
    shared_by: Iterable[Sequence[int]] = (),
    ahead: Ahead = "counted",
) -> list[StageDepths]:
    """Return how deep every stage is, and how late its updates come.

    Stages that share a parameter add up its gradients, which are there when the first of them has its own. Until then,
    the others do not wait: they go on for as many micro-batches as backwards are apart.

    Args:
        policy: of the pipeline.
        depths: micro-batches in flight of every stage.
        micro_batches: of a mini-batch.
        shared_by: of every parameter that stages share, these stages.
        ahead: how far ``predict`` predicts.

    >>> [each.lag for each in stage_depths(POLICIES["stash"], [4, 3, 2, 1], 1, [[0, 3]])]
    [0, 0, 0, 2]
    """
    found = [StageDepths(depth, depths[0], micro_batches) for depth in depths]
    if ahead == "xpipe":
        count = len(depths)
        found = [each._replace(ahead=xpipe_constants(at, count, micro_batches)) for at, each in enumerate(found)]
    lags = [policy.lag(each) for each in found]
    # Where updates are late anyway, the sums have ended by then.
    for first, *others in shared_by if not policy.sums_gradients else ():
        for stage in others:
            lags[stage] = max(lags[stage], -(-(depths[first] - depths[stage]) // 2))
    return [each._replace(lag=lag) for each, lag in zip(found, lags, strict=True)]


class Distances(NamedTuple):
    """How many updates behind the newest weights a micro-batch's forward and backward are, in a full pipeline."""

    forward: int
    backward: int


def distances(policy: Policy, stage: StageDepths, index: int) -> Distances:
    """Return the distances of the ``index``-th micro-batch of every mini-batch.

    While the pipeline fills, fewer updates have been made than that says: versions are then counted back from
    those that there are, and none is below 0.

    >>> stage = StageDepths(depth=3, first_depth=4, micro_batches=2)
    >>> [distances(POLICIES["stash"], stage, index) for index in range(2)]
    [Distances(forward=0, backward=1), Distances(forward=0, backward=1)]
    >>> [distances(POLICIES["vertical-sync"], stage, index) for index in range(2)]
    [Distances(forward=1, backward=2), Distances(forward=0, backward=1)]
    """
    newest, later = stage.newest_at_forward(index), stage.newest_at_backward(index)
    return Distances(newest - policy.forward_version(stage, index), later - policy.backward_version(stage, index))


def kept_versions(policy: Policy, stage: StageDepths) -> int:
    """Return how many versions of its weights a stage keeps, the newest among them."""
    every = [distances(policy, stage, index) for index in range(stage.micro_batches)]
    return 1 + max(max(each) for each in every)
