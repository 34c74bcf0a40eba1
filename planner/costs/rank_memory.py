"""Rank memory: what a rank holds of its stages together, moment by moment of its order.

Of ranks whose stages run one after the other, and of backwards in two halves, no closed form says what is in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from autopar.formats.program import BACKWARD, FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD
from autopar.planner.candidate import Candidate, CandidateStage, groups, splits_backward
from autopar.planner.costs.activations import rows_bytes
from autopar.planner.costs.memory import Halves, MemoryModel, Parts, PeakTerms, messages_of, state_of, waiting_bytes
from autopar.schedules import SCHEDULES
from autopar.schedules.order import RankPlace


class Backwards(NamedTuple):
    """How a stage's backwards of a step are computed."""

    whole: int
    """How many are whole."""
    split: int
    """How many are in halves."""
    ends_whole: bool
    """Whether the last one's gradients are those of a whole one."""


class RankMoment(NamedTuple):
    """While a rank computes."""

    chunk: int
    """Which of its stages it computes."""
    kind: str
    beside: tuple[int, ...]
    """By stage, the micro-batches that are kept, but for the one that is computed."""
    pending: tuple[int, ...]
    """By stage, those that wait for the weight half of their backward."""
    has_gradients: tuple[bool, ...]
    """By stage, whether gradients are there."""
    makes: bool
    """Whether this backward makes its stage's gradients."""


@lru_cache(maxsize=4096)
def moments(schedule: str, place: RankPlace) -> tuple[RankMoment, ...]:
    """Return all moments of a rank's order that differ.

    A micro-batch is kept from its forward to the end of its backward; or to that of the input half, and then waits for
    the weight half.

    >>> place = RankPlace(0, 2, (0,), 2, (2,))
    >>> [(each.beside, each.has_gradients, each.makes) for each in moments("1f1b", place)]
    [((0,), (False,), False), ((1,), (False,), False), ((1,), (False,), True), ((0,), (True,), False)]
    """
    index = {stage: at for at, stage in enumerate(place.stages)}
    kept, pending, made = [0] * len(index), [0] * len(index), [False] * len(index)
    found: dict[RankMoment, None] = {}
    for kind, stage, _ in SCHEDULES[schedule].order(place):
        at = index[stage]
        makes = kind in (BACKWARD, WEIGHT_BACKWARD)
        kept[at] -= kind in (BACKWARD, INPUT_BACKWARD)
        pending[at] -= kind == WEIGHT_BACKWARD
        found[RankMoment(at, kind, tuple(kept), tuple(pending), tuple(made), makes and not made[at])] = None
        made[at] = made[at] or makes
        kept[at] += kind == FORWARD
        pending[at] += kind == INPUT_BACKWARD
    return tuple(found)


def backwards(candidate: Candidate) -> list[Backwards]:
    """Return how the backwards of every stage are computed."""
    found: dict[int, Backwards] = {}
    for place in _places(candidate):
        found |= _backwards(candidate.schedule, place)
    return [found[stage] for stage in range(len(candidate.stages))]


@lru_cache(maxsize=4096)
def _backwards(schedule: str, place: RankPlace) -> dict[int, Backwards]:
    if not splits_backward(schedule):
        return dict.fromkeys(place.stages, Backwards(place.micro_batches, 0, True))
    found = dict.fromkeys(place.stages, Backwards(0, 0, True))
    for kind, stage, _ in SCHEDULES[schedule].order(place):
        whole, split, _ = found[stage]
        if kind in (BACKWARD, WEIGHT_BACKWARD):
            found[stage] = Backwards(whole + (kind == BACKWARD), split + (kind != BACKWARD), kind == BACKWARD)
    return found


def rank_peaks(
    memory: Sequence[MemoryModel], forms_of: Callable[[CandidateStage], Sequence[int]], candidate: Candidate
) -> list[int]:
    """Return the peak memory of every stage's largest replica: of all stages of a rank, the same.

    ``memory`` is by form, which ``forms_of`` returns of a stage's replicas.
    """
    found = [0] * len(candidate.stages)
    for place in _places(candidate):
        chunks, first = place.stages, candidate.stages[place.stages[0]]
        order = moments(candidate.schedule, place)
        for rows, form in set(zip(first.shares, forms_of(first), strict=True)):
            priced = [stage_in_flight(memory[form], candidate, at, rows, chunks) for at in chunks]
            peak = rank_peak(order, priced, updates_at_once=memory[form].updates_at_once)
            for at in chunks:
                found[at] = max(found[at], peak)
    return found


def _places(candidate: Candidate) -> Iterator[RankPlace]:
    """Yield where the first rank of every group of devices stands in a candidate's pipeline."""
    every = groups(candidate.stages)
    for group, chunks in enumerate(every):
        own = [candidate.stages[at] for at in chunks]
        turns = own[0].replicas.most(candidate.micro_batches)
        yield RankPlace(group, len(every), chunks, turns, tuple(min(stage.warmup, turns) for stage in own))


