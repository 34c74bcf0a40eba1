"""What an error names as a remedy, carried out and typed; and the least shortfall of memory, against all plans."""

import ast
import random
import re
from dataclasses import replace
from typing import Any

import pytest

from autopar.errors import InfeasibleError
from autopar.formats.cluster import Cluster
from autopar.formats.document import parse_bytes
from autopar.formats.profile import Profile
from autopar.planner import PlanOptions, plan
from autopar.planner.candidate import families
from autopar.planner.costs.model import CostModel
from autopar.planner.infeasible import closest
from calls import Run
from chunked import halved
from random_problems import gpt_profile, local_cluster, problem, random_cluster, random_profile
from searched import closest_of, least_by_stages

MIB = 2**20


def _remedies(profile: Profile, cluster: Cluster, options: PlanOptions) -> list[dict[str, Any]]:
    """What the error of a plan that does not fit says would help, as options; nothing if the plan fits."""
    try:
        plan(profile, cluster, options)
    except InfeasibleError as error:
        text = str(error)
        assert "\n" not in text
        listed = text.rpartition("a plan fits with ")[2].split(", or with ")
        return [] if "no options were found" in text else [_options(each) for each in listed]
    return []


def _options(arguments: str) -> dict[str, Any]:
    call = ast.parse(f"call({arguments.strip('`')})", mode="eval").body
    assert isinstance(call, ast.Call)
    found = {each.arg or "": ast.literal_eval(each.value) for each in call.keywords}
    if "memory_bytes" in found:
        found["memory_bytes"] = parse_bytes(found["memory_bytes"], "memory_bytes")
    return found


def _fits(profile: Profile, cluster: Cluster, options: PlanOptions) -> bool:
    """Whether one of all plans fits; the slower truth."""
    return least_by_stages(CostModel(profile, cluster, options), options).get(None, 1) <= 0


@pytest.mark.reliability(50)
def test_every_remedy_that_an_error_names_works_and_is_the_least_of_its_kind() -> None:
    seen: set[str] = set()
    for seed in range(10):
        profile, cluster = problem(seed, 2, 4, most_layers=3, batches=(2, 4))
        asked: dict[str, Any] = [
            {"recompute": "none"},
            {"recompute": "none", "shard": "optimizer"},
            {"micro_batches": 1},
            {"schedule": "gpipe", "micro_batches": 2},
            {"shard": "auto"},
        ][seed % 5]
        ample = CostModel(profile, cluster, PlanOptions(gpus=2))
        least = closest(ample, families(ample.batch, PlanOptions(**asked)), PlanOptions(**asked))
        for share in (0.95, 0.7):
            memory_bytes = max(1, int(share * (least[0] + 2**34)))
            options = PlanOptions(gpus=2, memory_bytes=memory_bytes, **{"shard": "none", **asked})
            for changes in _remedies(profile, cluster, options):
                changed = replace(options, **changes)
                assert plan(profile, cluster, changed).predicted.step_s >= 0, f"seed {seed}: {changes}"
                seen |= {*changes}
                if set(changes) == {"gpus"} and changes["gpus"] <= 3:
                    fewer = replace(options, gpus=changes["gpus"] - 1)
                    assert not _fits(profile, cluster, fewer), f"seed {seed}: {changes}"
                if set(changes) == {"memory_bytes"} and changes["memory_bytes"] < MIB:
                    less = replace(options, memory_bytes=changes["memory_bytes"] - 1)
                    assert not _fits(profile, cluster, less), f"seed {seed}: {changes}"
    assert {"gpus", "memory_bytes", "shard", "recompute"} <= seen, seen


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"memory_bytes": 60 * MIB, "recompute": "none", "schedule": "gpipe"}, {"recompute": "auto"}),
        ({"memory_bytes": 60 * MIB, "recompute": "none", "schedule": "gpipe"}, {"schedule": "1f1b"}),
        ({"memory_bytes": 80 * MIB, "stages": "0-13:2"}, {"shard": "optimizer"}),
        ({"memory_bytes": 56 * MIB, "stages": "0-13:2", "shard": "optimizer"}, {"shard": "parameters"}),
        ({"memory_bytes": 40 * MIB, "micro_batches": 1}, {"gpus": 8}),
        ({"memory_bytes": 40 * MIB, "micro_batches": 1}, {"shard": "auto", "gpus": 4}),
        ({"memory_bytes": 30 * MIB, "stages": "0-6:1,7-13:1"}, {"memory_bytes": 44 * MIB}),
        ({"memory_bytes": 20 * MIB}, {"gpus": 6}),
        ({"memory_bytes": 20 * MIB, "max_stages": 2}, {"shard": "auto", "gpus": 9}),
        (
            {"memory_bytes": 40 * MIB, "recompute": "none", "pin": ("wte,h.5 same stage",)},
            {"recompute": "auto", "shard": "auto", "gpus": 3},
        ),
    ],
    ids=str,
)
def test_a_gpt_that_does_not_fit_is_helped(asked: dict[str, Any], expected: dict[str, Any]) -> None:
    options = PlanOptions(gpus=2, **{"shard": "none", **asked})
    assert expected in _remedies(gpt_profile(), local_cluster(2), options)
    assert plan(gpt_profile(), local_cluster(2), replace(options, **expected)).predicted.step_s > 0


