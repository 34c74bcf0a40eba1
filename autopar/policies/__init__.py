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
from typing import ClassVar

from autopar.depths import StageDepths, delay, sum_lag, updates_ahead
from autopar.flushes import TAKES_A_FLUSH
from autopar.ownership import Replicas, Samples, Share, Turn
from autopar.policies.policy import Computed, Policy

__all__ = ["DECAY", "POLICIES", "WRITTEN_BUFFERS", "Policy", "most_buffered", "names_text", "rate_factor"]


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

    def refusal(self, stages: Sequence[Replicas], micro_batches: int, parameter: str | None) -> str | None:
        """See :class:`Policy`."""
        return None

    def most_in_flight(self, stage: Replicas, micro_batches: int) -> int | None:
        """See :class:`Policy`."""
        return stage.most(micro_batches)

    def stands_still(self, in_flight: tuple[int, int], periods: tuple[int, int], micro_batches: int) -> bool:
        """See :class:`Policy`."""
        return in_flight[0] < min(in_flight[1], micro_batches)

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

    name, system = "stash", "PipeDream"
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

    name, system = "2bw", "PipeDream-2BW"
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

    name, system = "predict", "XPipe"
    supports = ()
    settings: ClassVar = {"ahead": "only predict sees weights ahead of the newest"}
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
    settings: ClassVar = {
        "anneal_steps": "pipemare reduces rates for a number of mini-batches, and no other policy does",
        "synchronous_steps": "only pipemare begins with synchronous steps",
    }
    asks: ClassVar = {
        "anneal_steps": "`policy='pipemare'` reduces rates at first; say for how many mini-batches: `anneal_steps`"
    }
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

    name, system = "wsp", "HetPipe"
    supports = ()
    settings = dict.fromkeys(
        ("wave", "staleness"), "wsp has waves and a bound on their staleness, and no other policy does"
    ) | {"eager": "wsp has pulls, and no other policy does"}
    unit = "per mini-batch of each pipeline"
    has_pipelines = True

    def __init__(self, wave: int = 1, staleness: int = 0, *, eager: bool = False, buffered_of: int = 0) -> None:
        """Take W and D; of so many pipelines, ``eager`` waves are kept where weights are."""
        self._wave, self._staleness, self._eager, self._buffered_of = wave, staleness, eager, buffered_of
        self.early_pulls = staleness if eager else 0
        self.first_pull = (2 + staleness - self.early_pulls) * wave - 1

    def with_waves(self, wave: int | None, staleness: int | None, *, eager: bool, buffered_of: int) -> Policy:
        """See :class:`Policy`."""
        return Waves(wave or 1, staleness or 0, eager=eager, buffered_of=buffered_of)

    def pulls_before(self, micro_batch: int) -> int:
        """See :class:`Policy`."""
        return max(0, (micro_batch + 1) // self._wave - 1 - self._staleness + self.early_pulls)

    def refusal(self, stages: Sequence[Replicas], micro_batches: int, parameter: str | None) -> str | None:
        """See :class:`Policy`."""
        for index, stage in enumerate(stages):
            if stage.devices > 1:
                return f"stage {index} has {stage.devices} devices; plan with one device a stage of every pipeline"
        if parameter is not None:
            return (
                f"{parameter} is shared between stages; plan with stages of which one of every pipeline has all its "
                "uses"
            )
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
        behind = self.distances(depths, 0)
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


def names_text(*, pipelines: bool) -> str:
    """Return those without flushes in words, of one pipeline or of several, with the systems that they are of."""
    every = (each for each in POLICIES.values() if each.minimises == "period" and each.has_pipelines == pipelines)
    return ", ".join(f"{each.name} ({each.system})" if each.system else each.name for each in every)
