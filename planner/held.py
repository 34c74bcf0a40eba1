"""Held: what ranks hold over a predicted step, by cause.

In come a plan, what it was made of and its predicted timeline. Out comes, moment by moment, what the memory model
counts of a rank: the most of all moments is what the plan says of the largest replica. What passes between actions, and
messages that come and go, are not told apart; they count throughout with their most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from autopar.depths import Ahead
from autopar.formats.cluster import Cluster
from autopar.formats.plan import Plan
from autopar.formats.prediction import HELD_FOR, HeldBytes
from autopar.formats.profile import Profile
from autopar.formats.program import BACKWARD, BACKWARDS, FORWARD, INPUT_BACKWARD, UPDATE, WEIGHT_BACKWARD
from autopar.formats.timeline import Event, Timeline
from autopar.ownership import Share
from autopar.planner.assemble import price_plan
from autopar.planner.candidate import Candidate, plain
from autopar.planner.costs.activations import rows_bytes
from autopar.planner.costs.memory import MemoryModel, state_by_cause, waiting_bytes
from autopar.planner.costs.model import CostModel
from autopar.planner.costs.rank_memory import StageInFlight, bytes_at_work, messages_under_way, stage_in_flight
from autopar.planner.objectives.unflushed import PolicyMemory
from autopar.policies import Policy

_COMPUTED = (FORWARD, *BACKWARDS, UPDATE)


def held_bytes(
    plan: Plan, profile: Profile, cluster: Cluster, timeline: Timeline, ranks: Collection[int]
) -> dict[int, HeldBytes]:
    """Return what some ranks hold over a step, by cause.

    Args:
        plan: what is carried out.
        profile: what it was made of.
        cluster: likewise.
        timeline: what is predicted of it; see :func:`.assemble.simulate`.
        ranks: which ranks are asked for.

    Raises:
        UsageError: no program follows from the plan.
        FileError: the plan's layers are not the profile's.
    """
    costs, candidates = price_plan(plan, profile, cluster)
    events: dict[int, list[Event]] = {rank: [] for rank in ranks}
    for event in timeline:
        if event.rank in events and event.action.kind in _COMPUTED:
            events[event.rank].append(event)
    found = {}
    for rank, own in events.items():
        # Ranks and stages of a pipeline alone count from 0, and there a stage has a rank.
        pipeline = plan.pipeline_of(plan.ownership.ranks[rank].stage)
        start = plan.stages_by_pipeline[pipeline].start
        moved = [each._replace(action=each.action._replace(stage=each.action.stage - start)) for each in own]
        alone = plan.separate[pipeline]
        found[rank] = _held_by_rank(alone, plan.policy, costs, candidates[pipeline], rank - start, moved)
    return found


def _held_by_rank(
    plan: Plan, policy: Policy, costs: CostModel, candidate: Candidate, rank: int, events: list[Event]
) -> HeldBytes:
    share = plan.ownership.ranks[rank]
    if policy.minimises == "period":
        stages, versions_bytes = _with_versions(plan.ahead, policy, costs, candidate, share)
    else:
        memory, rows = _memory_at(costs, candidate, share)
        stages = {at: stage_in_flight(memory, candidate, at, rows, share.stages) for at in share.stages}
        versions_bytes = 0
    held = _RankMemory(stages, versions_bytes, at_once=costs.profile.updates_at_once, is_plain=plain(plan.schedule))
    for event in sorted(events, key=lambda each: each.start_s):
        held.perform(event)
    replica = candidate.stages[share.stage].teams[share.replica]
    return held.record(costs.limit_bytes(replica) if plan.predicted.limit_bytes else None)


def _with_versions(
    ahead: Ahead, policy: Policy, costs: CostModel, candidate: Candidate, share: Share
) -> tuple[dict[int, StageInFlight], int]:
    """Return what a rank of a pipeline that is never flushed keeps of its stage, and the bytes of older versions."""
    counted, (at,) = PolicyMemory(costs, policy, ahead), share.stages
    stage, (memory, rows) = candidate.stages[at], _memory_at(costs, candidate, share)
    terms, leads, versions_bytes, _ = list(counted.in_flight(candidate))[at]
    terms = terms._replace(rows=rows)
    cuts = [later.stop for later in candidate.stages[at + 1 :]]
    further = memory.further(stage.first, stage.stop, terms, cuts, leads)
    parts = memory.parts(stage.first, stage.stop, rows, terms.recompute, terms.sharded)
    halves = memory.halves(stage.first, stage.stop, rows, terms.recompute)
    return {at: StageInFlight(parts, terms, halves, further=further)}, versions_bytes


def _memory_at(costs: CostModel, candidate: Candidate, share: Share) -> tuple[MemoryModel, float]:
    """Return the memory model of a rank's form, and the rows that it takes of a micro-batch."""
    stage = candidate.stages[share.stages[0]]
    return costs.memory[costs.form_of(stage, share.replica)], stage.shares[share.replica]


