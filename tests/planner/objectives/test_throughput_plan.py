"""What a plan of an asynchronous pipeline says, against the prices of its stages."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.errors import InfeasibleError, UsageError
from autopar.formats.plan import Plan
from autopar.planner import plan, simulate
from autopar.planner.costs.model import CostModel
from autopar.planner.objectives.throughput import StashCosts, quickest, throughput_plan
from autopar.planner.options import PlanOptions
from autopar.runtime.settings import check_scope
from random_problems import gpt_profile, local_cluster, random_cluster, random_profile, two_kinds


def test_a_plan_of_an_asynchronous_pipeline_says_what_it_is_and_is_neither_simulated_nor_run() -> None:
    profile, cluster = gpt_profile(), local_cluster(4)
    made = plan(profile, cluster, PlanOptions(objective="throughput"))
    assert (made.objective, made.weight_policy, made.schedule) == ("throughput", "stash", "1f1b")
    assert (made.micro_batches, made.micro_batch_size) == (1, 16)
    assert Plan.parse(made.dumps(), Path("plan.json")) == made
    # The reduction of the parameter that embedding and head share is not in the tables.
    assert 0 < made.predicted.lower_bound_s <= made.predicted.step_s
    assert any(note.startswith("bound by ") for note in made.notes)
    # Its replicas take turns, or embedding and head, which share a parameter, are apart.
    with pytest.raises(UsageError, match=r"weight policy stash: .*: the simulator has no programs of such plans"):
        simulate(made, profile, cluster)
    with pytest.raises(UsageError, match=r"weight policy stash: .*: `autopar run` trains no such plan"):
        check_scope(made)


def test_what_is_predicted_is_what_the_quickest_pipelines_stages_are_priced_at() -> None:
    several = turning = 0
    for seed in range(80):
        devices = seed % 4 + 1
        profile, cluster = random_profile(seed), random_cluster(seed, devices)
        if seed % 3 == 0:
            profile, cluster = two_kinds(profile, cluster, seed)
        options = PlanOptions(objective="throughput", gpus=devices)
        costs = CostModel(profile, cluster, options)
        prices = StashCosts(costs)
        found = quickest(prices, options)
        assert found is not None
        made, stages = throughput_plan(profile, cluster, options), found.candidate.stages
        busy, predicted = prices.busy(found.candidate), made.predicted
        assert [stage.devices for stage in made.stages] == [stage.devices for stage in stages]
        assert predicted.step_s == max(busy.values())
        assert predicted.lower_bound_s == min(found.least_s, predicted.step_s)
        assert busy[next(note for note in made.notes if note.startswith("bound by ")).removeprefix("bound by ")] == (
            predicted.step_s
        )
        assert predicted.peak_bytes == tuple(map(prices.peak_bytes, stages))
        computed_s = 0.0
        for stage, forward_s, backward_s in zip(stages, predicted.forward_s, predicted.backward_s, strict=True):
            replicas = range(len(stage.devices))
            slowest = (
                max(costs.forward_s(stage, at) for at in replicas),
                max(costs.backward_s(stage, at, 1) for at in replicas),
            )
            assert (forward_s, backward_s) == slowest
            computed_s += sum(slowest) * (1 if stage.division == "round-robin" else len(stage.devices))
        ranks = sum(len(stage.devices) for stage in stages)
        assert (1 - predicted.bubble) * ranks * predicted.step_s == pytest.approx(
            min(computed_s, ranks * predicted.step_s)
        )
        # Within one kind of devices all pure data parallelism is among what the quickest was chosen from.
        if seed % 3 and not profile.tied:
            assert all(
                each.step_s is None or each.step_s >= predicted.step_s * (1 - 1e-9) for each in made.alternatives
            )
        several += len(stages) > 1
        turning += any(stage.division == "round-robin" for stage in stages)
    assert min(several, turning) > 10


def test_the_memory_that_is_advised_is_enough_and_what_data_parallelism_lacks_is_said() -> None:
    profile, cluster = gpt_profile(), local_cluster(2)
    options = PlanOptions(objective="throughput", memory_bytes=1000)
    with pytest.raises(InfeasibleError, match="no asynchronous pipeline of 14 layers fits 2 devices, with") as caught:
        throughput_plan(profile, cluster, options)
    found = re.search(r"`memory_bytes='(\d+)MiB'`", str(caught.value))
    assert found is not None
    made = throughput_plan(profile, cluster, replace(options, memory_bytes=int(found[1]) * 2**20))
    assert max(made.predicted.peak_bytes) <= int(found[1]) * 2**20
    lacking = [each.infeasible for each in made.alternatives if each.step_s is None]
    assert all(each is not None and re.fullmatch(r"needs .* more", each) for each in lacking)
    assert len(made.alternatives) == 2
