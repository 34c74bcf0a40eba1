"""Asks: draws what is asked of a plan, and edits plans as a user may edit their files."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import get_args

from autopar.depths import Ahead
from autopar.formats.plan import Plan, ReplicatedState, WeightPolicy
from autopar.formats.profile import Profile
from autopar.formats.stage import Stage, chunks_of, group_of, layout_of
from autopar.hardware.kinds import estimated_cluster
from autopar.ownership import Shard
from autopar.planner import PlanOptions
from autopar.planner import plan as search
from autopar.policies import POLICIES
from autopar.runtime.settings import check_scope
from autopar.schedules import SCHEDULES

__all__ = ["Ask", "draw_ask", "edited", "in_teams", "planned", "unflushed"]

MOST_RANKS, MOST_ROWS, MOST_MICRO_BATCHES = 6, 6, 5
MOST_RANKS_IN_TEAMS = 8
SHARDED = 0.22
"""Of the plans with replicas."""


@dataclass(frozen=True)
class Ask:
    """What is asked of a plan."""

    schedule: str
    chunks: int
    """Stages of every group of devices."""
    widths: tuple[int, ...]
    """Replicas of every group."""
    cuts: tuple[int, ...]
    """Layers before which stages end."""
    rows: int
    micro_batches: int
    recompute: str
    shard: Shard
    seed: int
    edits: int
    """Seeds what is changed of the plan's shares, divisions, depths and recomputed layers; 0: nothing."""
    replicate_state: ReplicatedState | None
    """What replicas are told to make of the buffers that their forwards write."""
    policy: WeightPolicy = "sync"
    depths: tuple[int, ...] = ()
    """Of the stages of a pipeline that is never flushed."""
    team_sizes: tuple[int, ...] = ()
    """Ranks that run a replica, of every group; none: one."""
    in_slices: bool = False
    """Whether teams keep slices of the sequence."""

    @property
    def ranks(self) -> int:
        """Devices of all stages."""
        return sum(width * size for width, size in zip(self.widths, self._sizes, strict=True))

    @property
    def stages(self) -> str:
        """As ``autopar plan --stages`` takes them."""
        edges, layout = [0, *self.cuts], layout_of(self.schedule)
        groups = [group_of(layout, stage, len(self.widths)) for stage in range(len(self.cuts))]
        widths = [f"{self.widths[group]}x{self._sizes[group]}" for group in groups]
        return ",".join(f"{a}-{b - 1}:{width}" for (a, b), width in zip(pairwise(edges), widths, strict=True))

    @property
    def _sizes(self) -> tuple[int, ...]:
        return self.team_sizes or (1,) * len(self.widths)

    def __str__(self) -> str:
        flags = f"--schedule {self.schedule} --stages {self.stages} --micro-batches {self.micro_batches}"
        flags += f" --batch {self.rows * self.micro_batches} --recompute {self.recompute} --shard {self.shard}"
        flags += f" --replicate-state {self.replicate_state}" if self.replicate_state else ""
        flags += " --sequence-parallel" if self.in_slices else ""
        flags += f" --policy {self.policy} in flight {self.depths}" if self.depths else ""
        return f"{flags} --seed {self.seed}" + (f" edited {self.edits}" if self.edits else "")


