"""``autopar cluster``: probing under torchrun and by itself, listing, refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from autopar.formats.cluster import Cluster
from autopar.hardware.clusters import cluster_named
from autopar.hardware.gpus import GPUS

Run = Callable[..., tuple[int, str, str]]

KINDS = ["p2p", "all_reduce", "all_gather", "reduce_scatter"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Run) -> Run:
    """Run ``autopar cluster`` in an empty folder; return (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    return partial(command, "cluster")


def test_a_quick_probe_writes_a_cluster_and_prints_both_bandwidths(run: Run) -> None:
    Path("cluster.json").write_text("an older one")
    code, out, err = run("probe", "--quick", "--device", "cpu", "--largest", "1MiB", "--json")
    assert code == 0, err
    cluster = Cluster.load("cluster.json")
    assert out == cluster.dumps()
    assert [curve.kind for curve in cluster.curves] == KINDS
    assert cluster.overlaps == ()
    for expected in ("algbw", "busbw", "1 MiB", "p2p among 2 ranks in a node", "Written: cluster.json"):
        assert expected in err


def _torchrun(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        "autopar",
        "cluster",
        "probe",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )


def test_under_torchrun_all_ranks_join_and_one_writes(tmp_path: Path) -> None:
    done = _torchrun(tmp_path, "--quick", "--device", "cpu", "--largest", "64KiB", "-o", "mine.json")
    assert done.returncode == 0, done.stderr
    cluster = Cluster.load(tmp_path / "mine.json")
    assert [device.node for device in cluster.devices] == [0, 0]
    assert {(curve.kind, curve.ranks) for curve in cluster.curves} == {(kind, 2) for kind in KINDS}
    assert done.stderr.count("Written: mine.json") == 1


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("probe", "--ranks", "1"), 2, "--ranks 1: links connect at least 2 ranks"),
        (("probe", "--device", "tpu"), 2, "--device must be auto, cpu or cuda, found 'tpu'"),
        (("probe", "-o", "mine.json"), 2, "mine.json exists; pass --overwrite"),
        (("probe", "-o", "no/cluster.json"), 4, "no such folder: no"),
        (("probe", "--largest", "lots"), 2, "--largest 'lots': write a number and a unit"),
        (("probe", "--largest", "1KiB"), 2, "--largest '1KiB': must lie between 16KiB and 64GiB"),
        (("list", "8xH1000"), 2, "no GPU called 'H1000' is known; the nearest are H100-SXM"),
        (("list", "none.toml"), 4, "none.toml: no such cluster file"),
        (("measure",), 2, "No such command 'measure'"),
    ],
)
def test_bad_input_gets_one_line_and_its_exit_code(
    run: Run, arguments: tuple[str, ...], code: int, message: str
) -> None:
    Path("mine.json").write_text("mine")
    found, out, err = run(*arguments)
    assert (found, out) == (code, "")
    assert err.startswith("autopar: ")
    assert err.count("\n") == 1
    assert message in err
    assert Path("mine.json").read_text() == "mine"


@pytest.mark.parametrize(
    ("size", "arguments", "message"),
    [
        ("1", (), "torchrun started a single rank"),
        ("2", ("--ranks", "2"), "--ranks 2: torchrun has started the ranks; leave it out"),
        ("two", (), "WORLD_SIZE must be a number, found 'two'"),
    ],
)
def test_a_launcher_that_does_not_fit_is_refused(
    run: Run, monkeypatch: pytest.MonkeyPatch, size: str, arguments: tuple[str, ...], message: str
) -> None:
    place = {"RANK": "0", "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    code, out, err = run("probe", "--device", "cpu", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    monkeypatch.setenv("RANK", "1")
    code, out, err = run("probe", "--device", "cpu", "--largest", "lots")
    assert (code, out, err) == (2, "", "")
    code, out, err = run("probe", "--device", "tpu", "--ranks", "2")
    assert (code, out, err) == (2, "", "")


def test_known_gpus_are_listed_with_their_sources(run: Run) -> None:
    code, out, err = run("list", "--json")
    assert code == 0
    assert [gpu["name"] for gpu in json.loads(out)] == [gpu.name for gpu in GPUS]
    squeezed = " ".join(err.split())
    for gpu in GPUS:
        assert f"{gpu.name}: {gpu.source}" in squeezed
    assert "4x8xA100-80G:200Gbps" in squeezed


def test_a_named_cluster_is_shown_and_given_as_json(run: Run) -> None:
    code, out, err = run("list", "4x8xA100-80G:200Gbps", "--json")
    assert code == 0
    assert Cluster.parse(out, Path("stdout")) == cluster_named("4x8xA100-80G:200Gbps")
    assert "Curves from 1 KiB to 1 GiB (estimated)" in err
    # Tables are whole on a terminal of 80 columns.
    assert all(len(line) <= 80 for line in err.splitlines())
    assert "estimated from what is published" in " ".join(err.split())


def test_listing_imports_no_torch(tmp_path: Path) -> None:
    script = (
        "import sys; sys.argv = ['autopar', 'cluster', 'list']\n"
        "from autopar.cli import main\n"
        "try:\n    main()\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'pandas', 'matplotlib'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.stdout == "[]\n", found.stderr