class StageInFlight(NamedTuple):
    """What a rank keeps of one of its stages."""

    parts: Parts
    terms: PeakTerms
    halves: Halves
    """What a micro-batch holds in the halves of its backward, and between them."""
    scattered: int = 0
    """Bytes of gradients that wait for the stage's next backward, once its replicas have reduced some."""
    further: int = 0
    """Bytes of messages that depend on where later stages end."""
    receives_activations: bool = True
    """Whether what it receives comes from another rank."""
    receives_gradients: bool = True
    """Whether the gradients that come back do."""


def peak_terms_of(stage: CandidateStage, micro_batches: int, lead: int, rows: float) -> PeakTerms:
    """Return what the memory of a stage's replica depends on; of later turns, none takes part in more."""
    replicas, recompute = stage.replicas, frozenset(stage.recompute)
    return PeakTerms(
        rows,
        stage.warmup,
        replicas.most(micro_batches),
        replicas.width,
        lead,
        recompute,
        replicas.shard,
        lanes=replicas.lanes,
    )


def stage_in_flight(
    memory: MemoryModel, candidate: Candidate, at: int, rows: float, chunks: Sequence[int]
) -> StageInFlight:
    stages, stage, count = candidate.stages, candidate.stages[at], candidate.micro_batches
    # What stays on the rank is not sent.
    every = enumerate(stage.leads(stages[:at], count))
    leads = [lead._replace(turns=0) if other in chunks else lead for other, lead in every]
    terms = peak_terms_of(stage, count, leads[-1].turns if leads else 0, rows)
    further = memory.further(stage.first, stage.stop, terms, [later.stop for later in stages[at + 1 :]], leads)
    parts = memory.parts(stage.first, stage.stop, rows, terms.recompute, terms.sharded)
    halves = memory.halves(stage.first, stage.stop, rows, terms.recompute, terms.sharded)
    scattered = memory.scattered_bytes(stage.first, terms.sharded)
    return StageInFlight(parts, terms, halves, scattered, further, at - 1 not in chunks, at + 1 not in chunks)


def rank_peak(every: Sequence[RankMoment], stages: Sequence[StageInFlight], *, updates_at_once: bool) -> int:
    """Return the most bytes that a rank holds of its stages together."""
    states = [tuple(map(int, state_of(each.parts, each.terms))) for each in stages]
    kept = sum(state for state, _, _ in states)
    kept += sum(each.terms.micro_batches * int(rows_bytes(each.terms.rows, each.parts.inputs)) for each in stages)
    messages = [messages_under_way(stages, at) for at in range(len(stages))]
    kept += sum(
        int(waiting_bytes(each.parts.unanswered_sends, each.terms)) for each in stages if each.receives_gradients
    )
    lasting = [each.terms.has_buckets for each in stages]
    most = 0
    for moment in every:
        size = bytes_at_work(stages[moment.chunk], moment.kind, first=moment.makes and not lasting[moment.chunk])
        size += messages[moment.chunk]
        for at, each in enumerate(stages):
            size += moment.beside[at] * int(each.parts.activations) + moment.pending[at] * each.halves.pending
            size += states[at][1] if moment.has_gradients[at] or lasting[at] else int(each.parts.lasting)
            size += each.scattered if moment.has_gradients[at] and at != moment.chunk else 0
        most = max(most, size)
    update = (sum if updates_at_once else max)(update for _, _, update in states)
    return kept + max(most, sum(gradients for _, gradients, _ in states) + update)


def messages_under_way(stages: Sequence[StageInFlight], chunk: int) -> int:
    """Return the bytes of messages under way on a rank, while it computes one of its stages.

    Receives are posted two computations ahead, whichever of several stages they are of; beside them there are the
    gradients of the computation that runs, and what was sent back and may not have arrived.
    """
    further = sum(each.further for each in stages)
    alone = sum(int(messages_of(each.parts, each.terms)) for each in stages)
    if len(stages) == 1:
        return alone + further
    rows = stages[0].terms.rows
    posted = [each.parts.received_activations for each in stages if each.receives_activations]
    posted += [each.parts.received_gradients for each in stages if each.receives_gradients]
    at_work = stages[chunk].parts.received_gradients
    sent = sum(
        each.terms.answers(each.terms.lead) * each.parts.sent_gradients for each in stages if each.receives_activations
    )
    if (lanes := stages[0].terms.lanes) > 1:
        under_way = int(rows_bytes(rows / lanes, 2 * max(posted, default=0))) + int(rows_bytes(rows, at_work + sent))
        return min(alone, under_way) + further
    return min(alone, int(rows_bytes(rows, 2 * max(posted, default=0) + at_work + sent))) + further


def bytes_at_work(stage: StageInFlight, kind: str, *, first: bool) -> int:
    """Return the bytes of the micro-batch that is computed; ``first``: with the gradients that it makes."""
    if kind == INPUT_BACKWARD:
        return stage.halves.input
    if kind == WEIGHT_BACKWARD:
        return stage.halves.first_weight if first else stage.halves.weight
    return int(stage.parts.first_peak if first else stage.parts.peak)
