"""What an error names as a remedy, carried out; and the least shortfall of memory, against all plans."""

from __future__ import annotations

import ast
import random
from dataclasses import replace
from typing import Any

import pytest

from autopar.errors import InfeasibleError, UsageError
from autopar.formats.cluster import Cluster
from autopar.formats.document import parse_bytes
from autopar.formats.profile import Profile
from autopar.planner import PlanOptions, plan
from autopar.planner.candidate import families
from autopar.planner.costs.model import CostModel
from autopar.planner.infeasible import closest
from counted_stages import closest_of
from oracles.exhaustive import everything
from random_problems import gpt_profile, local_cluster, random_cluster, random_profile, two_kinds

MIB = 2**20


def _remedies(profile: Profile, cluster: Cluster, options: PlanOptions) -> list[dict[str, Any]]:
    """What the error of a plan that does not fit says would help, as options; nothing if the plan fits."""
    try:
        plan(profile, cluster, options)
    except InfeasibleError as error:
        text = str(error)
        assert "\n" not in text
        if "no options were found" in text:
            return []
        listed = text.rpartition("a plan fits with ")[2].split(", or with ")
        return [_options(each) for each in listed]
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
    costs = CostModel(profile, cluster, options)
    return any(max(costs.shortfalls(candidate)) <= 0 for candidate in everything(costs, options))


@pytest.mark.slow
@pytest.mark.reliability(50)
def test_every_remedy_that_an_error_names_works_and_is_the_least_of_its_kind() -> None:
    seen: dict[str, int] = {}
    for seed in range(40):
        profile, cluster = random_profile(seed, most_layers=3, batches=(2, 4)), random_cluster(seed, 2)
        if seed % 4 == 0:
            profile, cluster = two_kinds(profile, cluster, seed)
        asked: dict[str, Any] = [
            {"recompute": "none"},
            {"recompute": "none", "shard": "optimizer"},
            {"micro_batches": 1},
            {"schedule": "gpipe", "micro_batches": 2},
            {"shard": "auto"},
        ][seed % 5]
        ample = CostModel(profile, cluster, PlanOptions(gpus=2))
        least = closest(ample, families(ample.batch, PlanOptions(**asked)), PlanOptions(**asked))
        assert least is not None
        for share in (0.95, 0.7):
            memory_bytes = max(1, int(share * (least[0] + 2**34)))
            options = PlanOptions(gpus=2, memory_bytes=memory_bytes, **{"shard": "none", **asked})
            for changes in _remedies(profile, cluster, options):
                changed = replace(options, **changes)
                assert plan(profile, cluster, changed).predicted.step_s >= 0, f"seed {seed}: {changes}"
                for name in changes:
                    seen[name] = seen.get(name, 0) + 1
                if set(changes) == {"gpus"} and changes["gpus"] <= 3:
                    fewer = replace(options, gpus=changes["gpus"] - 1)
                    assert not _fits(profile, cluster, fewer), f"seed {seed}: {changes}"
                if set(changes) == {"memory_bytes"} and changes["memory_bytes"] < MIB:
                    less = replace(options, memory_bytes=changes["memory_bytes"] - 1)
                    assert not _fits(profile, cluster, less), f"seed {seed}: {changes}"
    assert min(seen[name] for name in ("gpus", "memory_bytes", "shard", "recompute")) >= 3, seen
    assert {"batch", "micro_batches"} <= set(seen)


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
        ({"memory_bytes": 20 * MIB, "max_stages": 2}, {"shard": "auto", "gpus": 8}),
        (
            {"memory_bytes": 40 * MIB, "recompute": "none", "pin": ("wte,h.5 same stage",)},
            {"recompute": "auto", "shard": "auto", "gpus": 3},
        ),
    ],
    ids=str,
)
def test_a_gpt_that_does_not_fit_is_helped(asked: dict[str, Any], expected: dict[str, Any]) -> None:
    options = PlanOptions(gpus=2, **{"shard": "none", **asked})
    found = _remedies(gpt_profile(), local_cluster(2), options)
    assert expected in found
    for changes in found:
        assert plan(gpt_profile(), local_cluster(2), replace(options, **changes)).predicted.step_s > 0


def test_a_layer_larger_than_any_device_is_named_and_no_number_of_devices_offered() -> None:
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


def test_options_that_contradict_others_are_no_remedies() -> None:
    options = PlanOptions(gpus=2, memory_bytes=30 * MIB, micro_batches=16)
    assert all("batch" not in changes for changes in _remedies(gpt_profile(), local_cluster(2), options))
    with pytest.raises(UsageError):
        plan(gpt_profile(), local_cluster(2), replace(options, batch=8))


def test_a_limit_below_what_the_process_takes_is_told_from_one_that_layers_exceed() -> None:
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


@pytest.mark.slow
def test_the_least_shortfall_is_that_of_all_plans_for_any_number_of_stages_and_for_each() -> None:
    compared = several = 0
    for seed in range(120):
        rng = random.Random(seed)
        devices = rng.randint(2, 3)
        profile = random_profile(seed, most_layers=4, batches=(1, 2, 3, 4), skips=0.0)
        cluster = random_cluster(seed, devices)
        if seed % 3 == 0:
            profile, cluster = two_kinds(profile, cluster, seed)
        if len(profile.layers) == 1:
            continue
        options = PlanOptions(
            gpus=devices, memory_bytes=1 + seed * 9_000, **{"shard": "none", **ASKED[seed % len(ASKED)]}
        )  # type: ignore[arg-type]
        costs = CostModel(profile, cluster, options)
        every = families(costs.batch, options)
        least: dict[int | None, int] = {}
        for candidate in everything(costs, options):
            short = max(costs.shortfalls(candidate))
            for count in (None, len(candidate.stages)):
                least[count] = min(least.get(count, short), short)
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
    assert compared >= 250
    assert several >= 100


@pytest.mark.parametrize("fits", [True, False])
def test_a_plan_that_fits_is_found_wherever_there_is_one(fits: bool) -> None:
    least = closest(*_gpt(memory_bytes=1))
    assert least is not None
    costs, every, options = _gpt(memory_bytes=1 + least[0] - (not fits))
    found = closest(costs, every, options, any_fits=True)
    assert found is not None
    assert (found[0] <= 0) == fits


def _gpt(**asked: int) -> tuple[CostModel, list, PlanOptions]:  # type: ignore[type-arg]
    options = PlanOptions(gpus=4, **asked)  # type: ignore[arg-type]
    costs = CostModel(gpt_profile(), local_cluster(4), options)
    return costs, families(costs.batch, options), options