def test_layers_and_limits_too_large_for_any_device_are_told() -> None:
    profile = gpt_profile(blocks=2)
    large = profile.layers[1].model_copy(update={"parameters_bytes": 2**40})
    profile = profile.model_copy(update={"layers": (profile.layers[0], large, *profile.layers[2:])})
    with pytest.raises(InfeasibleError) as caught:
        plan(profile, local_cluster(2), PlanOptions(gpus=2))
    assert "; layer h.0 alone fits no device; " in str(caught.value)
    assert "gpus" not in str(caught.value)
    changes = _options(str(caught.value).rpartition("a plan fits with ")[2])
    assert changes["memory_bytes"] > 2**40
    assert plan(profile, local_cluster(2), PlanOptions(gpus=2, **changes)).predicted.step_s > 0
    profile = random_profile(1, most_layers=3)
    profile = profile.model_copy(update={"device": profile.device.model_copy(update={"reserved_bytes": 3 * MIB})})
    with pytest.raises(InfeasibleError, match=r"needs 256 B beside the 3.00 MiB of the process itself"):
        plan(profile, random_cluster(1, 2), PlanOptions(memory_bytes=MIB))


ASKED = (
    {},
    {"use_all": True},
    {"shard": "auto"},
    {"recompute": "full"},
    {"recompute": "none", "shard": "gradients"},
    {"schedule": "gpipe"},
    {"min_stages": 2},
    {"divisible": True},
)


def test_the_least_shortfall_is_that_of_all_plans_for_any_number_of_stages_and_for_each() -> None:
    compared = several = 0
    for seed in range(40):
        devices = random.Random(seed).randint(2, 3)
        profile, cluster = problem(seed, devices, 3, most_layers=4, batches=(1, 2, 3, 4), skips=0.0)
        if len(profile.layers) == 1:
            continue
        asked = {"shard": "none", "memory_bytes": 1 + seed * 9_000, **ASKED[seed % len(ASKED)]}
        options = PlanOptions(gpus=devices, **asked)  # type: ignore[arg-type]
        costs = CostModel(profile, cluster, options)
        every = families(costs.batch, options)
        least = least_by_stages(costs, options)
        for count in (None, *range(1, devices + 1)):
            found = closest_of(costs, every, options, count)
            if count is not None and count < options.min_stages:
                continue
            if found is None:
                assert count not in least, f"seed {seed}: {count}"
                continue
            assert found[0] == least[count] == max(costs.shortfalls(found[1])), f"seed {seed}: {count}"
            assert count in (None, len(found[1].stages))
            compared += 1
            several += len(found[1].stages) > 1
    assert min(compared / 2, several) >= 30


@pytest.mark.parametrize("fits", [True, False])
def test_a_plan_that_fits_is_found_wherever_there_is_one(fits: bool) -> None:
    def asked(memory_bytes: int, **any_fits: bool) -> int:
        options = PlanOptions(gpus=4, memory_bytes=memory_bytes)
        costs = CostModel(gpt_profile(), local_cluster(4), options)
        return closest(costs, families(costs.batch, options), options, **any_fits)[0]  # type: ignore[index]

    assert (asked(1 + asked(1) - (not fits), any_fits=True) <= 0) == fits


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--schedule zb-h1 --min-stages 2 --memory 5000", r"; a plan fits with --\S+ \S+"),
        (
            "--gpus 6 --use-all --max-stages 1 --batch 1",
            "no plan for 6 devices obeys all of --max-stages, --forbid-cut, --pin and --use-all that were asked"
            ".* without --use-all",
        ),
    ],
)
def test_errors_name_what_was_tried_and_what_to_leave_out(run: Run, typed: str, said: str) -> None:
    halved(random_profile(4, most_layers=7, batches=(8,), skips=0.0), 4).save("profile.json")
    random_cluster(4, 2).save("cluster.json")
    code, _, err = run("plan", *typed.split())
    assert (code, err.count("\n")) == (3, 1)
    assert re.search(said, err) is not None
    assert " try " not in err
