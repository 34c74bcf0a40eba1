"""Profiles of GPUs that are not there: one kind or several, beside a measured one, and fitted to measured runs."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.api import estimates
from autopar.api.estimates import calibrate_gpu, device_kinds, estimate_profile, node_of
from autopar.errors import FileError, UsageError
from autopar.formats.cluster import Cluster
from autopar.formats.plan import Plan
from autopar.formats.profile import DeviceCosts, Profile
from autopar.hardware.clusters import cluster_named
from autopar.hardware.gpus import Gpu, find
from autopar.options.profile import ProfileOptions
from autopar.profiler.calibrate import MeasuredRun, predict, read_runs
from autopar.profiler.kernels import default_constants
from autopar.profiler.subject import Subject
from autopar.progress import no_progress
from calls import MODEL, Run, ended, well
from random_problems import gpt_profile
from subjects import gpt_subject, written_runs

A100 = find("A100")


@pytest.fixture(scope="module")
def subject() -> Subject:
    return gpt_subject()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "cpu,H100"}, "`device='cpu,H100'`: the ranks of a pipeline are all CPUs or all GPUs"),
        ({"device": "auto,H100"}, "name GPUs, and cuda for the one of this machine"),
        ({"device": "H100,H100-SXM"}, "`device='H100,H100-SXM'`: the same GPU is named twice"),
        ({"device": "H1000"}, "`device='H1000'`: none of auto, cpu and cuda, and no GPU called"),
        ({"device": "H100", "threads": 2}, "`threads=2`: says how to measure, but `device='H100'` is estimated"),
        ({"device": "H100", "budget_s": 3}, "`budget_s=3`: says how long to measure"),
        ({"device": "H100", "compile": True}, "`compile`: says how to measure"),
        (
            {"device": "cpu", "calibrate_with": Path("runs.csv")},
            "`calibrate_with='runs.csv'`: fits estimates; name a GPU",
        ),
        (
            {"device": "A100,V100", "calibrate_with": Path("runs.csv")},
            "the runs of one kind of GPU, but `device='A100,V100'` names 2",
        ),
    ],
)
def test_devices_and_options_that_do_not_go_together_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        device_kinds(ProfileOptions(**arguments))


def test_nodes_and_devices_are_told_from_kinds_and_what_is_here() -> None:
    for device, here, gpus in (
        ("cpu", "cpu", ()),
        ("A100, cuda,V100", "cuda", (A100, find("V100"))),
        ("A100", None, (A100,)),
    ):
        assert device_kinds(ProfileOptions(device=device)) == (here, gpus)
    profile = gpt_profile(blocks=1)
    assert node_of(profile) is None
    kind = profile.device.model_copy(update={"type": "cuda", "name": "NVIDIA A100-SXM4-80GB"})
    other = DeviceCosts(device=kind.model_copy(update={"name": "V100-SXM2-32G"}), layers=profile.layers)
    profile = profile.model_copy(update={"device": kind, "others": (other,)})
    for count, found in ((8, node_of(profile)), (3, node_of(profile, 3))):
        expected = cluster_named(f"{count}xA100-80G+{count}xV100")
        assert found is not None
        assert (found.devices, found.links, found.curves) == (expected.devices, expected.links, expected.curves)
    run = MeasuredRun(at="runs.csv: row 2", step_s=1.0, batch=18, devices=9)
    assert len(estimates._cluster(run, A100).devices) == 16


@pytest.mark.slow
def test_a_profile_is_estimated_with_constants_fitted_to_a_file_of_runs(subject: Subject, tmp_path: Path) -> None:
    options = ProfileOptions(batch=16, tensor=1)
    rows = ("0.02,16,1,,1", "0.05,32,4,2,4", '0.05,32,3,"0-5:1,6-13:2",4')
    path = written_runs(tmp_path, "step_s,batch,devices,stages,micro_batches", *rows)
    usual = estimate_profile(subject, A100, options, no_progress)
    fitted = estimate_profile(subject, A100, replace(options, calibrate_with=path), no_progress)
    assert any(note.startswith("constants fitted to 3 measured runs: median error") for note in fitted.notes)
    slow, quick = (sum(layer.costs[0].forward_s for layer in each.layers) for each in (fitted, usual))
    assert slow > quick
    again = estimate_profile(subject, A100, options, no_progress)
    assert again == usual.model_copy(update={"read_s": again.read_s, "collate_s": again.collate_s})


@pytest.mark.slow
def test_constants_of_runs_of_teams_are_found_again(subject: Subject, tmp_path: Path) -> None:
    columns, options = "step_s,batch,devices,stages,micro_batches,tensor,sequence_parallel,recompute", ProfileOptions()
    rows = (
        "32,2,1,2,2,,",
        '32,6,"0-5:1x2,6-13:2x2",2,,true,',
        "64,4,2,2,2,,full",
        "64,2,2,4,,,0-5",
        "128,4,1,2,2,yes,",
    )
    path = written_runs(tmp_path, columns, *(f"1,{row}" for row in rows))
    truth = replace(default_constants(A100), forward_launch_s=30e-6, backward_launch_s=14e-6, step_s=2e-3)
    steps = predict(estimates._observe(subject, A100, list(read_runs(path)), no_progress), truth)
    path = written_runs(tmp_path, columns, *(f"{step_s},{row}" for step_s, row in zip(steps, rows, strict=True)))
    found = calibrate_gpu(subject, A100, options, path, no_progress)
    assert found.error_after < 0.02 < 0.1 < found.error_before
    assert found.constants.forward_launch_s == pytest.approx(30e-6, rel=0.15)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("1,8,3,2,1,,", "row 2, column stages: 2 equal stages cannot be made of 14 layers on 3 devices"),
        ("1,8,2,0-99:2,1,,", "row 2, column stages: stage 0 names layer 99"),
        ("1,8,99999,,1,,", "row 2, column devices: .* less than or equal to 65536, found .99999"),
        ("1,8,3,0-13:2,1,,", "row 2, column devices: 3, but the stages have 2"),
        ("1,8,4,,8,,", "row 2, column micro_batches: a micro-batch of 1 samples has none for some of 4 replicas"),
        ("1,8,4,,1,2xA100,", "row 2, column devices: 4, but the cluster has 2"),
        ("1,8,1,,1,8xA1000,", "row 2, column cluster: .*no GPU called"),
        ("1,8,1,,1,,nowhere.py", "row 2, column model: .*nowhere.py"),
        ("1,8,1,,1,,,0-99", "row 2, column recompute: '0-99' is not of layers 0 to 13, each named once"),
        ("1,8,1,,1,,,3-2", "row 2, column recompute: '3-2' is not of layers 0 to 13"),
        ("1,8,4,0-13:1x3,1,,", "row 2, column devices: 4, but the stages have 3"),
        ("1,8,3,0-13:1x3,1,,", "row 2, column stages: nothing in stage 0 .* splits in 3 parts; the profile has splits"),
        ("1,8,4,4,1,,,,2", "row 2, column stages: 4 equal stages cannot .* on 4 devices, 2 to a replica"),
        ("1,8,3,,1,,,,3", "row 2, column tensor: nothing in stage 0 .* splits in 3 parts; the profile has splits in 2"),
        ("1,8,2,,1,,,,,1", "row 2, column stages: `sequence_parallel` is of `stages` with several devices a replica"),
        ('1,8,1,,1,,,"0-3,2"', "row 2, column recompute: '0-3,2' is not of layers"),
    ],
)
def test_a_run_that_cannot_be_is_named_by_row_and_column(subject: Subject, tmp_path: Path, row: str, said: str) -> None:
    path = written_runs(
        tmp_path, "step_s,batch,devices,stages,micro_batches,cluster,model,recompute,tensor,sequence_parallel", row
    )
    with pytest.raises(FileError, match=said):
        calibrate_gpu(subject, A100, ProfileOptions(batch=8), path, no_progress)


def test_kinds_that_are_not_there_are_estimated_together_as_they_are_apart(run: Run) -> None:
    Path("m.py").write_text(MODEL)
    for name in ("A100-80G", "V100"):
        well(run, "profile", "m.py", "--batch", "2", "--tensor", "1", "--device", name, "-o", f"{name}.json")
    well(
        run,
        "profile",
        "m.py",
        "--batch",
        "2",
        "--tensor",
        "1",
        "--device",
        "A100-80G,V100",
        "--ranks",
        "2",
        "--overwrite",
    )
    together = Profile.load("profile.json")
    well(run, "import", "profiles", "A100-80G.json", "V100.json", "-o", "joined.json")
    joined = Profile.load("joined.json")
    # What a sample takes is measured each time.
    assert joined == together.model_copy(update={"read_s": joined.read_s, "collate_s": joined.collate_s})
    cluster = Cluster.load("cluster.json")
    assert [device.type for device in cluster.devices] == ["A100-SXM-80G"] * 2 + ["V100-SXM2-32G"] * 2
    well(run, "plan", "--cluster", "2xV100+2xA100-80G:10Gbps")


OWN = """
[[gpu]]
name = "Lab X1"
architecture = "ampere"
fp32 = "39TFLOP/s"
fp16 = "624TFLOP/s"
memory = "160GB"
memory_bandwidth = "4078GB/s"
host = "31.5GB/s"

