"""Launches of autopar's own ranks: scripts that shells take, a manifest, machines in the order of ranks."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from autopar.api.exports import export_plan
from autopar.errors import UsageError
from equal_plans import llama_profile, planned


def launch(name: str, path: Path, nodes: Sequence[int], device: str = "cuda", **options: Any) -> str:  # noqa: ANN401
    """Return the launch of a plan of two stages of two replicas, on devices of these nodes."""
    plan, profile, cluster = planned(llama_profile(), "1f1b", 2, 2, **options)
    devices = [each.model_copy(update={"node": node}) for each, node in zip(cluster.devices, nodes, strict=True)]
    inputs = plan.model_copy(update={"device_type": device, "threads": 3}), profile
    return export_plan(name, (*inputs, cluster.model_copy(update={"devices": tuple(devices)})), path).text


@pytest.mark.parametrize("name", ["torchrun", "slurm"])
@pytest.mark.parametrize("nodes", [(0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 2, 3)])
def test_shells_take_the_scripts_with_any_name_of_the_plan(name: str, nodes: Sequence[int], tmp_path: Path) -> None:
    for path in (tmp_path / "plan.json", tmp_path / "a 'plan' $(touch hacked).json"):
        script = launch(name, path, nodes)
        found = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
        assert (found.returncode, found.stderr) == (0, "")
        assert script.splitlines()[0] == "#!/bin/bash"


def test_as_many_ranks_are_launched_on_every_machine_of_any_plan_that_runs(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert "\nexport PYTHONSAFEPATH=1\nexec torchrun --standalone --nproc-per-node 4 -m autopar worker" in launch(
        "torchrun", path, (0,) * 4
    )
    two = launch("torchrun", path, (0, 0, 1, 1))
    assert '--nnodes 2 --rdzv-backend c10d --rdzv-id autopar --rdzv-endpoint "$HOST:29500" --nproc-per-node 2' in two
    slurm = launch("slurm", path, (0, 0, 1, 1))
    for line in ("--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2"):
        assert f"#SBATCH {line}\n" in slurm
    assert "#SBATCH --cpus-per-task=3\n" in launch("slurm", path, (0, 0, 1, 1), "cpu")
    trainer = yaml.safe_load(launch("kubernetes", path, (0, 0, 1, 1)))["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 2)
    assert trainer["env"] == [{"name": "PYTHONSAFEPATH", "value": "1"}]
    assert trainer["command"] == ["torchrun", "-m", "autopar", "worker", str(path)]
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": "2"}}
    assert yaml.safe_load(launch("kubernetes", path, (0,) * 4, "cpu"))["spec"]["trainer"]["resourcesPerNode"] == {
        "limits": {"cpu": "12"}
    }
    path = tmp_path / "plan.json"
    assert "predicted" in launch("torchrun", path, (0,) * 4, recompute=(1,), depths=(3, 1))
    for name in ("torchrun", "slurm", "kubernetes"):
        with pytest.raises(UsageError, match="machines have 3, 1 ranks"):
            launch(name, path, (0, 0, 0, 1))