def draw_ask(chance: random.Random, layers: int, least_rows: int, *, replicas: bool, writes: bool) -> Ask:
    """Draw a plan of one to six ranks for a model of so many layers, whose forwards may write."""
    schedule = chance.choice(sorted(SCHEDULES))
    chunks = chunks_of(layout_of(schedule))
    if layers < (chunks or 2):
        schedule, chunks = "1f1b", 1
    chunks = chunks or chance.randint(2, min(3, layers))
    groups = chance.randint(1, min(4, layers // chunks))
    widths = _widths(chance, groups) if replicas else [1] * groups
    rows = chance.randint(max(widths) * least_rows, max(MOST_ROWS, max(widths) * least_rows))
    return Ask(
        schedule=schedule,
        chunks=chunks,
        widths=tuple(widths),
        cuts=(*sorted(chance.sample(range(1, layers), groups * chunks - 1)), layers),
        rows=rows,
        micro_batches=chance.randint(1, MOST_MICRO_BATCHES),
        recompute=chance.choice(("none", "full", "full", "auto")),
        shard=chance.choice(("optimizer", "gradients", "parameters")) if _shards(chance, widths) else "none",
        seed=chance.choice((0, 0, 3)),
        edits=chance.randrange(1, 1000) if chance.random() < 0.5 else 0,
        replicate_state=chance.choice((None, "first", "average")) if writes and replicas else None,
    )


def _widths(chance: random.Random, groups: int) -> list[int]:
    widths = list[int]()
    for group in range(groups):
        left = MOST_RANKS - sum(widths) - (groups - group - 1)
        widths.append(min(left, chance.choice((1, 1, 2, 3))))
    return widths


def _shards(chance: random.Random, widths: Sequence[int]) -> bool:
    return max(widths) > 1 and chance.random() < SHARDED


def unflushed(chance: random.Random, ask: Ask) -> Ask:
    """Return what is asked of a plan that is never flushed in place of one that is."""
    policy = chance.choice([name for name in POLICIES if name != "sync"])
    widths = ask.widths
    cuts = (*ask.cuts[: len(widths) - 1], ask.cuts[-1])
    depths = [chance.randint(1, 2)]
    for _ in widths[1:]:
        depths.insert(0, depths[0] + chance.randint(0, 2))
    least = POLICIES[policy].least_micro_batches(depths[0])
    return replace(
        ask,
        schedule="1f1b",
        chunks=1,
        cuts=cuts,
        micro_batches=max(ask.micro_batches, least),
        recompute="none" if POLICIES[policy].prepares else ask.recompute,
        shard="none",
        edits=0,
        replicate_state=None,
        policy=policy,
        depths=tuple(depths),
    )


def in_teams(chance: random.Random, ask: Ask, profile: Profile) -> Ask:
    """Return what is asked of a plan some of whose replicas several ranks run, as its stages' layers split."""
    edges, groups = [0, *ask.cuts], len(ask.widths)
    counts = [{1, 2, 4} for _ in ask.widths]
    for stage, (first, stop) in enumerate(pairwise(edges)):
        own = {split.count for layer in profile.layers[first:stop] for split in layer.splits}
        counts[group_of(layout_of(ask.schedule), stage, groups)] &= own | {1}
    sizes, left = list[int](), MOST_RANKS_IN_TEAMS - sum(ask.widths)
    for width, possible in zip(ask.widths, counts, strict=True):
        sizes.append(max(chance.choice(sorted(possible)) for _ in range(2)))
        if (sizes[-1] - 1) * width > left:
            sizes[-1] = 1
        left -= (sizes[-1] - 1) * width
    return replace(ask, team_sizes=tuple(sizes), in_slices=max(sizes) > 1 and chance.random() < 0.5)


def planned(ask: Ask, profile: Profile) -> Plan:
    """Have the planner make the plan.

    Raises:
        AutoparError: it refuses.
    """
    options = PlanOptions(
        batch=ask.rows * ask.micro_batches,
        micro_batches=ask.micro_batches,
        schedule=ask.schedule,
        chunks=ask.chunks if layout_of(ask.schedule) == "loop" else None,
        stages=ask.stages,
        recompute=ask.recompute,  # type: ignore[arg-type]
        shard=ask.shard,
        seed=ask.seed,
        replicate_state=ask.replicate_state,
        sequence_parallel=ask.in_slices,
        max_candidates=1,
    )
    return search(profile, estimated_cluster(profile, ask.ranks), options)


def edited(plan: Plan, ask: Ask, least_rows: int) -> Plan:
    """Return a plan with other shares, divisions, depths and recomputed layers, as its file might have been edited."""
    if ask.depths:
        chance, stages = random.Random(str(ask)), []
        for stage, depth in zip(plan.stages, ask.depths, strict=True):
            shares = _divided(chance, plan.micro_batch_size, stage.replicas, least_rows)
            stages.append(stage.model_dump() | {"warmup": depth, "division": "split", "shares": shares})
        more = {
            "pipemare": {"anneal_steps": 3, "synchronous_steps": 1},
            "predict": {"ahead": chance.choice(get_args(Ahead))},
        }.get(ask.policy, {})
        content = plan.model_dump() | {"stages": tuple(stages), "weight_policy": ask.policy, **more}
        changed = Plan.model_validate(content | {"schedule": "1f1b"})
        check_scope(changed)
        return changed
    if not ask.edits:
        return plan
    chance = random.Random(ask.edits)
    turning, depths = _depths(chance, plan, least_rows)
    shares: dict[tuple[int, ...], tuple[int, ...]] = {}
    stages = []
    for index, stage in enumerate(plan.stages):
        division = stage.division if turning is None else "round-robin" if index in turning else "split"
        if stage.devices not in shares:
            shares[stage.devices] = _divided(chance, plan.micro_batch_size, stage.replicas, least_rows)
        split = division == "split"
        again = chance.random() < 0.5
        changes = {
            "division": division,
            "shares": shares[stage.devices] if split else (plan.micro_batch_size,) * stage.replicas,
            "warmup": stage.warmup if depths is None else depths[index],
            "recompute": tuple(x for x in stage.layers if chance.random() < 0.5) if again else stage.recompute,
            "shard": _shard(stage, plan, split=split),
        }
        stages.append(stage.model_dump() | changes)
    return Plan.model_validate(plan.model_dump() | {"stages": tuple(stages)})


def _shard(stage: Stage, plan: Plan, *, split: bool) -> Shard:
    if split or stage.shard == "none":
        return stage.shard
    return "optimizer" if stage.replicas <= plan.micro_batches else "none"


def _divided(chance: random.Random, rows: int, width: int, least: int) -> tuple[int, ...]:
    spare = rows - width * least
    inner = sorted(chance.randint(0, spare) for _ in range(width - 1))
    return tuple(least + after - before for before, after in pairwise([0, *inner, spare]))


def _depths(chance: random.Random, plan: Plan, least_rows: int) -> tuple[set[int] | None, list[int] | None]:
    """Draw which stages' replicas take turns, and how many micro-batches each has in flight; None: as planned."""
    if layout_of(plan.schedule) != "line":
        return None, None
    turning, depths = set[int](), list[int]()
    limit = plan.micro_batches
    for index, stage in enumerate(plan.stages):
        takes, width = 1, stage.replicas
        if width > 1 and min(width, plan.micro_batches) <= limit and chance.random() < 0.5:
            turning.add(index)
            takes = width
        most = -(-plan.micro_batches // takes)
        allowed = most if limit == plan.micro_batches else max(1, limit // takes)
        depths.append(most if plan.schedule == "gpipe" else chance.randint(1, allowed))
        limit = min(limit, depths[-1] * takes)
    return turning, depths
