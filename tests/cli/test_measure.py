"""``autopar profile``, what it writes and how it refuses; ``cluster``, probing alone and under torchrun, listing."""

import json
import os
from pathlib import Path

import pytest

from autopar.formats.cluster import Cluster, Device, Link
from autopar.formats.profile import Profile
from autopar.hardware.clusters import cluster_named
from autopar.hardware.gpus import GPUS
from calls import MODEL, Run, ended, files, refused, well
from launched import torchrun
from suite import warm

BF16 = ("--precision", "bf16")
MASKED = "(output.masked_fill(output > 0, torch.finfo(output.dtype).min) - batch[1])"


@pytest.fixture
def run(run: Run) -> Run:
    """Run autopar in a folder that holds a model; return (exit code, stdout, stderr)."""
    for path in Path().iterdir():
        path.unlink()
    Path("model.py").write_text(MODEL)
    return run


def test_profile_and_cluster_are_written_and_float64_is_not_estimated(run: Run) -> None:
    Path("out").mkdir()
    asked = ("profile", "model.py", "--batch", "4", "--device", "A100", "-o", "out/p.json")
    out, _ = well(run, *asked, "--json")
    profile = Profile.load("out/p.json")
    assert profile.model.source == "../model.py"
    assert out == profile.dumps()
    assert len(Cluster.load("out/cluster.json").devices) >= 1
    refused(run, 2, "--overwrite", *asked)
    double = MODEL.replace("Linear(4, 1))", "Linear(4, 1)).double()").replace("ones(8, 2)", "ones(8, 2).double()")
    Path("model.py").write_text(double)
    code, _, err = run(*ESTIMATED)
    assert code == 2
    assert "--device A100-SXM-80G: the parameters of model.py are float64, and no rate of A100" in err
    assert err.endswith("build them in float32, or profile on a device that is there\n")


@pytest.mark.parametrize(
    ("replaced", "by", "options", "code", "message"),
    [
        ("def model():", "def model(:", (), 4, "model.py:3: invalid syntax"),
        ("ones(8", "ones(3", ("--batch", "4"), 2, "the dataset has 3 samples"),
        ("    return torch.nn.Sequential", "    return torch.nn.ReLU() or torch.nn.Sequential", (), 4, "no parameter"),
        ("(output - batch[1])", MASKED, BF16, 4, "does not run"),
        ("", "", ("--ranks", "1"), 2, "at least 2 ranks"),
        ("", "", ("-o", "none/p.json"), 4, "no such folder"),
        ("", "", ("--budget", "0"), 2, "--budget must be positive seconds, found 0.0"),
    ],
)
@pytest.mark.reliability(35, 44, 46)
def test_bad_input_is_one_line_an_exit_code_and_no_file(
    run: Run, replaced: str, by: str, options: tuple[str, ...], code: int, message: str
) -> None:
    Path("model.py").write_text(MODEL.replace(replaced, by) if replaced else MODEL)
    given = options if "--batch" in options else ("--batch", "4", *options)
    before = files()
    ended(run, code, message, "profile", "model.py", *given, *(() if "--device" in options else ("--device", "cpu")))
    assert files() == before


def links(name: str, device: str = "cpu") -> str:
    link = Link(level="node", latency_s=1e-6, bytes_per_s=1e9)
    return Cluster(name=name, devices=(Device(type=device, memory_bytes=10**9),) * 2, links=(link,)).dumps()


ESTIMATED = ("profile", "model.py", "--batch", "2", "--tensor", "1", "--device", "A100")
MEASURED = ("profile", "model.py", "--batch", "2", "--tensor", "1", "--device", "cpu")


@pytest.mark.usefixtures("quick")
def test_links_that_were_probed_are_kept_which_is_said_and_replaced_where_that_is_asked(run: Run) -> None:
    for device, asked, said in (
        ("cpu", MEASURED, "wrote; --overwrite"),
        ("cpu", ESTIMATED, "whose devices are cpu, not cuda"),
        ("cuda", ESTIMATED, "wrote; -"),
    ):
        before = links("probed", device)
        Path("cluster.json").write_text(before)
        Path("profile.json").unlink(missing_ok=True)
        _, err = well(run, *asked)
        assert Path("cluster.json").read_text() == before
        for expected in ("Kept: cluster.json, which `autopar cluster probe`", said, "Written: profile.json;"):
            assert expected in err
    asked = (*ESTIMATED, "--ranks", "4")
    refused(run, 2, "--ranks 4: cluster.json holds links that `autopar cluster probe` measured", *asked)
    well(run, *asked, "--overwrite")
    assert len(Cluster.load("cluster.json").devices) == 4


