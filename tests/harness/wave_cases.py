"""Cases of several pipelines that train a chain of layers together, and how far they are from the rule of wsp."""

import random
import re
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from autopar.capture.plain.loop import train_plainly
from autopar.formats.plan import Plan
from autopar.formats.pulls import Taken
from autopar.options.train import TrainSettings
from autopar.ranks.pool import RankPool
from autopar.runtime.job import Job
from autopar.runtime.loss import StepRecord
from autopar.runtime.messages.transport import Transport
from autopar.runtime.stage.parameters import first_stages
from autopar.runtime.stage.waves import EagerWaveWeights
from paths import MODELS
from training_cases import Case, make_case, train

ROWS = 2
OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "nesterov")
CLIPPED = {"clip_norm": 0.02, "clip": "stage"}
SPECIAL: tuple[tuple[dict[str, object], dict[str, Any]], ...] = (
    ({}, {}),
    ({"DROPS": 0.3}, {}),
    ({"COUNTS": True}, {}),
    ({}, CLIPPED),
    ({"FROZEN": (0, 3)}, {}),
    ({"DROPS": 0.2, "COUNTS": True, "FROZEN": (4,)}, CLIPPED),
)
"""What the model has, and how gradients are clipped."""


class Waves(NamedTuple):
    """What several pipelines are asked."""

    cuts: tuple[tuple[int, ...], ...]
    """By pipeline, layers before which its stages but the last end."""
    depths: tuple[tuple[int, ...], ...]
    wave: int
    staleness: int

    @property
    def least_steps(self) -> int:
        """Mini-batches after which every pipeline has been as stale as it may be."""
        return (self.staleness + 3) * self.wave


def drawn(seed: int, layers: int) -> Waves:
    """Draw two to four pipelines of unlike cuts and depths, waves of one to four, a staleness of none to four."""
    draw = random.Random(seed)
    wave, staleness, cuts, depths = draw.randint(1, 4), draw.randint(0, 4), list[Any](), list[Any]()
    for _ in range(draw.randint(2, 4)):
        count = draw.randint(1, min(4, layers))
        cuts.append(tuple(sorted(draw.sample(range(1, layers), count - 1))))
        depths.append(tuple(sorted((draw.randint(1, wave) for _ in range(count)), reverse=True)))
    return Waves(tuple(cuts), tuple(depths), wave, staleness)


def chain(folder: Path, optimizer: str, **special: object) -> Case:
    """Write the folder's ``model.py``, some of whose settings are others, and return its case."""
    text = (MODELS / "tanh_chain.py").read_text().replace('OPTIMIZER = "sgd"', f'OPTIMIZER = "{optimizer}"')
    for name, value in special.items():
        text = re.sub(f"(?m)^{name} = [^#]*", f"{name} = {value}  ", text)
    return make_case(folder / "model.py", text)


def planned(case: Case, asked: Waves, *, eager: bool = False, **how: Any) -> Plan:  # noqa: ANN401
    """Return the plan of some pipelines, one device a stage."""
    plans, device = list[Plan](), 0
    for cuts, depths in zip(asked.cuts, asked.depths, strict=True):
        count = len(depths)
        plan = case.plan([1] * count, 1, ROWS, warmup=[1] * count, cuts=cuts, **how)
        stages = [
            stage.model_copy(update={"warmup": depth, "devices": (device + at,)})
            for at, (stage, depth) in enumerate(zip(plan.stages, depths, strict=True))
        ]
        device += count
        plans.append(plan.model_copy(update={"stages": tuple(stages), "precision": "fp64"}))
    return Plan.joined(plans, weight_policy="wsp", wave=asked.wave, staleness=asked.staleness, eager=eager)


class _Slowed:
    """A rank's transport that takes a while, which is drawn, for everything that begins."""

    def __init__(self, inner: Transport, draw: random.Random, most_s: float) -> None:
        self._inner, self._draw, self._most_s = inner, draw, most_s

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        act = getattr(self._inner, name)

        def slowly(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
            time.sleep(self._draw.uniform(0, self._most_s))
            return act(*arguments, **options)

        return slowly


def slowed(ranks: Collection[int], draw: random.Random) -> Callable[[Transport], Transport]:
    """Return what makes ranks slow, some of them twenty times as slow as the others."""

    def carry(transport: Transport) -> Transport:
        most_s = 2e-3 if transport._rank in ranks else 1e-4  # type: ignore[attr-defined]
        return _Slowed(transport, random.Random(draw.random()), most_s)  # type: ignore[return-value]

    return carry


def differs(
    folder: Path,
    plan: Plan,
    steps: int,
    *,
    pool: RankPool | None = None,
    carry: Callable[[Transport], Transport] | None = None,
    taken: dict[int, list[Taken]] | None = None,
    case: Path | None = None,
    **clipping: Any,  # noqa: ANN401
) -> float:
    """Return how far all ranks' parameters are from the rule's, relative to the largest; losses are the rule's, too.

    Ranks are threads of this process, whose transports ``carry`` may replace, or those of the pool. What the pulls of
    an eager plan take is put into ``taken`` by rank, and the rule takes it; what is there already is replayed. The
    model is in the folder, or in that of the ``case``.
    """
    made = make_case((case or folder) / "model.py")
    records: dict[int, list[StepRecord]] = {}
    jobs: dict[int, EagerWaveWeights] = {}
    replayed = dict(taken or {})

    def begin(job: Job) -> None:
        if isinstance(job.versions, EagerWaveWeights):
            jobs[job.rank] = job.versions
            if replayed:
                job.versions.follow({0: replayed[job.rank]})

    if pool is None:
        found = made.train(plan, folder, steps, TrainSettings(**clipping), records, carry=carry, begin=begin)
        if taken is not None:
            taken.update({rank: list(own.taken) for rank, own in jobs.items()})
        counted = any(each.count for own in records.values() for each in own)
        found = [_loss(parts, plan) for parts in zip(*records.values(), strict=True)] if counted else found
        found = found if counted else [loss / len(plan.pipelines) for loss in found]
    else:
        found = [loss / len(plan.pipelines) for loss in train(pool, made, plan, folder, steps, **clipping)]
    stage_of, *others = (first_stages(each, made.graph) for each in plan.separate)
    how: dict[str, Any] = {"clip_norm": clipping.get("clip_norm"), "clips_stages": "clip_norm" in clipping}
    how["taken"] = None if taken is None else [taken[rank] for rank in range(len(plan.devices))]
    truth = train_plainly(made.model, plan, steps, stage_of=stage_of, others=others, **how)
    assert found == pytest.approx(truth.losses, rel=1e-12)
    largest = max(float(each.abs().max()) for each in truth.parameters.values())
    apart, seen = 0.0, [set[str]() for _ in plan.pipelines]
    for rank in range(len(plan.devices)):
        for name, each in load_file(folder / f"parameters-{rank}").items():
            seen[plan.pipeline_of(rank)].add(name)
            apart = max(apart, float((each - truth.parameters[name]).abs().max()))
        # Statistics of batch normalisation are the first pipeline's.
        buffers = load_file(folder / f"buffers-{rank}").items() if plan.pipeline_of(rank) == 0 else ()
        for name, each in buffers:
            assert torch.allclose(each, truth.buffers[name], rtol=1e-11, atol=1e-12), name
    assert all(each == truth.parameters.keys() for each in seen)
    return apart / largest


def _loss(parts: Sequence[StepRecord], plan: Plan) -> float:
    own = [each.loss / each.count for each in parts if each.count]
    assert len(own) == len(plan.pipelines)
    return sum(own) / len(own)
