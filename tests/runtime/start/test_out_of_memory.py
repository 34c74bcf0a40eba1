"""A rank that runs out of memory: what was held and what was planned, and the plan that would fit."""

import re
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch

from autopar import api
from autopar.api.runs import remedy_of
from autopar.errors import OutOfMemoryError
from autopar.formats.plan import Plan
from autopar.planner import PlanOptions, plan
from autopar.runtime import device as devices
from played import small_plan
from random_problems import gpt_profile, local_cluster

MIB = 2**20


@pytest.fixture
def planned(tmp_path: Path, command: Callable[..., tuple[int, str, str]]) -> tuple[Plan, Path]:
    """A plan of two devices, beside its profile and cluster."""
    gpt_profile().save(tmp_path / "profile.json")
    local_cluster(2).save(tmp_path / "cluster.json")
    path = tmp_path / "plan.json"
    assert command("plan", str(tmp_path / "profile.json"), "--gpus", "2", "-o", str(path))[0] == 0
    return Plan.load(path), path


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
    ],
)
@pytest.mark.reliability(13)
def test_held_and_planned_bytes_are_said(error: Exception) -> None:
    made = plan(gpt_profile(), local_cluster(2), PlanOptions(gpus=2))
    assert devices.is_out_of_memory(error)
    with patch.object(devices, "held_bytes", lambda device: 3 * made.predicted.peak_bytes[0]):
        found = devices.out_of_memory("rank 0 (here)", error, made, [0], torch.device("cpu"))
    peak, limit = (each / MIB for each in (made.predicted.peak_bytes[0], made.predicted.limit_bytes[0]))
    said = f"the process held at most {3 * peak:,.0f} MiB, {peak:,.0f} MiB of {limit:,.0f} MiB were planned"
    assert str(found).startswith("rank 0 (here): ")
    assert str(found).endswith(said)
    # A third of the limit, or less than this plan takes.
    assert found.memory_bytes <= min(made.predicted.limit_bytes[0] // 3, made.predicted.peak_bytes[0])


@pytest.mark.reliability(33)
def test_a_gpu_with_less_memory_than_planned_is_refused_before_anything_is_put_there(
    planned: tuple[Plan, Path],
) -> None:
    made, path = planned
    most = max(made.predicted.peak_bytes)
    stages, gpu = range(len(made.stages)), torch.device("cuda", 0)
    for there in (most, most - 1, most // 2):
        with patch("torch.cuda.get_device_properties", return_value=Mock(total_memory=there)) as asked:
            asked.return_value.name = "A GPU"
            devices.check_capacity(made, 0, stages, torch.device("cpu"))
            if there == most:
                devices.check_capacity(made, 0, stages, gpu)
                continue
            said = r"rank 0 \(setting up\): A GPU has .* MiB were planned"
            with pytest.raises(OutOfMemoryError, match=said) as caught:
                devices.check_capacity(made, 0, stages, gpu)
        assert abs(caught.value.memory_bytes - there) <= 2 * MIB
        assert re.search("--memory|no plan of these devices", str(remedy_of(caught.value, made, path)))
    # Of several stages of a rank, what is planned is what it holds at most, which every one of them says.
    with patch("torch.cuda.get_device_properties", return_value=Mock(total_memory=MIB)):
        devices.check_capacity(small_plan((1, 1), 2), 0, [0, 1], gpu)


@pytest.mark.reliability(13)
def test_a_plan_that_would_fit_is_named_or_that_nothing_does(planned: tuple[Plan, Path]) -> None:
    made, path = planned
    limit = (max(made.predicted.peak_bytes) - MIB) // MIB * MIB
    said = remedy_of(OutOfMemoryError("none left", limit), made, path)
    assert said is not None
    found = re.fullmatch(r"`autopar plan (\S+) --gpus 2 --batch 16 --memory (\d+MiB)` plans one .*: (\S+) s a.*", said)
    assert found is not None
    again = api.plan(found[1], str(path.parent / "cluster.json"), gpus=2, batch=16, memory_bytes=limit)
    assert max(again.predicted.peak_bytes) <= limit
    assert float(found[3]) == pytest.approx(again.predicted.step_s, rel=5e-3)
    assert str(remedy_of(OutOfMemoryError("", MIB), *planned)).startswith("no plan of these devices fits 1MiB each: ")
    (planned[1].parent / "profile.json").unlink()
    said = remedy_of(OutOfMemoryError("none left", 5 * MIB), *planned)
    assert said == "plan again with `memory_bytes='5MiB'`"