@pytest.mark.usefixtures("quick")
def test_links_of_an_earlier_profile_are_replaced_and_those_that_one_gpu_leaves_are_mentioned(run: Run) -> None:
    for text in (links("local"), "not a cluster"):
        Path("cluster.json").write_text(text)
        assert "profile.json and cluster.json" in well(run, *ESTIMATED)[1]
        assert Cluster.load("cluster.json").devices[0].type == "A100-SXM-80G"
    Path("cluster.json").write_text(links("local"))
    assert "note: cluster.json was there before and is not of this profile" in well(run, *MEASURED)[1]
    assert Path("cluster.json").read_text() == links("local")
    Path("cluster.json").unlink()
    assert "was there before" not in well(run, *MEASURED)[1]


@pytest.mark.usefixtures("quick")
def test_links_of_another_profile_are_kept_and_replaced_where_that_is_asked(run: Run) -> None:
    Path("other.json").write_text('{"format": "autopar.plan", "profile": "autopar.profile"}')
    well(run, *MEASURED, "-o", "here.json")
    before = links("local")
    Path("cluster.json").write_text(before)
    _, err = well(run, *ESTIMATED, "-o", "there.json")
    kept = "Kept: cluster.json, which `autopar profile --output here.json` wrote and whose devices are cpu, not cuda"
    assert kept in err
    assert "Written: there.json;" in err
    assert Path("cluster.json").read_text() == before
    said = "--ranks 4: cluster.json holds links that `autopar profile --output here.json` measured"
    refused(run, 2, said, *ESTIMATED, "-o", "there.json", "--ranks", "4")
    assert "Kept" not in well(run, *ESTIMATED, "-o", "gpu.json", "--cluster-output", "gpus.json")[1]
    assert Path("cluster.json").read_text() == before
    well(run, *ESTIMATED, "-o", "there.json", "--overwrite")
    assert Cluster.load("cluster.json").devices[0].type == "A100-SXM-80G"


KINDS = ["p2p", "all_reduce", "all_gather", "reduce_scatter"]


@pytest.mark.slow
def test_a_quick_probe_writes_a_cluster_and_prints_both_bandwidths(run: Run) -> None:
    asked = ("--quick", "--device", "cpu", "--largest", "1MiB", "--json")
    out, err = well(run, "cluster", "probe", *asked)
    cluster = Cluster.load("cluster.json")
    assert out == cluster.dumps()
    assert [curve.kind for curve in cluster.curves] == KINDS
    assert cluster.overlaps == ()
    for expected in ("algbw", "busbw", "1 MiB", "p2p among 2 ranks in a node", "Written: cluster.json"):
        assert expected in err


@pytest.mark.slow
def test_under_torchrun_all_ranks_join_and_one_writes(tmp_path: Path) -> None:
    launch = [*torchrun(2), "-m", "autopar"]
    asked = ["cluster", "probe", "--quick", "--device", "cpu", "--largest", "64KiB", "-o", "mine.json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = warm.run([*launch, *asked], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    cluster = Cluster.load(tmp_path / "mine.json")
    assert [device.node for device in cluster.devices] == [0, 0]
    assert {(curve.kind, curve.ranks) for curve in cluster.curves} == {(kind, 2) for kind in KINDS}
    assert done.stderr.count("Written: mine.json") == 1


@pytest.mark.parametrize(
    ("size", "arguments", "message"),
    [
        ("1", (), "torchrun started a single rank"),
        ("2", ("--ranks", "2"), "--ranks 2: torchrun has started the ranks; leave it out"),
        ("two", (), "WORLD_SIZE must be a number, found 'two'"),
    ],
)
def test_a_launcher_that_does_not_fit_is_refused_and_one_rank_says_so(
    run: Run, monkeypatch: pytest.MonkeyPatch, size: str, arguments: tuple[str, ...], message: str
) -> None:
    place = {"RANK": "0", "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    ended(run, 2, message, "cluster", "probe", "--device", "cpu", *arguments)
    monkeypatch.setenv("RANK", "1")
    for others in (("--device", "cpu", "--largest", "lots"), ("--device", "tpu", "--ranks", "2")):
        assert run("cluster", "probe", *others) == (2, "", "")


def test_gpus_are_listed_with_their_sources_and_a_named_cluster_shown(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, err = well(run, "cluster", "list", "--json")
    assert [gpu["name"] for gpu in json.loads(out)] == [gpu.name for gpu in GPUS]
    for gpu in GPUS:
        assert f"{gpu.name}: {gpu.source}" in err
    assert "4x8xA100-80G:200Gbps" in err
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = run("cluster", "list", "4x8xA100-80G:200Gbps", "--json")
    assert code == 0
    assert Cluster.parse(out, Path("stdout")) == cluster_named("4x8xA100-80G:200Gbps")
    assert "Curves from 1 KiB to 1 GiB (estimated)" in err
    # Tables are whole on a terminal of 80 columns.
    assert all(len(line) <= 80 for line in err.splitlines())
    assert "estimated from what is published" in " ".join(err.split())