[[nodes]]
gpus = 2
gpu = "Lab X1"

[[nodes]]
gpus = 2
gpu = "A100-80G"

[network]
bandwidth = "100Gbps"
"""


def test_gpus_of_a_cluster_file_are_estimated_and_planned_for_as_those_of_the_table(run: Run) -> None:
    Path("m.py").write_text(MODEL)
    Path("lab.toml").write_text(OWN)
    well(run, "profile", "m.py", "--batch", "2", "--tensor", "1", "--device", "lab.toml")
    profile = Profile.load("profile.json")
    (own, known), layers = profile.kinds, [kind.layers for kind in profile.kinds]
    assert [own.device.name, known.device.name] == ["Lab X1", "A100-SXM-80G"]
    assert own.device.memory_bytes == 2 * known.device.memory_bytes
    updates_s = [sum(layer.update_s for layer in each) for each in layers]
    assert updates_s[1] == pytest.approx(2 * updates_s[0])
    well(run, "plan", "--cluster", "lab.toml", "--use-all")
    assert [node.type for node in Plan.load("plan.json").nodes] == ["Lab X1", "A100-SXM-80G"]
    runs = written_runs(Path(), "step_s,batch,devices", "0.1,8,1")
    ended(run, 2, "names 2; profile each", "profile", "m.py", "--device", "lab.toml", "--calibrate-with", str(runs))
    Path("lab.toml").write_text(OWN.replace("624TFLOP/s", "6TFLOP/s"))
    ended(run, 4, "lab.toml: $.gpu[0].fp16: less than of float32", "profile", "m.py", "--device", "lab.toml")


def test_the_gpu_that_is_there_is_measured_beside_estimated_ones(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []

    def estimated(subject: Subject, gpu: Gpu, options: ProfileOptions, *_: object) -> Profile:
        order.append(gpu.name)
        return estimate_profile(subject, gpu, options, no_progress)

    def measured(subject: Subject, options: ProfileOptions, *_: object) -> Profile:
        order.append(options.device)
        found = estimate_profile(subject, find("H100"), options, no_progress)
        device = found.device.model_copy(update={"name": "NVIDIA H100 80GB HBM3"})
        return found.model_copy(update={"device": device, "notes": ("measured",)})

    monkeypatch.setattr("autopar.profiler.device.choose", lambda name: name)
    # The package has a function of the module's name.
    monkeypatch.setattr(sys.modules["autopar.profiler.profile"], "measure_layers", measured)
    monkeypatch.setattr("autopar.api.estimates.estimate_profile", estimated)
    Path("m.py").write_text(MODEL)
    well(run, "profile", "m.py", "--batch", "2", "--tensor", "1", "--device", "A100-80G,cuda", "--ranks", "4")
    # What is measured comes last, as the model moves to the device, and first in the file.
    assert order == ["A100-SXM-80G", "cuda"]
    profile = Profile.load("profile.json")
    assert (profile.device.name, profile.notes[0]) == ("NVIDIA H100 80GB HBM3", "measured")
    assert [other.device.name for other in profile.others] == ["A100-SXM-80G"]
    assert [device.type for device in Cluster.load("cluster.json").devices] == ["H100-SXM"] * 4 + ["A100-SXM-80G"] * 4
    said = "which --device cuda has costs for; name every kind of device once"
    ended(run, 4, said, "profile", "m.py", "--batch", "2", "--tensor", "1", "--device", "cuda,H100")
