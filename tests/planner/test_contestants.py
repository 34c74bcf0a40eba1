"""Contestants: everyone is there, planned or refused by name, on as many micro-batches; equal plans are one."""

import pytest

from autopar.errors import UsageError
from autopar.hardware.clusters import cluster_named
from autopar.options.plan import PlanOptions
from autopar.ownership import SHARDS
from autopar.planner.contestants import contestants
from autopar.planner.plan import plan
from autopar.policies import POLICIES
from autopar.schedules import SCHEDULES
from random_problems import gpt_profile, local_cluster


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("devices", [2, 3, 4, 6])
def test_everyone_takes_part_under_a_name(devices: int) -> None:
    profile, cluster = gpt_profile(blocks=6), local_cluster(devices)
    found = contestants(profile, cluster, PlanOptions(), 50)
    names = [name for each in found for name in each.name.split(" = ")]
    sharded = [each for each in names if each.startswith("data parallelism")]
    assert len(names) == len(set(names))
    assert {*SCHEDULES, *(each for each in POLICIES if each != "sync"), "autopar", "plain loop"} <= set(names)
    assert len(sharded) == len(SHARDS)
    counts = set()
    for each in found:
        assert (each.plan is None) == (each.refusal is not None), each.name
        if each.plan is None:
            continue
        alone = each.name.split(" = ")
        if each.plan.pipelines:
            # Several of them have whole mini-batches in flight.
            assert each.plan.micro_batches == 1
        elif alone != ["autopar"]:
            counts.add(each.plan.micro_batches)
        assert each.is_plain == ("plain loop" in alone)
        own = [name for name in alone if name in SCHEDULES]
        assert all(each.plan.schedule == name and len(each.plan.stages) > 1 for name in own)
        policies = [name for name in alone if name in POLICIES]
        assert all(each.plan.weight_policy == name for name in policies)
        if each.is_plain:
            assert len(each.plan.devices) == 1
        # What its text says is what it is.
        if own and each.plan.schedule != "1f1b":
            turns = any(stage.division == "round-robin" for stage in each.plan.stages)
            asked = {"stages": each.stages, "schedule": own[0], "division": "round-robin" if turns else "split"}
            again = plan(profile, cluster, PlanOptions(**asked, micro_batches=each.plan.micro_batches))
            assert again.stages == each.plan.stages
    assert len(counts) == 1


def test_a_model_that_fits_no_team_or_memory_leaves_its_contestants_refused_and_not_out() -> None:
    profile = gpt_profile(blocks=3)
    found = {each.name: each for each in contestants(profile, local_cluster(2), PlanOptions(micro_batches=1), 9)}
    refused = found["tensor parallelism of 2"].refusal
    assert refused is not None
    assert "tensor" in refused or "split" in refused or "part" in refused
    dictated = contestants(profile, local_cluster(2), PlanOptions(stages="0-1:1,2-4:1", micro_batches=2), 9)
    assert any("dictated" in each.name for each in dictated)
    # The head is the embedding, whose rates would differ.
    assert "its stages share no parameters" in str(found["pipemare"].refusal)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"policy": "2bw"}, "`policy`: all are compared"),
        ({"objective": "throughput"}, "`objective`: rows"),
        ({"divisible": True}, "`divisible`: no run can"),
        ({"gpus": 1}, "`gpus=1`: schedules are compared on several devices"),
    ],
)
def test_what_says_what_is_compared_anyway_is_refused(asked: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        contestants(gpt_profile(blocks=3), cluster_named("2xH100"), PlanOptions(**asked), 5)  # type: ignore[arg-type]
