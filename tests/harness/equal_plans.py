"""Plans whose stages are equally wide, of a model with the names of Transformers' Llama: what others can express."""

import json
import random
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from autopar.api.exports import export_plan
from autopar.formats.cluster import Cluster
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile, TiedParameter
from autopar.formats.stage import chunks_of, group_of, layout_of
from autopar.options.plan import PlanOptions
from autopar.ownership import Division, Shard
from autopar.planner.assemble import assemble
from autopar.planner.candidate import Candidate, CandidateStage
from autopar.planner.costs.model import CostModel
from autopar.schedules import SCHEDULES
from chunked import halved
from random_problems import gpt_profile, local_cluster


def llama_profile(blocks: int = 12, batch: int = 16, *, tied: bool = False) -> Profile:
    """Return a profile with the names of a Transformers Llama."""
    plain = halved(gpt_profile(blocks, batch=batch), 0)
    names = {"wte": "model.embed_tokens", "head": "model.norm+lm_head"}
    names |= {f"h.{index}": f"model.layers.{index}" for index in range(blocks)}
    new = [(layer, names[layer.name]) for layer in plain.layers]
    layers = tuple(layer.model_copy(update={"name": name, "modules": tuple(name.split("+"))}) for layer, name in new)
    ends = [
        {"producer": each.producer and names[each.producer], "consumers": tuple(names[name] for name in each.consumers)}
        for each in plain.tensors
    ]
    tensors = tuple(each.model_copy(update=update) for each, update in zip(plain.tensors, ends, strict=True))
    shared = TiedParameter(parameter="model.embed_tokens.weight", layers=(layers[0].name, layers[-1].name), bytes=4096)
    return plain.model_copy(update={"layers": layers, "tensors": tensors, "tied": (shared,) if tied else ()})


def equal_plan(
    profile: Profile,
    schedule: str,
    groups: int,
    replicas: int = 1,
    micro_batches: int = 4,
    *,
    chunks: int | None = None,
    cuts: Sequence[int] | None = None,
    shard: Shard = "none",
    division: Division = "split",
    recompute: Sequence[int] = (),
    depths: Sequence[int] | None = None,
) -> tuple[Plan, Cluster]:
    """Return a plan of equally wide stages, cut evenly or where ``cuts`` says, and the cluster that it is for."""
    layout, cluster = layout_of(schedule), local_cluster(groups * replicas, 2**40)
    chunks = chunks or chunks_of(layout) or 2
    count, layers, rows = groups * chunks, len(profile.layers), profile.batch // micro_batches
    stops = [*(cuts or [layers * (index + 1) // count for index in range(count - 1)]), layers]
    own = -(-micro_batches // replicas) if division == "round-robin" else micro_batches
    depths = depths or next(iter(SCHEDULES[schedule].warmups(groups, chunks, own).values()))
    shares = (rows,) * replicas if division == "round-robin" else (rows // replicas,) * replicas
    edges = [0, *stops]
    stages = []
    for index, (first, stop) in enumerate(zip(edges, stops, strict=False)):
        start = group_of(layout, index, groups) * replicas
        again = tuple(each for each in recompute if first <= each < stop)
        devices = tuple(range(start, start + replicas))
        stages.append(CandidateStage(first, stop, devices, shares, depths[index], again, shard, division))
    options = PlanOptions(gpus=groups * replicas)
    candidate = Candidate(micro_batches, rows, schedule, tuple(stages))
    return assemble(CostModel(profile, cluster, options), candidate, options, 0.0, (), ()), cluster


def random_equal(
    seed: int, schedules: Sequence[str] = tuple(SCHEDULES), blocks: int | None = None
) -> tuple[Plan, Profile, Cluster]:
    """Return any plan of equally wide stages: schedules, cuts, replicas, turns, micro-batches and chunks."""
    rng = random.Random(seed)
    schedule = rng.choice(list(schedules))
    groups, replicas = rng.randint(1, 4), rng.choice((1, 1, 2, 3))
    chunks = chunks_of(layout_of(schedule)) or rng.randint(2, 3)
    groups = groups if blocks is None else min(groups, (blocks + 2) // chunks)
    count = groups * chunks
    profile = llama_profile(blocks or rng.randint(max(2, count), count + 9), batch=24 * replicas)
    turning = schedule in ("1f1b", "gpipe") and replicas > 1 and rng.random() < 0.3
    counts = [groups * each for each in (1, 2, 4) if 24 % (groups * each) == 0] or [groups]
    micro_batches = rng.choice(counts) * (replicas if turning else 1)
    cuts = sorted(rng.sample(range(1, len(profile.layers)), count - 1))
    division: Division = "round-robin" if turning else "split"
    plan, cluster = equal_plan(
        profile, schedule, groups, replicas, micro_batches, chunks=chunks, cuts=cuts or None, division=division
    )
    return plan, profile, cluster


def stops(plan: Plan) -> list[int]:
    """Return behind how many layers every stage ends."""
    return list(accumulate(len(stage.layers) for stage in plan.stages))


Planned = tuple[Plan, Profile, Cluster]


def planned(profile: Profile, *arguments: Any, **options: Any) -> Planned:  # noqa: ANN401
    """Return what ``equal_plan`` makes, and the profile that it is of."""
    plan, cluster = equal_plan(profile, *arguments, **options)
    return plan, profile, cluster


def exported(
    name: str, folder: Path, made: Planned, architecture: str | None = None, file: str | None = None, **changes: object
) -> list[str]:
    """Return the files of a plan's export; with an architecture, of a model of Transformers."""
    plan, profile, cluster = made
    if architecture is not None:
        (folder / "config.json").write_text(json.dumps({"architectures": [architecture], "hidden_size": 4096}))
        source = plan.model.model_copy(update={"source": "hf:config.json", "sequence": 64})
        changes = {"model": source, **changes}
    inputs = plan.model_copy(update=changes), profile, cluster
    return [each.text for each in export_plan(name, inputs, folder / "plan.json", schedule_file=file).files]
