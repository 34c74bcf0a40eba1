"""PipeDream's and Piper's plans as plan files: their numbers, and autopar's beside them."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from autopar.formats.cluster import Cluster, Device, Link
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from autopar.interop.pipedream import pipedream_profile
from autopar.planner import PlanOptions, plan, simulate
from autopar.planner.assemble import candidate_of
from autopar.planner.costs.model import CostModel
from autopar.planner.simulator.simulate import Simulator
from autopar.report.plan import render
from autopar.report.table import as_text
from autopar.runtime.settings import check_scope
from random_problems import gpt_profile, local_cluster
from reproductions.all_pipedream_plans import check_pipedream, nodes_of
from reproductions.all_piper_plans import check_piper
from reproductions.pipedream import pipedream_plan
from reproductions.piper import piper_plan
from reproductions.piper_files import PiperProfile, piper_profile
from reproductions.plans import planned_by_pipedream, planned_by_piper
from reproductions.stash import StashCosts


def _cluster(devices: int, memory_bytes: int, bytes_per_s: float) -> Cluster:
    link = Link(level="node", latency_s=0.0, bytes_per_s=bytes_per_s)
    return Cluster(devices=(Device(type="V100", memory_bytes=memory_bytes),) * devices, links=(link,))


def _chain(seed: int, count: int = 7) -> Profile:
    rng = random.Random(seed)
    lines = [
        f"node{index} -- layer -- forward_compute_time={rng.uniform(1, 20)}, "
        f"backward_compute_time={rng.uniform(1, 40)}, "
        f"activation_size={rng.randint(10**5, 10**7)}, parameter_size={rng.randint(0, 10**8)}"
        for index in range(count)
    ]
    lines += [f"\tnode{index} -- node{index + 1}" for index in range(count - 1)]
    return pipedream_profile("\n".join(lines), Path("chain.txt"))


@pytest.mark.parametrize("seed", range(5))
def test_pipedreams_plan_has_its_bottleneck_and_autopars_price(seed: int) -> None:
    profile, cluster = _chain(seed), _cluster(seed % 5 + 2, 10**9, 1e9)
    own, made = pipedream_plan(profile, cluster), planned_by_pipedream(profile, cluster, PlanOptions())
    assert Plan.parse(made.dumps(), Path("plan.json")) == made
    assert (made.objective, made.weight_policy) == ("pipedream", "stash")
    assert made.predicted.objective_s == own.bottleneck_s
    assert [(stage.devices, len(stage.layers)) for stage in made.stages] == [
        (stage.devices, stage.stop - stage.first) for stage in own.stages
    ]
    assert all(stage.division == "round-robin" for stage in made.stages if stage.replicas > 1)
    shown = " ".join(as_text(render(made)).split())
    assert "(objective pipedream)" in shown
    assert "slowest stage (PipeDream's, per mini-batch)" in shown
    assert "by PipeDream's formulas" in shown
    prices = StashCosts(CostModel(profile, cluster, PlanOptions()))
    assert made.predicted.step_s == max(prices.busy(candidate_of(made, profile)).values())
    quickest = plan(profile, cluster, PlanOptions(objective="throughput", memory_bytes=10**13))
    assert made.predicted.step_s >= quickest.predicted.step_s * (1 - 1e-9)
    over = [peak > limit for peak, limit in zip(made.predicted.peak_bytes, made.predicted.limit_bytes, strict=True)]
    assert sum(over) == sum("exceeds its devices' memory" in note for note in made.notes)


def test_pipedreams_mini_batch_is_the_largest_that_all_layers_were_profiled_with() -> None:
    made = planned_by_pipedream(gpt_profile(), local_cluster(3), PlanOptions())
    assert made.batch == made.micro_batch_size == 16


def _options(seed: int, count: int = 4) -> PiperProfile:
    """A chain whose layers may recompute."""
    rng = random.Random(seed)
    nodes: list[dict[str, Any]] = []
    for node in range(count):
        into = {str(node - 1): 0.0} if node else {}
        out = {str(node + 1): 0.0} if node + 1 < count else {}
        shared: dict[str, Any] = {"parameterSize": rng.randint(0, 100), "memoryUsageB": 20}
        shared |= {"syncTimeFw": into, "syncTimeBw": out}
        ways = [
            {"id": "vanilla", "timePerSample": 1.0, "memoryUsageA": 60, **shared},
            {"id": "activation recomp", "timePerSample": 1.3, "memoryUsageA": 10, **shared},
        ]
        nodes.append({"id": node, "name": "layer", "TMPCs": {"1": ways}})
    edges = [{"sourceId": node, "destId": node + 1, "communicationCost": 1.0} for node in range(count - 1)]
    content = {"maxDevices": 4, "maxMemoryPerDevice": 100, "bandwidth": 1e3, "mbsInBatch": 12}
    return piper_profile(json.dumps({**content, "nodes": nodes, "edges": edges}), Path("options.json"))


@pytest.mark.parametrize("memory", [100, 150, 200, 400])
def test_pipers_plan_has_its_bottleneck_and_autopars_simulated_step(memory: int) -> None:
    profile, cluster = _options(memory), _cluster(4, memory, 1e3)
    own, made = piper_plan(profile, cluster), planned_by_piper(profile, cluster, PlanOptions())
    assert Plan.parse(made.dumps(), Path("plan.json")) == made
    assert (made.objective, made.weight_policy, made.micro_batches, made.micro_batch_size) == ("piper", "sync", 12, 1)
    assert made.predicted.objective_s == own.bottleneck_s
    for stage, theirs in zip(made.stages, own.stages, strict=True):
        names = [layer.name for layer in profile.layers[theirs.first : theirs.stop]]
        assert list(stage.layers) == names
        assert stage.replicas == theirs.replicas
        assert list(stage.recompute) == [name for name, again in zip(names, theirs.recompute, strict=True) if again]
        assert stage.warmup <= theirs.in_flight
    costs = CostModel(profile, cluster, PlanOptions())
    assert made.predicted.step_s == pytest.approx(Simulator(costs).step_s(candidate_of(made, profile)))
    assert simulate(made, profile, cluster).end_s == pytest.approx(made.predicted.step_s)
    check_scope(made)


def test_no_plan_has_a_lower_bottleneck_and_none_is_missed() -> None:
    found, infeasible, bound_by_memory = check_piper(range(120))
    assert (found >= 80, infeasible >= 4, bound_by_memory >= 24) == (True, True, True)


@pytest.mark.parametrize("levels", [1, 2])
def test_no_pipeline_has_a_lower_bottleneck(levels: int) -> None:
    check_pipedream(range(24), levels)


def test_stages_of_a_node_lie_at_the_same_places_of_all_nodes_that_share_the_layers() -> None:
    lines = [
        "node0 -- a -- forward_compute_time=8, backward_compute_time=8, activation_size=1, parameter_size=0",
        "node1 -- b -- forward_compute_time=4, backward_compute_time=4, activation_size=1, parameter_size=1e6",
        "\tnode0 -- node1",
    ]
    plan = pipedream_plan(pipedream_profile("\n".join(lines), Path("two.txt")), nodes_of(2, 3, 1e6, 1e9))
    assert [stage.devices for stage in plan.stages] == [(0, 1, 3, 4), (2, 5)]
    assert plan.bottleneck_s == pytest.approx((0.008 + 4 * 1e6 / (2 * 1e9) / 3) / 2)
    assert plan.one_device_s == pytest.approx(0.024)
