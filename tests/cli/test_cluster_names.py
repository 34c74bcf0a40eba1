"""``--cluster`` with a built-in name or a description: planned for, recorded, simulated alike, and echoed."""

import json
from pathlib import Path

import pytest

from autopar.formats.plan import Plan
from calls import Run, refused, well
from random_problems import gpt_profile

TOML = '[[nodes]]\ncount = 2\ngpus = 2\ngpu = "A100"\n[network]\nbandwidth = "10Gbps"\n'


def _simulated(run: Run, *words: str) -> float:
    return float(json.loads(well(run, "simulate", *words, "--json")[0])["step_s"])


def test_a_plan_for_a_named_cluster_records_the_name_and_is_simulated_with_it(run: Run) -> None:
    well(run, "plan", "--cluster", "2x2xV100:1Gbps", "--times-of", "cpu", "--stages", "0-6:2,7-13:2")
    plan = Plan.load("plan.json")
    assert (plan.cluster, plan.cluster_name) == (None, "2x2xV100:1Gbps")
    assert any("estimated from what is published of V100-SXM2-32G" in note for note in plan.notes)
    assert plan.predicted.limit_bytes == (32 * 10**9,) * 2
    assert _simulated(run) == plan.predicted.step_s
    assert _simulated(run, "--cluster", "2x2xV100:400Gbps") < plan.predicted.step_s
    well(run, "show", "plan.json", "--png", "step.png")


def test_a_plan_for_a_described_cluster_records_the_file(run: Run) -> None:
    Path("lab.toml").write_text(TOML)
    well(run, "plan", "--cluster", "lab.toml", "--times-of", "cpu", "--stages", "0-6:2,7-13:2")
    plan = Plan.load("plan.json")
    assert plan.cluster is not None
    assert (plan.cluster.path, plan.cluster_name) == ("lab.toml", None)
    assert _simulated(run) == plan.predicted.step_s
    refused(run, 2, "is read by this command", "simulate", "--trace", "lab.toml", "--overwrite")
    Path("lab.toml").write_text(TOML.replace("10Gbps", "20Gbps"))
    refused(run, 4, "lab.toml has changed since the plan was made", "simulate")


V100S = "4 devices (V100-SXM2-32G) in 2 nodes of 2; within a node 22.3 GB/s per device; between nodes 400 Gbit/s per "


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ("2x2xV100:400Gbps", f"{V100S}node, shared by 2 devices (200 Gbit/s each), of which 80% are counted on"),
        ("2x2xV100:400Gbps/gpu", f"{V100S}device (800 Gbit/s per node), of which 80% are counted on"),
        ("2xH100:400Gbps/gpu", "2 devices (H100-SXM) in 1 node; within a node 38.2 GB/s per device"),
        (
            "lab.toml",
            "4 devices (A100-SXM-80G) in 2 nodes of 2; within a node 229 GB/s per device; between nodes 10 Gb",
        ),
    ],
)
def test_what_was_understood_of_a_cluster_is_echoed_in_a_line(run: Run, cluster: str, said: str) -> None:
    Path("lab.toml").write_text(TOML)
    gpt_profile(blocks=2).save("profile.json")
    assert "cluster estimated: " not in run("plan", "--gpus", "1")[2]
    for command in ("compare", "simulate", "plan"):
        code, _, err = run(command, "--cluster", cluster, "--times-of", "cpu")
        assert code == 0, err
        (line,) = (line for line in err.splitlines() if line.startswith(f"cluster {cluster}: "))
        assert line.startswith(f"cluster {cluster}: {said}")
