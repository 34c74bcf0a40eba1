"""Pairs of plans: what one saves, the other goes on with, as one process that trains without a stop."""

import random
import tempfile
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch

from autopar.formats.checkpoint import SavedPlan, SavedRun
from autopar.formats.plan import Plan
from autopar.formats.stage import layout_of
from autopar.options.train import RunOptions
from autopar.ownership import SHARDS
from autopar.ranks.pool import RankPool
from autopar.runtime.checkpoint.folder import CheckpointFolder, CheckpointReader, read_verified
from autopar.runtime.start.launch import run
from autopar.schedules import SCHEDULES
from in_teams import in_teams
from paths import MODELS
from training_cases import make_case

RANKS, MICRO_BATCHES, ROWS = 4, 4, 4
STEPS = 5
RUN = SavedRun(model="model.py", batch=8, seed=0, samples=64)
PLAN = SavedPlan(
    sha256="a" * 64, ranks=2, stages=2, schedule="1f1b", micro_batches=2, division=((4,), (4,)), sharded=False,
    precision="fp32", torch="2.13.0",
)  # fmt: skip


class Training(NamedTuple):
    """What a run gives: losses by step, and a checkpoint's tensors."""

    losses: tuple[float, ...]
    tensors: dict[str, torch.Tensor]


class CheckpointPairs:
    """Trains one model, without dropout (masks are per share), by one rank and by pairs of plans that are drawn."""

    def __init__(self, folder: Path, pool: RankPool, model: str = "resumed", more: str = "") -> None:
        """Prepare a model, whose file ends with ``more``, and train it on one rank."""
        self._file, self._pool = folder / "model.py", pool
        text = (MODELS / f"{model}.py").read_text()
        text = text.replace("nn.Dropout(0.2)", "nn.Identity()").replace("= 9, 8", "= 3, 8") + more
        self._case = make_case(self._file, text)
        self._graph = self._case.graph
        self.truth = self._train([(self._case.plan([1], MICRO_BATCHES, ROWS), STEPS)])

    def draw(self, rng: random.Random) -> Plan:
        """Draw a plan: schedule, widths, cuts, shares, replicas in turn, sharding and recomputation."""
        layers = len(self._graph.layers)
        while True:
            schedule = rng.choice(sorted(SCHEDULES))
            groups = rng.randint(1, RANKS)
            chunks = {"line": 1, "vee": 2, "loop": rng.randint(1, 2)}[layout_of(schedule)]
            widths = [rng.randint(1, RANKS - groups + 1) for _ in range(groups)]
            stages = groups * chunks
            if sum(widths) > RANKS or stages > layers or (chunks > 1 and groups > MICRO_BATCHES):
                continue
            how: dict[str, Any] = {"cuts": sorted(rng.sample(range(1, layers), stages - 1)), "chunks": chunks}
            plain = schedule in ("gpipe", "1f1b")
            if plain and rng.random() < 0.4:
                how["turns"] = tuple(at for at, width in enumerate(widths) if width > 1 and MICRO_BATCHES % width == 0)
            elif rng.random() < 0.5:
                how["shares"] = [_shares(rng, width) for width in widths]
            elif plain:
                how["shard"] = [rng.choice(SHARDS) for _ in widths]
            how["recompute"] = rng.random() < 0.3
            try:
                return self._case.plan(widths, MICRO_BATCHES, ROWS, schedule, **how)
            except ValueError:
                continue

    def unflushed(self, policy: str, sizes: Sequence[int]) -> Plan:
        """Return a plan of two stages under a weight policy."""
        plan = in_teams(self._graph, self._case.plan([1, 1], MICRO_BATCHES, ROWS, warmup=[1, 1]), sizes)
        stages = [stage.model_copy(update={"warmup": depth}) for stage, depth in zip(plan.stages, (2, 1), strict=True)]
        more = {"anneal_steps": 3, "synchronous_steps": 1} if policy == "pipemare" else {}
        return plan.model_copy(update={"stages": tuple(stages), "weight_policy": policy, **more})

    def train(self, first: Plan, second: Plan, stop: int) -> Training:
        """Train by the first plan for some steps, and by the second from what it has saved."""
        return self._train([(first, stop), (second, STEPS)])

    def train_drained(self, first: Plan, second: Plan | None = None, every: int = 2) -> Training:
        """Train by a plan that is drained every so many steps; if there is a second one, by that after the first."""
        parts = [(first, STEPS)] if second is None else [(first, every), (second, STEPS)]
        return self._train(parts, every)

    def _train(self, parts: list[tuple[Plan, int]], every: int = STEPS) -> Training:
        losses: list[float] = []
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for plan, steps in parts:
                asked = RunOptions(steps, checkpoint=folder, every=every, resume=bool(losses))
                losses += run(plan, str(self._file), asked, pool=self._pool).report.loss
            return Training(tuple(losses), saved(folder, STEPS))


def saved(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Return a checkpoint's tensors."""
    place = CheckpointFolder(folder).folder_of(step)
    manifest = read_verified(place)
    with CheckpointReader(place, manifest) as reader:
        return {each.key: reader.read(each) for each in manifest.tensors if each.kind != "generator"}


def largest_difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """Return the largest difference of any two numbers, relative to the tensor's largest; others are equal."""
    assert one.keys() == other.keys()
    found = 0.0
    for key, tensor in one.items():
        assert tensor.shape == other[key].shape, key
        if tensor.is_floating_point() and tensor.numel():
            found = max(found, float((tensor - other[key]).abs().max() / max(1e-3, float(other[key].abs().max()))))
        else:
            assert torch.equal(tensor, other[key]), key
    return found


def difference(one: Training, other: Training) -> float:
    """Return the largest difference of losses and tensors, relative to the tensor's largest number."""
    losses = ({"": torch.tensor(each.losses, dtype=torch.float64)} for each in (one, other))
    return max(largest_difference(*losses), largest_difference(one.tensors, other.tensors))


def _shares(rng: random.Random, width: int) -> tuple[int, ...]:
    edges = [*sorted(rng.sample(range(1, ROWS), width - 1)), ROWS]
    return tuple(stop - start for start, stop in zip(accumulate([0, *edges[:-1]], max), edges, strict=True))
