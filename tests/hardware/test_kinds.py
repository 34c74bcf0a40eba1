"""Profiles of one kind of device on clusters of another: refused where both are known, unless times are to stand."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from autopar.errors import FileError, UsageError
from autopar.formats.cluster import Cluster, Device
from autopar.formats.profile import DeviceCosts, DeviceKind, Profile
from autopar.hardware.clusters import cluster_named
from autopar.hardware.gpus import GPUS
from autopar.planner import PlanOptions, plan, simulate
from autopar.planner.costs.model import CostModel
from autopar.planner.plan import compare
from random_problems import gpt_profile, local_cluster, random_profile


def on(*names: str) -> Profile:
    """A small GPT on some kinds of devices, each slower than the one before."""
    found = gpt_profile(blocks=2, batch=4)
    devices = [
        DeviceKind(type="cpu" if name.startswith("cpu") else "cuda", name=name, memory_bytes=2**34) for name in names
    ]
    others = []
    for index, device in enumerate(devices[1:]):
        layers = [
            layer.model_copy(
                update={
                    "costs": tuple(
                        cost.model_copy(update={"forward_s": (index + 2) * cost.forward_s}) for cost in layer.costs
                    )
                }
            )
            for layer in found.layers
        ]
        others.append(DeviceCosts(device=device, layers=tuple(layers)))
    return found.model_copy(update={"device": devices[0], "others": tuple(others)})


def of(*types: str) -> Cluster:
    return local_cluster(1).model_copy(update={"devices": tuple(Device(type=t, memory_bytes=2**34) for t in types)})


@pytest.mark.parametrize(
    ("profiled", "planned"),
    [(gpu.name, alias) for gpu in GPUS for alias in gpu.aliases]
    + [(alias, gpu.name) for gpu in GPUS for alias in gpu.aliases]
    + [("NVIDIA H100 80GB HBM3", "cuda"), ("cpu of mine", "cpu"), ("H100", "h100_sxm")],
)
def test_names_of_one_kind_are_that_kind(profiled: str, planned: str) -> None:
    costs = CostModel(on(profiled), of(planned), PlanOptions())
    assert (costs.notes, costs.stands) == ([], None)
    assert PlanOptions(times_of=planned).times_of == planned


@pytest.mark.parametrize(
    ("profiled", "planned"),
    [
        ("H100", ["A100"]),
        ("NVIDIA H100 80GB HBM3", ["A100-SXM-80G"]),
        # Their memories differ in size and in speed, and so do the times of what moves bytes.
        ("NVIDIA A100-SXM4-40GB", ["A100-80G"]),
        ("A100-80G", ["A100-40G", "A100-40G"]),
        ("H200", ["H100"]),
        ("cpu of mine", ["H100"]),
        ("H100", ["cpu"]),
        ("H100", ["A100", "V100"]),
        ("cpu of mine", ["A100", "V100"]),
    ],
)
@pytest.mark.reliability(55)
def test_one_known_kind_on_another_is_refused_with_remedies_that_work(profiled: str, planned: list[str]) -> None:
    profile, cluster = on(profiled), of(*planned)
    with pytest.raises(UsageError) as caught:
        plan(profile, cluster)
    text = str(caught.value)
    assert "\n" not in text
    with pytest.raises(UsageError, match=re.escape(text)):
        compare(profile, cluster)
    typed = re.search(r"`times_of='(\S+)'`", text)
    device = re.search(r"profile with `device='(\S+)'`,", text)
    assert typed is not None
    assert device is not None
    found = plan(profile, cluster, PlanOptions(times_of=typed[1]))
    assert found.times_of == profiled
    assert any(note.startswith(f"times of {profiled} stand for ") for note in found.notes)
    assert simulate(found, profile, cluster).end_s == found.predicted.step_s
    assert compare(profile, cluster, PlanOptions(times_of=typed[1])).plan.times_of == profiled
    if device[1] not in ("cpu", "cuda"):
        assert plan(on(*device[1].split(",")), cluster).times_of is None
    with pytest.raises(UsageError, match="`times_of="):
        simulate(found.model_copy(update={"times_of": None}), profile, cluster)


@pytest.mark.parametrize(
    ("profiled", "planned"),
    [
        ("my accelerator", "H100"),
        ("my accelerator", "cpu"),
        ("H100", "my accelerator"),
        ("cpu of mine", "big iron"),
        ("cpu of mine", "cuda"),
    ],
)
def test_a_name_that_no_table_knows_is_taken_with_a_note(profiled: str, planned: str) -> None:
    found = plan(on(profiled), of(planned))
    assert found.times_of is None
    assert f"the profile is of {profiled}, but the cluster has {planned}: times are {profiled}'s" in found.notes
    meant = plan(on(profiled), of(planned), PlanOptions(times_of=profiled))
    assert meant.times_of == profiled
    assert f"times of {profiled} stand for {planned}, as asked (`times_of`)" in meant.notes
    assert meant.predicted == found.predicted


def test_of_several_kinds_the_one_that_is_named_stands_for_what_is_missing() -> None:
    profile = on("H100", "V100")
    cluster = of("A100", "A100")
    with pytest.raises(UsageError, match="times of H100-SXM and V100-SXM2-32G only"):
        plan(profile, cluster)
    quick, slow = (plan(profile, cluster, PlanOptions(times_of=name)) for name in ("h100-sxm", "V100"))
    assert (quick.times_of, slow.times_of) == ("H100", "V100")
    assert quick.predicted.step_s < slow.predicted.step_s
    alone = plan(on("H100"), of("H100", "H100"))
    assert quick.predicted.step_s == alone.predicted.step_s


def test_a_stand_in_beside_the_kind_that_it_is_of_stays_a_kind_of_its_own() -> None:
    profile, cluster = on("H100"), of("H100", "A100", "V100")
    with pytest.raises(
        FileError, match=r"\$\.devices\[1\]\.type: the profile has no costs for 'A100'.*`times_of='H100"
    ):
        plan(profile, cluster)
    options = PlanOptions(times_of="H100", pin=("h.0 on V100",))
    found = plan(profile, cluster, replace(options, min_stages=2))
    stage = next(stage for stage in found.stages if "h.0" in stage.layers)
    assert stage.types == ("V100",)
    assert cluster.devices[stage.devices[0]].type == "V100"
    assert found.times_of == "H100"
    assert any("times of H100 stand for A100, V100" in note for note in found.notes)
    with pytest.raises(UsageError, match=r"h\.0 on V100"):
        plan(profile, cluster, replace(options, stages="0-1:1,2-3:1"))


def test_a_kind_that_stands_for_nothing_or_that_the_profile_lacks_is_refused() -> None:
    for times_of, cluster, message in [
        ("H100", of("H100", "H100"), "the profile has times of all devices to plan for (H100); leave it out"),
        ("cuda", of("cuda"), "leave it out"),
        ("V100", of("A100"), "`times_of='V100'`: the profile has times of H100-SXM only; name one of them"),
        ("", of("A100"), "name one of them"),
        ("cpu", of("A100"), "name one of them"),
    ]:
        for ask in (plan, compare):
            with pytest.raises(UsageError) as caught:
                ask(on("H100"), cluster, PlanOptions(times_of=times_of))
            assert message in str(caught.value)
    with pytest.raises(UsageError, match="`times_of='cuda'`: the profile has times of H100-SXM and V100-SXM2-32G only"):
        plan(on("H100", "V100"), of("A100"), PlanOptions(times_of="cuda"))


@pytest.mark.parametrize("objective", ["step", "throughput"])
def test_every_objective_refuses_and_records(objective: str) -> None:
    profile, cluster = on("H100"), of("A100", "A100")
    options = PlanOptions(objective=objective)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="plan with `times_of='H100-SXM'`"):
        plan(profile, cluster, options)
    assert plan(profile, cluster, replace(options, times_of="H100")).times_of == "H100"


def test_memory_is_the_clusters_own_where_times_stand_in() -> None:
    profile = on("H100")
    model = CostModel(profile, cluster_named("1xH100+1xA100-40G:100Gbps"), PlanOptions(times_of="H100"))
    assert model.limits_bytes == [80 * 10**9, 40 * 10**9]
    assert model.kind_of == [0, 1]
    assert [kind.name for kind in model.kinds] == ["H100", "A100-SXM-40G"]


@pytest.mark.parametrize("seed", range(6))
def test_a_plan_with_stand_ins_is_that_of_a_profile_that_holds_the_times_twice(seed: int) -> None:
    profile = random_profile(seed, most_layers=4)
    profile = profile.model_copy(update={"device": DeviceKind(type="cuda", name="H100", memory_bytes=2**34)})
    other = DeviceKind(type="cuda", name="A100", memory_bytes=2**34)
    both = profile.model_copy(update={"others": (DeviceCosts(device=other, layers=profile.layers),)})
    cluster = of("H100", "A100", "A100")
    options = PlanOptions(gap=0.0)
    found = plan(profile, cluster, replace(options, times_of="H100"))
    expected = plan(both, cluster, options)
    assert (found.predicted, found.stages) == (expected.predicted, expected.stages)
