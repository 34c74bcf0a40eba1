"""The nearest plan that another trainer can express: accepted, and never slower than an equal split that it accepts."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from autopar.api.exports import TARGETS
from autopar.errors import InfeasibleError
from autopar.formats.cluster import Cluster
from autopar.formats.expressible import Expressible
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile, Writes
from autopar.interop.target import ExportSubject, usual_depths
from autopar.planner import PlanOptions, plan
from autopar.planner.assemble import assemble
from autopar.planner.candidate import equal_widths
from autopar.planner.constraints import Question
from autopar.planner.costs.model import CostModel
from autopar.planner.objectives.nearest import nearest_plan
from autopar.planner.search.judge import GivenStages, try_stages
from autopar.planner.simulator.simulate import Simulator
from equal_plans import equal_plan, llama_profile
from in_parts import in_parts
from oracles.exhaustive import everything
from random_problems import gpt_profile, hierarchy, local_cluster, two_kinds

TRAINERS = {name: target for name, target in TARGETS.items() if target.expressible is not None}


def question(seed: int) -> tuple[Profile, Cluster, PlanOptions]:
    """Return a Llama-like model, whose layers split in every other, devices, and at times little memory."""
    rng = random.Random(seed)
    profile = llama_profile(rng.randint(4, 12), batch=rng.choice((8, 12, 16)), tied=rng.random() < 0.3)
    devices = rng.choice((2, 3, 4, 6, 8))
    memory = rng.choice((2**40, 2**40, 60 * 2**20, 45 * 2**20))
    layers = [layer.model_copy(update={"update_s": rng.uniform(0, 2e-3)}) for layer in profile.layers]
    profile = profile.model_copy(update={"layers": tuple(layers)})
    return in_parts(profile, seed) if seed % 2 else profile, local_cluster(devices, memory), PlanOptions(gpus=devices)


def equal_splits(profile: Profile, cluster: Cluster, limits: Expressible) -> Iterator[Plan]:
    """Yield the best plan of every equal split of all devices, as the planner finds it for dictated stages."""
    devices, layers = len(cluster.devices), len(profile.layers)
    own = Question.of(profile, cluster, PlanOptions())
    for width, schedule in product(range(1, devices + 1), ("1f1b", "gpipe")):
        groups = devices // width
        if devices % width or groups > layers or not {schedule} <= {*(limits.schedules or ("1f1b",))}:
            continue
        cuts = tuple(layers * (index + 1) // groups for index in range(groups))
        for recompute, shard in product(("none", "full"), limits.shards_of(groups)):
            options = PlanOptions(gpus=devices, schedule=schedule, recompute=recompute, shard=shard)  # type: ignore[arg-type]
            asked = own.under(options)
            best = try_stages(asked.simulator, asked.families, asked.options, GivenStages(cuts, (width,) * groups))
            every = [each.candidate for each in best.by_trait.values()]
            yield from (assemble(asked.costs, each, asked.options, 0.0, (), ()) for each in dict.fromkeys(every))


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("name", TRAINERS)
def test_the_nearest_plan_is_accepted_and_no_slower_than_equal_splits(name: str) -> None:
    target, compared = TRAINERS[name], 0
    for seed in range(2):
        profile, cluster, options = question(seed)
        try:
            best = plan(profile, cluster, options)
        except InfeasibleError:
            continue
        subject = ExportSubject(best, profile, cluster, "plan.json")
        limits = target.limits(subject)
        layers = range(1, len(profile.layers) - 1)
        every = equal_splits(profile, cluster, limits)
        splits = [each for each in every if target.refusal(subject._replace(plan=each)) is None]
        try:
            found = nearest_plan(best, profile, cluster, limits, layers, target.edges(subject))
        except InfeasibleError:
            assert not splits
            continue
        assert target.refusal(subject._replace(plan=found)) is None
        fits = zip(found.predicted.peak_bytes, found.predicted.limit_bytes, strict=True)
        assert all(peak <= limit for peak, limit in fits)
        for each in splits:
            assert found.predicted.step_s <= each.predicted.step_s * (1 + 1e-9), (seed, each.stages)
            compared += 1
    assert compared > 1


def test_an_equal_plan_is_not_beaten_by_its_own_cuts_and_keeps_its_memory() -> None:
    profile = llama_profile(10)
    own, cluster = equal_plan(profile, "1f1b", 2, 2, 4, cuts=(5,))
    target = TRAINERS["megatron"]
    found = nearest_plan(own, profile, cluster, target.expressible, range(1, 11), tuple(range(13)))
    assert found.predicted.step_s <= own.predicted.step_s
    profile, cluster = llama_profile(8), local_cluster(4, 2**40)
    limits = TRAINERS["torchtitan"].expressible
    small = plan(profile, cluster, PlanOptions(memory_bytes=60 * 2**20))
    found = nearest_plan(small, profile, cluster, limits, range(1, 9), tuple(range(11)))
    assert max(found.predicted.peak_bytes) <= 60 * 2**20
    little = small.predicted.model_copy(update={"limit_bytes": (1,) * len(small.stages)})
    with pytest.raises(InfeasibleError, match="no plan that torchtitan can express fits the memory of 4 devices"):
        nearest_plan(small.model_copy(update={"predicted": little}), profile, cluster, limits, range(1, 9), range(11))


def _found(profile: Profile, cluster: Cluster, limits: Expressible, **asked: Any) -> Plan:  # noqa: ANN401
    best, count = plan(profile, cluster, PlanOptions(use_all=True, **asked)), len(profile.layers)
    return nearest_plan(best, profile, cluster, limits, range(1, count - 1), tuple(range(count + 1)))


def test_the_nearest_plan_has_nothing_that_the_trainer_or_the_model_does_not_admit() -> None:
    profile, cluster, own = llama_profile(2, batch=4), local_cluster(2), Expressible("own", ("1f1b",))
    device = profile.device.model_copy(update={"reserved_bytes": 2**20})
    taken = profile.model_copy(update={"device": device})
    made = _found(taken, cluster, own, seed=7, memory_bytes=60 * 2**20)
    assert (made.seed, set(made.predicted.limit_bytes)) == (7, {59 * 2**20})
    assert [len(stage.types) for stage in _found(*two_kinds(profile, cluster, 0), own).stages] == [1, 1]
    # Of layers with one replica each, the last one reads what the first one makes; one layer may not run twice.
    alone, once = ({"writes": Writes(**{name: ("b",)})} for name in ("buffers", "parameters"))
    first = profile.tensors[1].model_copy(update={"consumers": (profile.layers[1].name, profile.layers[3].name)})
    skipping, written = (
        profile.model_copy(update={"layers": tuple(each.model_copy(update=update) for each in profile.layers)})
        for update in (alone, once)
    )
    skipping = skipping.model_copy(update={"tensors": (profile.tensors[0], first, *profile.tensors[2:])})
    for model, devices, limits in (
        (skipping, 4, own),
        (written, 2, Expressible("own", ("1f1b",), recompute=("all",))),
        # Rounds of as many micro-batches as there are groups, and halves that were measured.
        (llama_profile(2, batch=3), 2, Expressible("own", ("interleaved",))),
        (gpt_profile(2, batch=4).model_copy(update={"tied": ()}), 2, Expressible("own", ("zb-h1",))),
    ):
        with pytest.raises(InfeasibleError, match="no plan that own can express"):
            _found(model, local_cluster(devices), limits)


def _team_question(seed: int) -> tuple[Profile, Cluster, PlanOptions]:
    """Return a small model whose layers split, and devices of one node or two, at times with teams on both."""
    draw = random.Random(seed)
    profile = llama_profile(draw.randint(1, 2), batch=draw.choice((2, 4)))
    layers = (each.model_copy(update={"update_s": draw.uniform(0, 2e-3)}) for each in profile.layers)
    profile = in_parts(profile.model_copy(update={"layers": tuple(layers)}), seed)
    nodes, memory = draw.choice(([4], [2, 2])), draw.choice((None, 40 * 2**20, 20 * 2**20))
    options = PlanOptions(use_all=True, memory_bytes=memory, across_nodes=len(nodes) > 1 and draw.random() < 0.5)
    return profile, hierarchy(seed, nodes), options


def _fastest_of_all(asked: tuple[Profile, Cluster, PlanOptions], limits: Expressible, edges: range) -> Plan | None:
    """Return the fastest plan whose replicas split micro-batches that a trainer can express, each simulated."""
    profile, cluster, options = asked
    costs, edge_set = CostModel(profile, cluster, options), set(edges)
    simulator = Simulator(costs)
    every = [
        each
        for each in everything(costs, options)
        if equal_widths(each.stages) and each.stages[0].division == "split" and edge_set >= set(each.cuts)
        if max(costs.shortfalls(each)) <= 0
    ]
    for each in sorted(every, key=simulator.step_s):
        found = assemble(costs, each, options, 0.0, (), ())
        if limits.refusal(found, (), usual_depths(found)) is None:
            return found
    return None


@pytest.mark.slow
@pytest.mark.some(4)
@pytest.mark.parametrize("seed", range(28))
def test_the_nearest_plan_is_the_fastest_of_all_with_teams_and_without(seed: int) -> None:
    profile, cluster, options = _team_question(seed)
    shards = ("none", "optimizer", "parameters")
    own = Expressible("own", ("1f1b", "gpipe"), shards=shards, single_stage_shards=shards, tensor=(1, 0, 2)[seed % 3])
    edges = range(len(profile.layers) + 1)
    try:
        best = plan(profile, cluster, options)
    except InfeasibleError:
        return
    crossing = any(
        len({cluster.devices[device].node for device in stage.devices[at : at + stage.tensor_parallel]}) > 1
        for stage in best.stages
        for at in range(0, len(stage.devices), stage.tensor_parallel)
    )
    asked = {"tensor": "auto", "across_nodes": crossing, "recompute": "none"}
    admitted = replace(options, gpus=4, **asked)  # type: ignore[arg-type]
    fastest = _fastest_of_all((profile, cluster, admitted), own, edges)
    try:
        found = nearest_plan(best, profile, cluster, own, range(1, edges[-2]), edges)
    except InfeasibleError:
        assert fastest is None
        return
    assert fastest is not None
    assert found.predicted.step_s == pytest.approx(fastest.predicted.step_s, rel=1e-9)