class _RankMemory:
    """What a rank holds, event by event."""

    def __init__(
        self, stages: Mapping[int, StageInFlight], versions_bytes: int, *, at_once: bool, is_plain: bool
    ) -> None:
        """Begin before the first event; ``at_once`` is whether the optimizer updates all stages together."""
        every = stages.values()
        self._stages, self._at_once, self._is_plain = stages, at_once, is_plain
        states = {at: state_by_cause(each.parts, each.terms) for at, each in stages.items()}
        self._gradients = {at: int(state.gradients) for at, state in states.items()}
        self._updates = {at: int(state.update) for at, state in states.items()}
        self._kept, self._pending, self._made = Counter[int](), Counter[int](), set[int]()
        self._lasting = {at for at, each in stages.items() if each.terms.has_buckets}
        """Stages whose gradients are held throughout."""
        self._throughout = {
            "parameters and buffers": sum(int(state.parameters) for state in states.values()),
            "optimizer state": sum(int(state.optimizer) for state in states.values()),
            "weight versions": versions_bytes,
            "inputs": sum(
                each.terms.micro_batches * int(rows_bytes(each.terms.rows, each.parts.inputs)) for each in every
            ),
        }
        self._messages = {at: messages_under_way(list(every), chunk) for chunk, at in enumerate(stages)}
        self._unanswered = sum(
            int(waiting_bytes(each.parts.unanswered_sends, each.terms)) for each in every if each.receives_gradients
        )
        self._moments: list[tuple[float, dict[str, int]]] = []
        self._note(0.0)

    def perform(self, event: Event) -> None:
        """Note what is held while an event lasts, and behind it."""
        kind, at, start_s = event.action.kind, event.action.stage, event.start_s
        if kind == UPDATE:
            update = sum(self._updates.values()) if self._at_once else self._updates[at]
            self._note(start_s, update=update, messages=0)
            self._made.discard(at)
        else:
            makes = kind in (BACKWARD, WEIGHT_BACKWARD)
            self._kept[at] -= kind in (BACKWARD, INPUT_BACKWARD)
            self._pending[at] -= kind == WEIGHT_BACKWARD
            first = makes and at not in self._made | self._lasting
            work = bytes_at_work(self._stages[at], kind, first=first)
            self._note(start_s, computing=work, messages=self._messages[at])
            self._made |= {at} if makes else set()
            self._kept[at] += kind == FORWARD
            self._pending[at] += kind == INPUT_BACKWARD
        self._note(event.end_s)

    def _note(self, at_s: float, **passing: int) -> None:
        """Add a moment, with what is held from then on beside what lasts."""
        activations = gradients = sent = 0
        for at, (parts, terms, halves, *_) in self._stages.items():
            activations += self._kept[at] * int(parts.activations) + self._pending[at] * halves.pending
            made = at in self._made
            gradients += self._gradients[at] if made or at in self._lasting else int(parts.lasting)
            gradients += self._stages[at].scattered if made and len(self._stages) > 1 else 0
            if self._is_plain and made and terms.warmup == terms.micro_batches and not terms.has_buckets:
                sent += int(rows_bytes(terms.rows, parts.sent_gradients))
        messages = passing.pop("messages", min(self._messages.values())) + sent * ("update" not in passing)
        messages += self._unanswered
        held = self._throughout | {"activations": activations, "gradients": gradients, "messages": messages}
        self._moments.append((at_s, held | passing))

    def record(self, limit_bytes: int | None) -> HeldBytes:
        """Return all moments."""
        columns = {cause: tuple(held.get(cause, 0) for _, held in self._moments) for cause in HELD_FOR}
        return HeldBytes(
            tuple(at_s for at_s, _ in self._moments),
            {cause: sizes for cause, sizes in columns.items() if any(sizes)},
            limit_bytes,
        )
