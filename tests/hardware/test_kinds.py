"""Profiles of several kinds of devices, joined or estimated; and those of one kind on clusters of another."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import FileError, UsageError
from autopar.formats.cluster import Cluster, Device
from autopar.formats.plan import Plan
from autopar.formats.profile import DeviceCosts, DeviceKind, Noise, Profile
from autopar.hardware.clusters import cluster_named
from autopar.hardware.gpus import GPUS
from autopar.hardware.kinds import NamedProfile, join_profiles
from autopar.planner import PlanOptions, plan, simulate
from autopar.planner.comparison import compare
from autopar.planner.costs.model import CostModel
from calls import Run, refused, well
from profiled import times_as_long
from random_problems import gpt_profile, local_cluster, random_profile


def on(*names: str) -> Profile:
    """A small GPT on some kinds of devices, each slower than the one before."""
    found = gpt_profile(blocks=2, batch=4)
    devices = [DeviceKind(type="cpu" if "cpu" in name else "cuda", name=name, memory_bytes=2**34) for name in names]
    others = [
        DeviceCosts(device=each, layers=times_as_long(found, at + 2).layers) for at, each in enumerate(devices[1:])
    ]
    return found.model_copy(update={"device": devices[0], "others": tuple(others)})


def of(*types: str) -> Cluster:
    devices = tuple(Device(type=name, memory_bytes=2**34) for name in types)
    return local_cluster(1).model_copy(update={"devices": devices})


def test_names_of_one_kind_are_that_kind_and_another_beside_it_is_its_own() -> None:
    aliases = [(gpu.name, alias) for gpu in GPUS for alias in gpu.aliases]
    others = [("NVIDIA H100 80GB HBM3", "cuda"), ("cpu of mine", "cpu"), ("H100", "h100_sxm")]
    for profiled, planned in (*aliases, *((alias, name) for name, alias in aliases), *others):
        costs = CostModel(on(profiled), of(planned), PlanOptions())
        assert (costs.notes, costs.stands) == ([], None), (profiled, planned)
        assert PlanOptions(times_of=planned).times_of == planned
    profile, cluster = on("H100"), of("H100", "A100", "V100")
    with pytest.raises(FileError, match=r"\$\.devices\[1\]\.type: the profile has no costs for 'A100'.*`times_of"):
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


@pytest.mark.parametrize(
    ("profiled", "planned"),
    [
        ("H100", ["A100"]),
        # Their memories differ in size and in speed, and so do the times of what moves bytes.
        ("NVIDIA A100-SXM4-40GB", ["A100-80G"]),
        ("A100-80G", ["A100-40G", "A100-40G"]),
        ("H200", ["H100"]),
        ("cpu of mine", ["H100"]),
        ("H100", ["cpu"]),
        ("H100", ["A100", "V100"]),
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
    [("my accelerator", "H100"), ("H100", "my accelerator"), ("cpu of mine", "big iron"), ("cpu of mine", "cuda")],
)
def test_a_name_that_no_table_knows_is_taken_with_a_note(profiled: str, planned: str) -> None:
    found = plan(on(profiled), of(planned))
    assert found.times_of is None
    assert f"the profile is of {profiled}, but the cluster has {planned}: times are {profiled}'s" in found.notes
    meant = plan(on(profiled), of(planned), PlanOptions(times_of=profiled))
    assert meant.times_of == profiled
    assert f"times of {profiled} stand for {planned}, as asked (`times_of`)" in meant.notes
    assert meant.predicted == found.predicted


def test_a_plan_says_in_which_nodes_its_devices_are_and_what_they_are_called() -> None:
    def nodes(profile: Profile, cluster: Cluster, **options: object) -> list[tuple[int, str, int, int]]:
        return [
            (each.node, each.type, each.memory_bytes >> 30, each.count)
            for each in plan(profile, cluster, replace(PlanOptions(), **options)).nodes  # type: ignore[arg-type]
        ]

    two = cluster_named("1x2xH100+1x1xV100:100Gbps")
    assert nodes(on("H100", "Tesla V100-SXM2-32GB"), two) == [(0, "H100", 74, 2), (1, "Tesla V100-SXM2-32GB", 29, 1)]
    assert nodes(on("cpu of mine"), of("cpu"), gpus=3) == [(0, "cpu of mine", 16, 3)]
    assert nodes(on("H100"), of("A100", "A100"), times_of="H100") == [(0, "A100", 16, 2)]
    assert nodes(on("H100", "V100"), of("cuda", "A100"), times_of="V100") == [(0, "V100", 16, 1), (0, "A100", 16, 1)]
    assert nodes(on("my accelerator"), of("H100")) == [(0, "H100", 16, 1)]
    assert nodes(on("H100"), of("my accelerator")) == [(0, "H100", 16, 1)]
    found = plan(on("H100", "V100"), two.model_copy(update={"devices": two.devices[::-1]}))
    known = {device: each.type for device, each in zip(found.devices, found.places, strict=True)}
    assert known == {device: ("V100", "H100", "H100")[device] for device in found.devices}


def test_times_stand_in_for_what_is_missing_and_memory_is_the_clusters_own() -> None:
    profile = on("H100", "V100")
    cluster = of("A100", "A100")
    with pytest.raises(UsageError, match="times of H100-SXM and V100-SXM2-32G only"):
        plan(profile, cluster)
    quick, slow = (plan(profile, cluster, PlanOptions(times_of=name)) for name in ("h100-sxm", "V100"))
    assert (quick.times_of, slow.times_of) == ("H100", "V100")
    assert quick.predicted.step_s < slow.predicted.step_s
    assert quick.predicted.step_s == plan(on("H100"), of("H100", "H100")).predicted.step_s
    profile = on("H100")
    model = CostModel(profile, cluster_named("1xH100+1xA100-40G:100Gbps"), PlanOptions(times_of="H100"))
    assert model.limits_bytes == [80 * 10**9, 40 * 10**9]
    assert model.kind_of == [0, 1]
    assert [kind.name for kind in model.kinds] == ["H100", "A100-SXM-40G"]


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


@pytest.mark.parametrize("seed", range(3))
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


Edit = Callable[[dict[str, Any]], object]


def on_cpu(name: str, factor: float = 1.0) -> Profile:
    """A small GPT on another kind of CPU."""
    profile = times_as_long(gpt_profile(blocks=4, batch=8), factor)
    return profile.model_copy(update={"device": DeviceKind(type="cpu", name=name, memory_bytes=2**34)})


@pytest.fixture
def run(run: Run) -> Run:
    """Run autopar in a folder that holds profiles of two kinds; return (exit code, stdout, stderr)."""
    on_cpu("quick").save("quick.json")
    on_cpu("slow", 3.0).save("slow.json")
    return run


def test_joined_profiles_hold_and_show_every_kind_and_keep_what_is_worst(run: Run) -> None:
    out, err = well(run, "import", "profiles", "quick.json", "slow.json", "--json")
    profile = Profile.load("profile.json")
    assert out == profile.dumps()
    assert "Written: profile.json, 6 layers on quick, slow" in err
    assert profile.layers == on_cpu("quick").layers
    assert [(other.device.name, other.layers) for other in profile.others] == [("slow", on_cpu("slow", 3.0).layers)]
    _, err = well(run, "show", "profile.json")
    assert "on quick and slow" in err
    assert re.search(r" slow 16 GiB .* 3\.00 measured", err)
    kinds = [on_cpu(name) for name in ("a", "b", "c")]
    kinds[1] = kinds[1].model_copy(update={"step_overhead_s": 9.0, "noise": Noise(median_spread=0.5, max_spread=0.6)})
    kinds[2] = kinds[2].model_copy(update={"notes": ("slowed", "c: seen")})
    first = join_profiles([NamedProfile("a.json", kinds[0]), NamedProfile("b.json", kinds[1])])
    every = join_profiles([NamedProfile("ab.json", first), NamedProfile("c.json", kinds[2])])
    assert [other.device.name for other in every.others] == ["b", "c"]
    assert (every.step_overhead_s, every.noise.median_spread, every.noise.max_spread) == (9.0, 0.5, 0.6)
    assert every.notes == ("c: slowed", "c: seen")
    assert Profile.parse(every.dumps(), Path("profile.json")) == every


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda it: it["model"].update(sha256="1" * 64), 'slow.json: $.model.sha256 is "111'),
        (lambda it: it["device"].update(type="cuda"), '$.device.type is "cuda", and "cpu" in quick.json; the ranks of'),
        (lambda it: it["device"].update(threads=2), "$.device.threads is 2, and 1 in quick.json; profile with"),
        (lambda it: it["device"].update(name="quick"), '$.device.name is "quick", which quick.json has costs for'),
        (lambda it: it.update(precision="bf16"), '$.precision is "bf16", and "fp32" in quick.json; profile with the'),
        (lambda it: it.update(batch=4), "$.batch is 4, and 8 in quick.json; profile with the same --batch"),
        (lambda it: it.update(compiled=True), "$.compiled is true"),
        (lambda it: it.update(updates_at_once=True), "$.updates_at_once is true"),
        (lambda it: it["layers"][2].update(parameters_bytes=1), "$.layers[2].parameters_bytes is 1, and "),
        (lambda it: it["tensors"][1].update(bytes_per_sample=1), "$.tensors[1].bytes_per_sample is 1, and "),
        (lambda it: it["tied"].clear(), "the length of $.tied is 0, and 1 in quick.json"),
    ],
)
def test_profiles_that_differ_beyond_the_device_are_refused_where_they_do(run: Run, edit: Edit, message: str) -> None:
    content = json.loads(Path("slow.json").read_text())
    edit(content)
    Path("slow.json").write_text(json.dumps(content))
    refused(run, 4, message, "import", "profiles", "quick.json", "slow.json")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("import", "profiles", "quick.json"), 2, "quick.json is the only profile; name one for each kind"),
        (("import", "profiles", "quick.json", "none.json"), 4, "none.json: no such file; name one"),
        (
            ("import", "layout", "quick.json", "slow.json"),
            2,
            "slow.json is a second file; layout profiles are read one",
        ),
    ],
    ids=str,
)
def test_bad_input_gets_a_line_and_its_exit_code(run: Run, arguments: tuple[str, ...], code: int, message: str) -> None:
    refused(run, code, message, *arguments)


def test_a_plan_says_which_kind_each_stage_is_on_and_names_what_the_profile_lacks(run: Run) -> None:
    well(run, "import", "profiles", "quick.json", "slow.json")
    of("slow", "quick").save("cluster.json")
    _, err = well(run, "plan", "--stages", "0-2:1,3-5:1")
    assert [stage.types for stage in Plan.load("plan.json").stages] == [("slow",), ("quick",)]
    assert " on slow: stage 0; on quick: stage 1 " in err
    well(run, "simulate")
    well(run, "show", "plan.json")
    well(run, "plan", "quick.json", "--stages", "0-5:1", "--cluster", "cluster.json", "--gpus", "1")
    assert [stage.types for stage in Plan.load("plan.json").stages] == [()]
    well(run, "import", "profiles", "quick.json", "slow.json")
    of("slow", "other").save("cluster.json")
    said = "$.devices[1].type: the profile has no costs for 'other', only for quick, slow; estimate them with"
    refused(run, 4, said, "plan")
    refused(run, 4, "`autopar import profiles`", "plan")
    of("slow", "cpu").save("cluster.json")
    refused(run, 4, "$.devices[1].type: 'cpu' may be any of quick, slow", "plan")
    Path("cluster.json").unlink()
    well(run, "plan", "--gpus", "2")


def test_a_gpus_names_are_its_own_and_pipelines_on_unlike_devices_are_compared(run: Run) -> None:
    gpu = DeviceKind(type="cuda", name="NVIDIA A100-SXM4-80GB", memory_bytes=80 * 10**9)
    on_cpu("quick").model_copy(update={"device": gpu}).save("a100.json")
    well(run, "plan", "a100.json", "--cluster", "2xA100-80G")
    assert not any("times are" in note for note in Plan.load("plan.json").notes)
    on_cpu("quick").model_copy(update={"device": gpu.model_copy(update={"name": "A100"})}).save("same.json")
    said = '$.device.name is "A100", which a100.json has costs for'
    refused(run, 4, said, "import", "profiles", "a100.json", "same.json")
    well(run, "import", "profiles", "quick.json", "slow.json")
    of("slow", "quick", "slow", "quick").save("cluster.json")
    out, _ = well(run, "compare", "--json")
    (row,) = (each for each in json.loads(out) if each["name"] == "HetPipe")
    assert row["infeasible"] == "not priced: its stages share wte.weight"
    for name in ("quick", "slow"):
        Profile.load(f"{name}.json").model_copy(update={"tied": ()}).save(f"{name}.json")
    well(run, "import", "profiles", "quick.json", "slow.json")
    out, err = well(run, "compare", "--json")
    (row,) = (each for each in json.loads(out) if "waves" in each)
    assert row["name"] == "HetPipe"
    assert row["waves"].startswith("HetPipe's ED, of 2 pipelines, in waves of 2")
    assert all(
        sorted(stage.partition("@")[2] for stage in own.split(",")) == ["quick", "slow"]
        for own in row["stages"].split("/")
    )
    assert "note: several pipelines (policy wsp) are never flushed" in err
    well(run, "plan", "--policy", "wsp", "--stages", row["stages"])
    assert Plan.load("plan.json").predicted.step_s == pytest.approx(2 * row["step_s"])


def test_a_kind_that_the_profile_lacks_is_refused_by_every_command_until_it_is_meant(run: Run) -> None:
    gpu = DeviceKind(type="cuda", name="NVIDIA H100 80GB HBM3", memory_bytes=80 * 10**9)
    on_cpu("quick").model_copy(update={"device": gpu}).save("profile.json")
    cluster = "2xA100"
    message = (
        "autopar: the cluster has A100-SXM-80G, and the profile has times of H100-SXM only: profile with --device "
        "A100-SXM-80G, or plan with --times-of H100-SXM if its times are to stand for those of A100-SXM-80G\n"
    )
    well(run, "plan", "--cluster", "2xH100")
    for command in ("plan", "compare", "simulate"):
        assert run(command, "--cluster", cluster) == (2, "", message)
    note = "note: times of NVIDIA H100 80GB HBM3 stand for A100-SXM-80G"
    assert note in well(run, "simulate", "--cluster", cluster, "--times-of", "h100", "--json")[1]
    refused(run, 2, "leave it out", "simulate", "--times-of", "H100")
    for command in ("plan", "compare"):
        said = well(run, command, "--cluster", cluster, "--times-of", "H100")[1]
        assert f"{note}, as asked (--times-of)" in said
        refused(run, 2, "name one of them", command, "--cluster", cluster, "--times-of", "V100")
        refused(run, 2, "leave it out", command, "--cluster", "2xH100", "--times-of", "H100")
    made = Plan.load("plan.json")
    assert made.times_of == "NVIDIA H100 80GB HBM3"
    out, err = well(run, "simulate", "--json")
    assert (note in err, json.loads(out)["step_s"]) == (True, made.predicted.step_s)
    well(run, "show", "plan.json", "--png", "step.png")
    said = "times of NVIDIA H100 80GB HBM3 stand for other devices (--times-of)"
    refused(run, 2, said, "run", "--update-profile")
